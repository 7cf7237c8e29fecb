"""Neither the number of workers nor an interruption changes any output of a run, whatever observes it."""

import csv
import functools

import numpy as np
import pytest
import torch
from helpers.domains import TwoDomains
from helpers.methods import METHODS
from helpers.runs import Stops, small_trainer
from helpers.tiers import sample
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from fl_lightning import callbacks
from fl_lightning.callbacks import Callback, Measurement
from fl_lightning.data import Dirichlet
from fl_lightning.methods import (
    IPM,
    MOON,
    NNM,
    SCAFFOLD,
    CenteredClipping,
    FedDecorr,
    FedExLoRA,
    FedExP,
    FedProx,
    GeometricMedian,
    LoRAProduct,
    MultiKrum,
    TrimmedMean,
)
from fl_lightning.models import MLP, ImageClassifier, Projector, with_lora
from fl_lightning.storage.checkpoint import unpack_rows
from fl_lightning.utilities.errors import ClientError

METHODS = {
    "SCAFFOLD, MOON and FedDecorr": lambda: [SCAFFOLD(), MOON(), FedDecorr()],
    "FedExP": lambda: [FedExP(eps=0)],
    "FedExLoRA": lambda: [FedExLoRA()],
    "LoRAProduct": lambda: [LoRAProduct()],
    "IPM, NNM, CenteredClipping": lambda: [IPM(share=0.5, epsilon=2.0), NNM(1), CenteredClipping(1.0, 2)],
    "NNM, MultiKrum, FedProx": lambda: [NNM(1), MultiKrum(0, chosen=2), FedProx(0.1)],
    "GeometricMedian": lambda: [GeometricMedian()],
    "IPM, TrimmedMean, FedProx": lambda: [IPM(share=0.5, epsilon=2.0), TrimmedMean(1), FedProx(0.1)],
    **METHODS,
}
KEEP_ENTRIES = ("FedAS", "FedBN", "FedBN, Shifted", "FedPer", "FedProto", "LGFedAvg", "Local")
ARGUMENTS = {
    "BatchNormGap": {"every_n_rounds": 2},
    "BestCheckpoint": {"monitor": "test/loss", "mode": "max"},
    "CCVR": {"samples_per_class": 20, "epochs": 1},
    "CostLedger": {"every_n_rounds": 2},
    "DeviationBound": {"every_n_rounds": 2, "max_clients": 2},
    "DomainMetrics": {"every_n_rounds": 1},
    "Drift": {"every_n_rounds": 2, "max_clients": 2},
    "EarlyStopping": {"monitor": "test/loss", "mode": "max", "patience": 9},
    "Embedding": {"every_n_rounds": 2, "examples": 16, "clients": [0, 2]},
    "LayerAlignment": {"every_n_rounds": 2},
    "LayerSimilarity": {"every_n_rounds": 1, "examples": 60, "max_clients": 3},
    "LocalLosses": {},
    "NeuralCollapse": {},
    "PerClassAccuracy": {"every_n_rounds": 2, "max_clients": 2},
    "PersonalAccuracy": {"every_n_rounds": 2, "max_clients": 2, "fine_tune": "always", "fine_tune_steps": 2},
    "ProgressBar": {},
    "RunRecord": {},
    "Scores": {"every_n_rounds": 2, "local_steps": 1},
    "SpectrumMonitor": {"local_models": True, "local_every_n_rounds": 2, "examples": 60},
}
OF_A_GLOBAL_MODEL = ("BatchNormGap", "CCVR", "Scores")
OF_THE_MACHINE = ("time/", "placed/", "memory/", "seconds", "memory_")
UNCOMPARED = ("lock", "environment.json")


class ByStep(ImageClassifier):
    """Its rate falls with each step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.99), "interval": "step"}]


class Plateau(ImageClassifier):
    """Its rate falls by half after each round whose test loss is no higher."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = ReduceLROnPlateau(optimizer, "max", 0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "test/loss"}}


