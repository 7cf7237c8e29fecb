"""Measures four differences between FL-bench's methods and the papers on a small model; makes flbench.csv.

``python experiments/libraries/flbench_methods.py FOLDER COMMIT > experiments/libraries/flbench.csv``, where the folder
has FL-bench's files, in an environment with torch, torchvision, omegaconf, rich, scikit-learn and nvidia-ml-py.
"""

import argparse
import copy
import csv
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

LR = 0.1


class Examples(Dataset):
    """Sixteen examples of three classes."""

    def __init__(self):
        torch.manual_seed(0)
        self.x, self.y = torch.randn(16, 4), torch.arange(16) % 3

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def train(self):
        pass


def network(seed):
    """Return a network of FL-bench with two linear layers."""
    from src.utils.models import DecoupledModel

    torch.manual_seed(seed)
    model = DecoupledModel()
    model.base, model.classifier, model.dropout = nn.Linear(4, 5), nn.Linear(5, 3), []
    return model


def client(kind, **of_method):
    """Return the client object of a worker, with two clients of one batch each."""
    common = SimpleNamespace(use_cuda=False, buffers="global", batch_size=8, local_epoch=1)
    common.reset_optimizer_on_global_epoch = True
    arguments = SimpleNamespace(common=common, optimizer=SimpleNamespace(lr=LR), **of_method)
    parts = [{"train": [*range(8 * k, 8 * k + 8)], "val": [], "test": []} for k in range(2)]
    sgd, device = partial(torch.optim.SGD, lr=LR), torch.device("cpu")
    parts_of = {"optimizer_cls": sgd, "lr_scheduler_cls": None, "dataset": Examples(), "data_indices": parts}
    return kind(model=network(0), args=arguments, device=device, return_diff=False, **parts_of)


def package(k, shared, **more):
    """Return the message of the server to client k."""
    common = {"client_id": k, "local_epoch": 1, "optimizer_state": {}, "lr_scheduler_state": {}}
    return {**common, "regular_model_params": dict(shared.named_parameters()), "personal_model_params": {}, **more}


def lgfedavg():
    """With one global layer, whether a client's first and last layer are the server's in its second visit."""
    from src.client.lgfedavg import LGFedAvgClient

    one, server = client(LGFedAvgClient, lgfedavg=SimpleNamespace(num_global_layers=1)), network(1)
    before = one.package()["personal_model_params"]
    one.set_parameters(package(0, server, personal_model_params=before))
    names = ("base.weight", "classifier.weight")
    return [float(torch.equal(one.model.get_parameter(n), server.get_parameter(n))) for n in names]


def pfedme():
    """Distances of the personal model that a client returns from the one it received, and from the one it trained."""
    from src.client.pfedme import pFedMeClient

    one = client(pFedMeClient, pfedme=SimpleNamespace(pers_lr=LR, lamda=15.0, mu=0.0, k=5))
    one.set_parameters(package(0, network(0), personalized_model_params=network(0).state_dict()))
    one.fit()
    returned = one.package()["personalized_model_params"]
    found = (network(0).state_dict(), one.model.state_dict())
    return [float(sum((returned[name] - other[name]).square().sum() for name in other).sqrt()) for other in found]


def apfl():
    """The distance that one batch moves the global model, over that of one step by its gradient."""
    from src.client.apfl import APFLClient

    one, shared = client(APFLClient, apfl=SimpleNamespace(alpha=0.5, adaptive_alpha=0)), network(0)
    one.set_parameters(package(0, shared, local_model_params=network(1).state_dict(), alpha=torch.tensor(0.5)))
    start = copy.deepcopy(list(one.model.parameters()))
    loss = cross_entropy(one.model(one.dataset.x[:8]), one.dataset.y[:8])
    step = [LR * grad for grad in torch.autograd.grad(loss, [*one.model.parameters()])]
    one.fit()
    moved = [after.detach() - before.detach() for after, before in zip(one.model.parameters(), start, strict=True)]
    return [float(norm(moved) / norm(step))]


def norm(parts):
    """Return the Euclidean norm over several tensors."""
    return torch.cat([part.flatten() for part in parts]).norm()


def fedala():
    """The largest distance from 1, their initial value, of the weights of a second client that does not learn any."""
    from src.client.fedala import FedALAClient

    settings = {"layer_idx": 2, "num_pre_loss": 10, "eta": 1.0, "threshold": 0.1, "rand_percent": 1.0}
    one = client(FedALAClient, fedala=SimpleNamespace(**settings))
    one.set_parameters(package(0, network(1)))
    one.args.fedala.eta = 0.0
    one.set_parameters(package(1, network(2)))
    return [max(float((weight - 1).abs().max()) for weight in one.weights)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="FL-bench's files")
    parser.add_argument("commit", help="their commit")
    given = parser.parse_args()
    sys.path.insert(0, str(given.folder))
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["library", "version", "method", "measured", "values"])
    for method, measure in {"LGFedAvg": lgfedavg, "PFedMe": pfedme, "APFL": apfl, "FedALA": fedala}.items():
        text = measure.__doc__.rstrip(".")
        rows.writerow(["FL-bench", given.commit, method, text, " ".join(f"{x:.6g}" for x in measure())])
