"""Measures three differences between PFLlib's methods and the papers on a linear model; makes pfllib.csv.

``python experiments/libraries/pfllib_methods.py FOLDER COMMIT > experiments/libraries/pfllib.csv``, where the folder
has PFLlib's files, in an environment with torch, scikit-learn and h5py.
"""

import argparse
import copy
import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

# labels of the two clients
LABELS = (torch.tensor([0, 0, 0, 0, 0, 0, 1, 2]), torch.tensor([0, 1, 1, 1, 1, 1, 1, 2]))
LR = 0.1


class Net(nn.Module):
    """A linear classifier with 4 inputs and 3 classes."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x)


def examples(dataset, k, is_train=True, few_shot=0):
    """Return the examples of client k, as PFLlib's ``read_client_data`` does."""
    torch.manual_seed(k)
    return list(zip(torch.randn(8, 4), LABELS[k], strict=True))


def arguments(**others):
    """Return PFLlib's arguments: two clients with one batch, and a visit of one step."""
    common = {"model": Net(0), "device": "cpu", "num_classes": 3, "batch_size": 8, "local_learning_rate": LR}
    numbers = dict.fromkeys(
        ("few_shot", "client_drop_rate", "train_slow_rate", "send_slow_rate", "num_new_clients", "dlg_gap"), 0
    )
    ones = dict.fromkeys(("global_rounds", "local_epochs", "join_ratio", "eval_gap", "learning_rate_decay_gamma"), 1)
    texts = dict.fromkeys(("algorithm", "dataset", "goal", "save_folder_name"), "none")
    missing = dict.fromkeys(
        ("random_join_ratio", "time_select", "time_threthold", "top_cnt", "auto_break", "dlg_eval"), False
    )
    more = {"num_clients": 2, "learning_rate_decay": False, "batch_num_per_client": 1, "fine_tuning_epoch_new": 0}
    return SimpleNamespace(**common, **numbers, **ones, **texts, **missing, **more, **others)


def client(kind, **others):
    """Return client 0."""
    return kind(arguments(**others), 0, 8, 8, train_slow=False, send_slow=False)


def vector(model):
    """Return the parameters as one vector."""
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def fedlc():
    """The largest difference between the margins of two clients with unequal label counts."""
    from flcore.servers.serverlc import FedLC

    first, second = FedLC(arguments(tau=1.0), 0).clients
    counts = (first.sample_per_class - second.sample_per_class).abs().max()
    return [float((first.calibration - second.calibration).abs().max()), float(counts)]


def fedamp():
    """The model after a visit with lambda 0 and with lambda 100: the norm of their difference."""
    from flcore.clients.clientamp import clientAMP

    results = []
    for lamda in (0.0, 100.0):
        one = client(clientAMP, alphaK=1.0, lamda=lamda)
        one.client_u = Net(1)
        one.train()
        results.append(vector(one.model))
    return [float((results[0] - results[1]).norm())]


def apfl():
    """Distances of the personal model's step from one by its own gradient and from one by the mixture's."""
    from flcore.clients.clientapfl import clientAPFL

    one = client(clientAPFL, alpha=0.5)
    one.alpha_update = lambda: None
    one.model_per.load_state_dict(Net(1).state_dict())
    before, shared = copy.deepcopy(one.model_per), copy.deepcopy(one.model)
    one.train()
    # at the end of a visit, the personal model is replaced by the mixture
    stepped = (vector(one.model_per) - 0.5 * vector(one.model)) / 0.5
    mixture = copy.deepcopy(before)
    x, y = map(torch.stack, zip(*examples("", 0), strict=True))
    gradients = torch.autograd.grad(cross_entropy(shared(x), y), [*shared.parameters()])
    for mixed, own, theirs, grad in zip(
        mixture.parameters(), before.parameters(), shared.parameters(), gradients, strict=True
    ):
        mixed.data = 0.5 * own.data + 0.5 * (theirs.data - LR * grad)
    found = []
    for model, factor in ((before, 1.0), (mixture, 0.5)):
        gradient = torch.autograd.grad(cross_entropy(model(x), y), [*model.parameters()])
        step = LR * factor * torch.cat([part.flatten() for part in gradient])
        found.append(float((stepped - (vector(before) - step)).norm()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="PFLlib's files")
    parser.add_argument("commit", help="their commit")
    given = parser.parse_args()
    sys.path.insert(0, str(given.folder / "system"))
    import flcore.clients.clientbase
    import flcore.servers.serverbase

    flcore.clients.clientbase.read_client_data = flcore.servers.serverbase.read_client_data = examples
    output, sys.stdout = sys.stdout, sys.stderr  # PFLlib prints
    rows = csv.writer(output, lineterminator="\n")
    rows.writerow(["library", "version", "method", "measured", "values"])
    for method, measure in {"FedLC": fedlc, "FedAMP": fedamp, "APFL": apfl}.items():
        text = measure.__doc__.rstrip(".")
        rows.writerow(["PFLlib", given.commit, method, text, " ".join(f"{x:.6g}" for x in measure())])