def fit(folder, workers, name, precision="32-true", stop=None, ckpt_path=None):
    left_out = OF_A_GLOBAL_MODEL if name in KEEP_ENTRIES else ()
    watching = [getattr(callbacks, kind)(**given) for kind, given in ARGUMENTS.items() if kind not in left_out]
    how = {"max_rounds": 3, "participation": 0.75, "threads_per_worker": 1, "precision": precision}
    if name != "FedExP":  # which has its own server rate
        how["server_optimizer"] = functools.partial(torch.optim.SGD, lr=1.0, momentum=0.5)
    trainer = small_trainer(folder, callbacks=[*watching, Stops(stop)], devices=workers, logger=True, name="run", **how)
    data = TwoDomains(
        num_clients=4, batch_size=32, train_size=160, test_size=120, eval_batch_size=50, partitioner=Dirichlet(0.5)
    )
    torch.manual_seed(0)
    kind = Plateau if name == "FedBN" else ByStep
    model = kind(MLP(64, [32, 24]), Projector(16), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    model.encoder.layers.append(torch.nn.Dropout(0.2))
    model = with_lora(model) if "LoRA" in name else model
    trainer.fit(model, data, METHODS[name](), ckpt_path)
    return outputs(trainer)


def outputs(trainer):
    """All that a run leaves: the values by file and place."""
    found = dict(leaves(trainer.server.state, "global model"))
    found |= leaves([dict(row) for row in trainer.history], "history")
    for path in sorted(path for path in trainer.run_dir.rglob("*") if path.is_file()):
        if not path.name.endswith(UNCOMPARED) and path.parent.name != "failures":
            name = "events" if "tfevents" in path.name else str(path.relative_to(trainer.run_dir))
            found |= leaves(contents(path), name)
    return found


def contents(path):
    """What a file holds, as plain values, arrays and tensors."""
    if "tfevents" in path.name:
        events = EventAccumulator(str(path.parent)).Reload()
        return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    readers = {
        ".npz": lambda: dict(np.load(path)),
        ".csv": lambda: list(csv.DictReader(path.read_text().splitlines())),
        ".pt": lambda: torch.load(path, weights_only=True),
        ".ckpt": lambda: checkpoint_of(path),
    }
    return readers.get(path.suffix, path.read_bytes)()


def checkpoint_of(path):
    """A checkpoint with the metrics as rows, and without the digests of client files, which are compared themselves.

    Equal values have other bytes where one of them has objects that are the same one.
    """
    found = torch.load(path, weights_only=True)
    if "clients" in found:
        found["clients"] = {k: name for k, (name, _) in found["clients"].items()}
    return found | {"history": unpack_rows(found["history"])} if "history" in found else found


def leaves(value, place):
    """The values in nested containers by their place, but for those that depend on the machine."""
    if isinstance(value, dict | list | tuple) and value:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if not str(key).startswith(OF_THE_MACHINE):
                yield from leaves(one, f"{place}: {key}")
    elif isinstance(value, torch.Tensor):
        yield (
            place,
            (value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()),
        )
    elif isinstance(value, np.ndarray):
        yield place, (value.dtype, value.shape, value.tobytes())
    else:
        yield place, repr(value)


def test_all_callbacks_are_compared():
    kinds = {getattr(callbacks, name) for name in callbacks.__all__} - {Callback, Measurement}
    assert {kind.__name__ for kind in kinds} == ARGUMENTS.keys()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """``alone(name, precision)`` is the outputs of the run by one worker that nothing interrupts."""
    return functools.cache(lambda *how: fit(tmp_path_factory.mktemp("alone"), 1, *how))


@pytest.mark.filterwarnings("ignore:.* acts on A and B, not on their product")  # the server's momentum
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("workers", [(2,), (1, 2)])
@pytest.mark.parametrize("precision", sample(["32-true", "bf16-mixed"], "32-true"))
@pytest.mark.parametrize("name", sample([*METHODS], "SCAFFOLD, MOON and FedDecorr", "FedBN", "Chosen, FedProx"))
def test_workers_and_a_resume_change_no_output(tmp_path, alone, name, precision, workers):
    one = alone(name, precision)
    if len(workers) == 2:
        with pytest.raises(ClientError, match="stopped"):
            fit(tmp_path, workers[0], name, precision, stop=1)
    other = fit(tmp_path, workers[-1], name, precision, ckpt_path="last" if len(workers) == 2 else None)
    different = [place for place in {**one, **other} if one.get(place) != other.get(place)]
    assert not different, "\n".join(different)
