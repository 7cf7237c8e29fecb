"""Clients side by side: what each gives is what it gives alone, up to rounding, whatever trains."""

from functools import partial

import pytest
import torch
from helpers.beside import SIZES, Arrays, arrays, assert_near, assert_same_alone, digits, mlp, sgd, trained
from helpers.errors import assert_names, refused, warned
from helpers.runs import Stops, assert_same_bits, small_trainer
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models.resnet import BasicBlock

from fl_lightning import Method, Weighted
from fl_lightning.data import FederatedDataModule, RandomCrop, RandomFlip
from fl_lightning.engine import recording, run
from fl_lightning.engine.groups import choosing
from fl_lightning.engine.processes import apart
from fl_lightning.errors import ClientError
from fl_lightning.methods import (
    MOON,
    SCAFFOLD,
    DeCov,
    FedBABU,
    FedBN,
    FedCKA,
    FedDecorr,
    FedDyn,
    FedLC,
    FedNova,
    FedProto,
    FedProx,
    FedRS,
    FedUV,
    FixBN,
    Freeze,
    Local,
    StructuredDeCov,
)
from fl_lightning.models import MLP, MOONCNN, Encoder, FedCKACNN, Logistic
from fl_lightning.systems import SystemsHeterogeneity


@pytest.fixture(autouse=True)
def _quick(undrawn, monkeypatch):
    """What the clients come to is in states and metrics; a trial in this process takes less time than in a fork."""
    monkeypatch.setattr(choosing, "can_try_apart", lambda device: False)
    monkeypatch.setattr(choosing, "LEAST_CLIENTS", 2)
    monkeypatch.setattr(run, "code_of_run", lambda *args: {})


class Smooth(Encoder):
    """Layers with tanh."""

    def __init__(self, inputs=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh())
        self.out_features, self.early = 8, ("layers.2", "layers.4")

    def forward(self, x):
        return self.layers(x)


MOMENTUM = partial(mlp, sgd(momentum=0.9, weight_decay=1e-3))


class Normed(Encoder):
    """BatchNorm after a layer without bias, which would have no gradient but rounding."""

    def __init__(self, inputs=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh())
        self.out_features, self.early = 12, ("layers.1", "layers.3")

    def forward(self, x):
        return self.layers(x)


def normed(inputs=64):
    return mlp(encoder=Normed(inputs))


# units of ReLU that are dead have no variance, and FedDecorr divides by it: it makes 1e-9 of a rounding of 1e-15
SMOOTH = {"model": lambda: mlp(encoder=Smooth())}
CLIPPED = {"gradient_clip_val": 0.5}
SOME = {"cohort_size": 4, "max_rounds": 4, "local_epochs": 1}

METHODS = {
    "FedAvg": (list, {}),
    "FedAvg without a look at a client": (list, {"visits": False}),
    "FedProx": (lambda: [FedProx(0.1)], {}),
    "SCAFFOLD": (lambda: [SCAFFOLD()], {}),
    "SCAFFOLD after the step": (lambda: [SCAFFOLD(correction="post_step")], {"model": MOMENTUM}),
    "SCAFFOLD by gradients": (lambda: [SCAFFOLD("gradients", weighting="examples")], {"model": MOMENTUM}),
    "SCAFFOLD scaled": (lambda: [SCAFFOLD("gradients", "post_step", scaled=True)], CLIPPED),
    "SCAFFOLD clipped": (lambda: [SCAFFOLD("gradients", scaled=True)], CLIPPED),
    "SCAFFOLD of some": (lambda: [SCAFFOLD()], SOME),
    "FedDyn": (lambda: [FedDyn(0.1)], {}),
    "FedDyn of all": (lambda: [FedDyn(0.1, reported="all", scaled=False)], SOME),
    "FedNova": (lambda: [FedNova()], {"model": partial(mlp, sgd(momentum=0.9))}),
    "FedNova with FedProx": (lambda: [FedNova(), FedProx(0.1)], {}),
    **{
        f"FedLC {missing} {denominator} {margin}": (
            partial(lambda *given: [FedLC(1.0, *given)], missing, denominator, margin),
            {"local_epochs": 1},
        )
        for missing, denominator, margin in (
            ("floor", "all", "fourth_root"),
            ("mask", "exclude_true", "log_prior"),
            ("clamp", "exclude_true", "fourth_root"),
            ("floor", "exclude_true", "log_prior"),
            ("clamp", "all", "log_prior"),
        )
    },
    "FedRS": (lambda: [FedRS(use_bias=False)], {"model": MOMENTUM}),
    "FedRS by frequency": (lambda: [FedRS(mode="frequency")], {}),
    "FedDecorr": (lambda: [FedDecorr()], SMOOTH),
    "FedDecorr of the paper": (lambda: [FedDecorr(form="paper")], SMOOTH),
    "FedDecorr of singular values": (lambda: [FedDecorr(form="singular_values")], SMOOTH),
    "DeCov": (lambda: [DeCov()], {}),
    "StructuredDeCov": (lambda: [StructuredDeCov(groups=3, gamma=0.1)], {}),
    "FedUV": (lambda: [FedUV()], {}),
    "FedUV spectral": (lambda: [FedUV(hinge="square", detach_bandwidth=True, spectral=0.1)], {}),
    **{
        f"FedCKA {similarity}": (partial(lambda given: [FedCKA(similarity=given)], similarity), {"local_epochs": 1})
        for similarity in ("linear", "debiased", "rbf", "frobenius", "cosine")
    },
    "MOON": (lambda: [MOON()], {}),
    "MOON with a pool": (lambda: [MOON(pool_size=2, first="random")], {"max_rounds": 3, "local_epochs": 1}),
    "MOON from the global model": (lambda: [MOON(first="global")], {"local_epochs": 1}),
    "MOON of some": (lambda: [MOON(pool_size=2)], SOME),
    "FedProto": (lambda: [FedProto()], {}),
    "FedProto with weights": (lambda: [FedProto(aggregate_weights=True)], {}),
    "FedBABU": (lambda: [FedBABU()], {"model": MOMENTUM}),
    "Freeze": (lambda: [Freeze(orthogonal=True)], {"model": MOMENTUM}),
    "Freeze that resets": (lambda: [Freeze(mode="reset_each_round")], {"model": MOMENTUM}),
    "FedBN": (lambda: [FedBN()], {"model": normed}),
    "FedBN of some": (lambda: [FedBN()], {"model": normed, **SOME}),
    "FixBN": (lambda: [FixBN()], {"model": normed}),
    "Local": (lambda: [Local()], SOME),
    "FedProx, SCAFFOLD, FedLC": (lambda: [FedProx(0.1), SCAFFOLD(), FedLC()], {}),
    "MOON, FedCKA": (lambda: [MOON(pool_size=2), FedCKA()], SOME),
    "FedDyn, FedRS": (lambda: [FedDyn(0.1), FedRS()], {}),
    "FedNova, FedBABU": (lambda: [FedNova(), FedBABU()], {"model": partial(mlp, sgd(momentum=0.9))}),
    "FedBN, FedUV": (lambda: [FedBN(), FedUV()], {"model": normed}),
    "FedBN, SCAFFOLD": (lambda: [FedBN(), SCAFFOLD()], {"model": normed}),
    "FedProto, DeCov": (lambda: [FedProto(aggregate_weights=True), DeCov()], {}),
    "Local, FedProx, StructuredDeCov": (lambda: [Local(), FedProx(0.1), StructuredDeCov()], {}),
    "Freeze, FedLC, FedProx": (lambda: [Freeze(), FedLC(), FedProx(0.1)], {"model": MOMENTUM}),
    "MOON, SCAFFOLD clipped": (lambda: [MOON(), SCAFFOLD("gradients")], CLIPPED),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_side_by_side_what_it_gives_one_by_one(tmp_path, name):
    methods, how = METHODS[name]
    assert_same_alone(tmp_path, methods=methods, **how)


REPEATED = ["FedAvg", "FedProx, SCAFFOLD, FedLC", "FedUV", "FedDyn", "MOON", "FedBN, SCAFFOLD", "FedProto"]


@pytest.mark.parametrize("name", REPEATED)
def test_a_program_that_is_repeated_gives_the_bits_of_one_that_is_run(tmp_path, monkeypatch, name):
    methods, how = METHODS[name]
    how = {**how, "max_rounds": 3}
    repeated = []
    repeat = recording.Recording.repeat
    monkeypatch.setattr(recording.Recording, "repeat", lambda *given: repeated.append(1) or repeat(*given))
    one, _ = trained(tmp_path, 3, methods=methods, **how)
    assert bool(repeated) == (name != "FedProto")  # it looks at the epoch
    monkeypatch.setattr(recording.Recordings, "find", lambda *given: None)
    other, _ = trained(tmp_path / "run", 3, methods=methods, **how)
    assert_near(one["state"], other["state"], 0.0)
    assert_near(one["remembered"], other["remembered"], 0.0)


@pytest.mark.parametrize("name", ["FedAvg", "FedProx, SCAFFOLD, FedLC", "FedUV", "FedCKA linear", "FedDecorr"])
def test_it_is_so_in_single_precision_for_as_long_as_rounding_has_not_grown(tmp_path, name):
    methods, how = METHODS[name]
    # FedCKA compares from the second visit on
    how = {**how, "precision": "32-true", "local_epochs": 1, "max_rounds": 1 + ("FedCKA" in name), "local_steps": 10}
    assert_same_alone(tmp_path, 1e-5, methods=methods, **how)


# ---------------------------------------------------------------------- models


class Own(LightningModule):
    """A network of one's own, with a linear classifier."""

    def __init__(self, optimizer=None):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 3)
        self.optimizer = optimizer or sgd(momentum=0.9, weight_decay=0.01)
        self.build()

    def build(self):
        pass

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Residual(Encoder):
    """Two residual blocks with GroupNorm."""

    def __init__(self):
        super().__init__()
        norm = partial(nn.GroupNorm, 2)
        wider = nn.Conv2d(4, 8, 1, 2, bias=False)
        blocks = (BasicBlock(4, 4, norm_layer=norm), BasicBlock(4, 8, 2, wider, norm_layer=norm))
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1, bias=False), norm(4), nn.ReLU(), *blocks)
        self.out_features, self.early = 8, ("layers.2", "layers.3")

    def forward(self, x):
        return self.layers(x).mean(dim=(2, 3))


class Tied(Own):
    """Two layers share their weights, and a parameter has two names."""

    def build(self):
        self.again = nn.Linear(6, 8)
        self.again.weight = nn.Parameter(self.body[0].weight.detach().T.clone())
        self.twice = nn.Linear(8, 6, bias=False)
        self.twice.weight = self.body[0].weight

    def forward(self, x):
        return self.head(torch.tanh(self.twice(self.again(self.body(x)))))


class Frozen(Own):
    """Neither its first layer nor the BatchNorm after it is trained; the statistics move."""

    def build(self):
        self.norm = nn.BatchNorm1d(6).requires_grad_(False)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


class Transient(Own):
    """Puts another tensor in the place of a buffer that is not in its state, and reads it in the next step."""

    def build(self):
        self.register_buffer("last", torch.zeros(6), persistent=False)

    def forward(self, x):
        z = self.body(x)
        before, self.last = self.last, z.detach().mean(0)
        return self.head(z - before)


class Rebinds(Own):
    """Puts other tensors in the places of its buffers, and changes one in place."""

    def build(self):
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("total", torch.tensor(0.0))
        self.register_buffer("last", torch.zeros(6), persistent=False)

    def forward(self, x):
        z = self.body(x)
        self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        self.seen = self.seen + len(x)
        self.total += z.detach().sum()
        return self.head(z - self.mean)


class Unused(Own):
    """Has a parameter that no loss depends on, and one that only batches of 8 use."""

    def build(self):
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(3))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.sometimes.square().mean() if len(batch[0]) == 8 else loss


class Decays(Own):
    """Its loss reads all of its parameters."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss + 0.01 * sum(p.square().sum() for p in self.parameters()), "more": 1}


class Counts(Own):
    """Its loss depends on the number of the batch in its pass, of the pass, and of the round."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + batch_idx) * (1 + 0.1 * self.current_epoch)


class Skips(Own):
    """Leaves out batches of 2."""

    def training_step(self, batch, batch_idx):
        return None if len(batch[0]) == 2 else super().training_step(batch, batch_idx)


class SkipsFirst(Own):
    """Leaves out the first batch of the second pass, in which one of its parameters has no part either."""

    def build(self):
        self.early = nn.Parameter(torch.ones(3))

    def training_step(self, batch, batch_idx):
        if batch_idx == 0 and self.current_epoch % 2:
            return None
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch % 2 else loss + self.early.square().mean()


class Scalar(Own):
    """Has a parameter and a buffer of one number."""

    def build(self):
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, x):
        self.seen += x.mean()
        return super().forward(x * self.scale)


class Logs(Own):
    """Logs in all ways."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.body(x)
        norm = z.square().sum(1)
        loss = nn.functional.cross_entropy(self.head(z), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", norm.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("least", norm.min(), reduce_fx=min, on_step=False, on_epoch=True)
        self.log("total", norm.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("last", norm[0], on_step=True, on_epoch=False)
        self.log("number", batch_idx + 1.0, batch_size=1)
        self.log("examples", len(x), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log_dict({"a": z.mean(), "b": torch.tensor(2.0)}, batch_size=3)
        if len(x) < 8:
            self.log("of_last", z.mean())
        self.log("hidden", z.mean(), logger=False)
        return loss


class Normal(Own):
    """The weights of its layers are computed from others."""

    def build(self):
        parametrizations.weight_norm(self.body[0])
        parametrizations.orthogonal(self.head)


class Attends(Own):
    """Looks numbers up in a table, and lets them attend to each other."""

    def build(self):
        self.table = nn.Embedding(2, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return super().forward(self.layer(self.table((x > 0).long()) * x[..., None]).mean(1))


class Named(Arrays):
    """Batches are dictionaries with tensors, words and numbers."""

    def train_dataloader(self):
        rows = TensorDataset(self.x, self.y)
        return DataLoader(rows, self.batch_size, shuffle=True, collate_fn=self.collate)

    def collate(self, rows):
        x, y = map(torch.stack, zip(*rows, strict=True))
        return {"x": x, "label": y, "more": [len(rows), float(x[0, 0]), None, ("words", y[0])], "word": "odd"}


class Reads(Own):
    """Takes such batches."""

    def training_step(self, batch, batch_idx):
        number, first, _, (_, label) = batch["more"]
        loss = super().training_step((batch["x"], batch["label"]), batch_idx)
        return loss * (1 + 0.1 * number) + 0.1 * first * label * self.head.bias.square().sum()


def small(kind, **kwargs):
    return {"model": kind, "data": arrays, **kwargs}


MODELS = {
    "logistic": small(lambda: mlp(encoder=Logistic(8))),
    "MLP": small(lambda: mlp(encoder=MLP(8, [6, 4]))),
    "a convolutional net": {
        "model": lambda: mlp(encoder=FedCKACNN(1, 16)),
        "data": partial(digits, image_size=16, train_size=120),
        "local_epochs": 1,
    },
    "GroupNorm": {
        "model": lambda: mlp(encoder=MOONCNN(1, 16, norm="group")),
        "data": partial(digits, image_size=16, train_size=120),
        "local_epochs": 1,
    },
    "a residual net": {"model": lambda: mlp(encoder=Residual()), "local_epochs": 1},
    "BatchNorm": small(partial(normed, 8)),
    "tied weights": small(Tied),
    "frozen parts": small(Frozen),
    "computed weights": small(Normal),
    "attention": small(Attends, local_epochs=1),
    "batches of many things": {"model": Reads, "data": partial(arrays, kind=Named)},
    "buffers that are rebound": small(Rebinds),
    "a buffer that is not in the state": small(Transient),
    "a penalty on its parameters": small(Decays),
    # the last batches of the clients of 34 and 26 examples wait for each other
    "numbers of batches and passes": {"model": Counts, "data": partial(arrays, (42, 34, 26, 10, 18, 12))},
    "batches that are left out": small(Skips),
    "a parameter of one number": small(Scalar),
    "a parameter of one number, without a look at a client": small(Scalar, visits=False),
    "logs": small(Logs),
    "logs without a look at a client": small(Logs, visits=False),
    "unused parameters": small(Unused),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_side_by_side_what_it_gives_one_by_one(tmp_path, name):
    assert_same_alone(tmp_path, **MODELS[name])


def test_a_parameter_that_no_loss_depends_on_stays_as_it_is(tmp_path):
    found, _ = trained(tmp_path, 4, **MODELS["unused parameters"])
    assert torch.equal(found["state"]["unused"], torch.ones(3).double())
    assert not torch.equal(found["state"]["sometimes"], torch.ones(3).double())


def test_each_client_has_batch_statistics_of_its_own(tmp_path):
    found, _ = trained(tmp_path, 4, **MODELS["BatchNorm"], max_rounds=1)
    means = [visit["state"]["encoder.layers.2.running_mean"] for visit in found["visits"].values()]
    assert len({tuple(mean.tolist()) for mean in means}) == len(SIZES)


# ---------------------------------------------------------------------- optimizers and the trainer's arguments


def of(kind, **kwargs):
    return {"model": lambda: Own(partial(kind, **{"lr": 0.01, **kwargs}))}


class Groups(Own):
    def configure_optimizers(self):
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 0.1, "momentum": 0.5}]
        return SGD(groups, lr=0.01, momentum=0.9, nesterov=False)


class Part(Own):
    """Its optimizer moves the classifier alone, though the rest has gradients, too."""

    def configure_optimizers(self):
        return SGD(self.head.parameters(), lr=0.1)


class Scheduled(Own):
    """Has a schedule of rates."""

    kind, how = partial(StepLR, step_size=2, gamma=0.5), {"interval": "step"}

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.kind(optimizer), **self.how}}


class ByEpoch(Scheduled):
    kind, how = partial(StepLR, step_size=1, gamma=0.5), {"interval": "epoch"}


class Watches(Scheduled):
    kind, how = partial(ReduceLROnPlateau, mode="max", patience=0, factor=0.5), {"monitor": "train/loss"}


# clients with equally many batches share a schedule
PAIRS = (10, 12, 34, 40, 20, 24)
OPTIONS = {
    "momentum": of(SGD, momentum=0.9, weight_decay=0.01),
    "nesterov": of(SGD, momentum=0.9, nesterov=True),
    "dampening": of(SGD, momentum=0.9, dampening=0.3),
    "maximize": of(SGD, maximize=True, weight_decay=0.1),
    "Adam": of(Adam, amsgrad=True),
    "AdamW": of(AdamW, weight_decay=0.1),
    "RMSprop": of(RMSprop, momentum=0.5, centered=True),
    "Adagrad": of(Adagrad, lr_decay=0.1),
    "Adagrad from a start, and clients of less than a batch": {
        **of(Adagrad, initial_accumulator_value=0.5),
        "data": partial(arrays, (20, 34, 3, 42, 5, 5)),
    },
    "groups of parameters": {"model": Groups},
    "augmented images": {"data": partial(digits, augment=[RandomCrop(1), RandomFlip()]), "model": mlp},
    "clipping of the part that moves": {"model": Part, "gradient_clip_val": 0.3},
    "a single batch": {**of(SGD), "fast_dev_run": True, "visits": False},
    "clipping by norm": {**of(SGD, momentum=0.9), "gradient_clip_val": 0.3},
    "clipping by value": {**of(Adam), "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "accumulated batches": {**of(SGD, momentum=0.9), "accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    "accumulated batches of Adam": {**of(Adam), "accumulate_grad_batches": 3},
    "accumulated batches that may be left out": {"model": Skips, "accumulate_grad_batches": 2},
    "accumulated batches of a parameter that is sometimes used": {"model": Unused, "accumulate_grad_batches": 2},
    "clients of less than a batch": {**of(SGD, momentum=0.9), "data": partial(arrays, (20, 34, 3, 42, 5, 5))},
    "clients of less than a batch of Adam": {**of(Adam), "data": partial(arrays, (20, 34, 3, 42, 5, 5))},
    "clients of less than a batch with dampening": {
        **of(SGD, momentum=0.9, dampening=0.3),
        "data": partial(arrays, (20, 34, 3, 42, 5, 5)),
    },
    "small steps in single precision": {
        **of(SGD, lr=1e-5),
        "data": partial(arrays, doubles=False),
        "precision": "32-true",
        "limit": 1e-5,
        "max_rounds": 1,
    },
    "accumulated batches of which the first is left out": {
        "model": SkipsFirst,
        "data": partial(arrays, (16, 32, 16, 32)),
        "accumulate_grad_batches": 3,
    },
    "local steps": {**of(SGD, momentum=0.9), "local_steps": 7},
    "local steps of Adam": {**of(Adam), "local_steps": 7},
    "a parameter that is sometimes used by Adam": {"model": lambda: Unused(partial(Adam, lr=0.01))},
    "a schedule by step": {"model": Scheduled, "data": partial(arrays, PAIRS)},
    "a schedule by step that restarts": {
        "model": Scheduled,
        "data": partial(arrays, PAIRS),
        "client_schedulers": "restart",
    },
    "a schedule by epoch": {"model": ByEpoch, "data": partial(arrays, PAIRS), "accumulate_grad_batches": 2},
    "a schedule by epoch that restarts": {
        "model": ByEpoch,
        "data": partial(arrays, PAIRS),
        "client_schedulers": "restart",
        "local_epochs": 3,
    },
    "a schedule and stragglers": {
        "model": Scheduled,
        "data": partial(arrays, PAIRS),
        "systems": SystemsHeterogeneity(stragglers=0.7),
        "local_epochs": 3,
        "max_rounds": 3,
    },
    "a schedule that watches a metric": {"model": Watches, "data": partial(arrays, PAIRS), "max_rounds": 3},
    "a schedule of rounds": {**of(SGD), "client_lr_scheduler": partial(StepLR, step_size=1, gamma=0.1)},
    "equal weights": {**of(SGD), "weighting": "uniform", "visits": False},
    "buffers kept by the server": {"model": partial(normed, 8), "buffers": "keep", "visits": False},
    "buffers of each client": {"model": partial(normed, 8), "buffers": "local", "cohort_size": 4, "max_rounds": 3},
    "buffers computed anew": {"model": partial(normed, 8), "buffers": "recalibrate"},
    "a server optimizer": {**of(SGD), "server_optimizer": partial(Adam, lr=0.01), "visits": False},
    "without a look at a client": {**of(SGD, momentum=0.9), "visits": False, "max_rounds": 3},
    "a client without examples": {**of(SGD), "data": partial(arrays, (10, 20, 0, 16))},
    "a client without examples, and no look at it": {
        **of(SGD),
        "data": partial(arrays, (10, 20, 0, 16)),
        "visits": False,
    },
    "batches in their order": {**of(SGD), "data": partial(arrays, shuffle=False)},
    "stragglers and losses": {
        **of(SGD, momentum=0.9),
        "methods": lambda: [SCAFFOLD("gradients"), MOON()],
        "taps": {"representation": "body", "logits": "head"},
        "systems": SystemsHeterogeneity(stragglers=0.5, dropout_before=0.1, dropout_after=0.2),
        "local_epochs": 3,
        "max_rounds": 4,
    },
    "stragglers by step": {
        **of(SGD),
        "systems": SystemsHeterogeneity(stragglers=0.5, late="keep"),
        "local_steps": 5,
        "visits": False,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_gives_side_by_side_what_it_gives_one_by_one(tmp_path, name):
    assert_same_alone(tmp_path, **{"data": arrays, **OPTIONS[name]})


# ---------------------------------------------------------------------- workers, checkpoints, failures


def some(name):
    methods, how = METHODS[name]
    return {"methods": methods, **how, "local_epochs": 1}


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "MOON of some"])
def test_any_number_of_workers_gives_the_same_bits(tmp_path, name):
    how = {**some(name), "client_memory": 0.0 if name.startswith("MOON") else 1.0}  # on disk, or not
    found = [trained(tmp_path, 2, visits=False, devices=workers, **how)[0] for workers in (1, 2, 3)]
    for other in found[1:]:
        assert_same_bits(found[0]["state"], other["state"])
        assert found[0]["metrics"] == other["metrics"]


@pytest.mark.parametrize("name", ["SCAFFOLD", "MOON", "FedBN"])
def test_a_run_that_resumes_has_the_bits_of_one_that_was_not_stopped(tmp_path, name):
    how = {"max_rounds": 3, "name": "run", "checkpoint_every_n_rounds": 1, **some(name)}
    whole, _ = trained(tmp_path, 4, **{**how, "name": "whole"})
    with refused("stopped", kind=ClientError):
        trained(tmp_path, 4, **how, callbacks=[Stops(2)])
    with refused("ckpt_path=", "trainer.clients_per_step"):
        trained(tmp_path, 3, **how, ckpt_path="last")
    resumed, _ = trained(tmp_path, 4, **how, ckpt_path="last")
    assert_same_bits(whole["state"], resumed["state"])
    assert resumed["metrics"] == whole["metrics"]


@pytest.mark.parametrize("name", ["SCAFFOLD", "MOON", "FedBN"])
def test_a_visit_is_repeated_from_a_checkpoint_to_its_bits(tmp_path, name):
    how = {"name": "run", "checkpoint_every_n_rounds": 1, **some(name)}
    found, _ = trained(tmp_path, 4, **how)
    given = {"model": mlp, "methods": list, **how}
    make, methods = given.pop("model"), given.pop("methods")
    path = tmp_path / "run/version_0/checkpoints/previous.ckpt"
    for k in (0, 4):
        model, trainer = make(), small_trainer(tmp_path, clients_per_step=4, precision="64-true", **given)
        logged = trainer.replay(model, digits(), 1, k, path, methods())
        visit = found["visits"][f"1-{k}"]
        assert_same_bits(model.state_dict(), visit["state"])
        assert logged == {"steps": visit["num_steps"], "lr": visit["lr"], **visit["metrics"]}


K = 3


class NotNumbers(Arrays):
    """Client 3 has an example that is not finite."""

    def __init__(self, *args):
        super().__init__(*args)
        self.x[sum(SIZES[:K])] = torch.nan


class Unreadable(Arrays):
    """Client 3 has an example that cannot be read."""

    def train_dataloader(self):
        return DataLoader(_Unreadable(self.x, self.y), self.batch_size, shuffle=True)


class _Unreadable(TensorDataset):
    def __getitem__(self, index):
        if index == sum(SIZES[:K]):
            raise ValueError("unreadable")
        return super().__getitem__(index)


class Marked(Arrays):
    """Client 3 has an example that is far off."""

    def __init__(self, *args):
        super().__init__(*args)
        self.x[sum(SIZES[:K]), 0] = 100.0


class DislikesMarks(Own):
    """Its loss on such an example is nan, though the gradient is not."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + torch.where(batch[0].max() > 50, torch.nan, 0.0)


class FailsOnce(Method):
    """A hook fails for one client."""

    hook = "on_client_start"

    def _fail(self, hook, client):
        if hook == self.hook and client.info.id == K:
            raise ValueError("a mistake")

    def on_client_start(self, client):
        self._fail("on_client_start", client)

    def on_client_end(self, client):
        self._fail("on_client_end", client)


class FailsAtEnd(FailsOnce):
    hook = "on_client_end"


FAILURES = {
    "nan": ({"data": partial(arrays, kind=NotNumbers)}, "loss"),
    "nan in the loss alone": ({"data": partial(arrays, kind=Marked), "model": DislikesMarks}, "loss"),
    "an example": ({"data": partial(arrays, kind=Unreadable)}, "unreadable"),
    "the beginning of a visit": ({"data": arrays, "methods": lambda: [FailsOnce()]}, "mistake"),
    "the end of a visit": ({"data": arrays, "methods": lambda: [FailsAtEnd()]}, "mistake"),
}


def skipped(caught):
    """What is said of the clients that are left out."""
    return {text for text in (str(warning.message) for warning in caught) if text.startswith("skipped")}


@pytest.mark.parametrize("visits", [True, False])
@pytest.mark.parametrize("name", FAILURES)
def test_the_others_of_a_group_go_on_without_a_client_that_fails(tmp_path, name, visits):
    given, word = FAILURES[name]
    how = {"model": Own, "on_client_error": "skip", "max_rounds": 2, "visits": visits, **given}
    with warned(f"client {K}", "round 0", word) as said:
        alone, _ = trained(tmp_path, 1, **how)
    with warned(f"client {K}", "round 0", word) as caught:
        beside, trainer = trained(tmp_path, 4, **how)
    assert [row["clients/failed"] for row in trainer.history] == [1, 1]
    assert skipped(caught) == skipped(said)
    assert_near(alone, beside, 1e-10)


@pytest.mark.parametrize("name", ["nan", "the end of a visit"])
def test_a_failure_is_repeated_in_its_group(tmp_path, name):
    given, word = FAILURES[name]
    data, methods = given["data"], given.get("methods", list)
    how = {"clients_per_step": 4, "precision": "64-true", "name": "run"}
    with refused(f"client {K}", "round 0", word, kind=ClientError) as first:
        small_trainer(tmp_path, **how).fit(Own(), data(), methods())
    with refused(f"client {K}", "round 0", word, kind=ClientError) as again:
        small_trainer(tmp_path, **how).replay(Own(), data(), 0, K, first.value.record, methods())
    assert str(again.value) == str(first.value)


# ---------------------------------------------------------------------- what cannot be mapped over clients


class Hooked(Own):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Steps(Own):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class Measures(Own):
    def build(self):
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)


class Means(Own):
    def build(self):
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.log("mean", self.mean)
        return loss


class Items(Own):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("item", loss.item())
        return loss


class Branches(Own):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if loss > 1 else loss


class Adds(Own):
    def build(self):
        self.number = 0

    def training_step(self, batch, batch_idx):
        self.number += 1
        return super().training_step(batch, batch_idx)


class Lists(Own):
    def build(self):
        self.losses = []

    def training_step(self, batch, batch_idx):
        self.losses.append(1.0)
        return super().training_step(batch, batch_idx)


# what no trial can see but by what comes of it
_losses = []


class Hides(Own):
    """Counts its steps where no attribute is."""

    def training_step(self, batch, batch_idx):
        _losses.append(batch_idx)
        return super().training_step(batch, batch_idx) * len(_losses)


class Nested(Own):
    """A layer keeps a counter."""

    def build(self):
        self.body.number = 0

    def forward(self, x):
        self.body.number += 1
        return super().forward(x)


class Recurrent(Own):
    def build(self):
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return super().forward(self.lstm(x[:, None])[0][:, 0])


class Dropped(Own):
    def build(self):
        self.body.append(nn.Dropout(0.2))


class Late(Own):
    """Reads how many steps came before, which differ by client from the second round on."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / (1 + self.trainer.global_step)


class Keeps(Method):
    """Keeps on itself what belongs to a client."""

    def penalty(self, client, step):
        self.last = len(step.targets)


class Asks(Method):
    """Looks something up by the client's id."""

    def penalty(self, client, step):
        return torch.tensor(float(client.info.id))


class Slows(Method):
    """Lowers the learning rate in a hook; each visit begins with the module's own."""

    def on_before_optimizer_step(self, client, optimizer):
        optimizer.param_groups[0]["lr"] *= 0.9


class Watched(Scheduled):
    kind, how = ReduceLROnPlateau, {"monitor": "loss"}


REFUSED = {
    "a hook around batches": ({"model": Hooked}, ["Hooked", "on_train_batch_end"]),
    "an optimizer_step": ({"model": Steps}, ["Steps", "optimizer_step"]),
    "another optimizer": (of(LBFGS), ["LBFGS"]),
    "a metric with a state": ({"model": Measures}, ["test_side_by_side.py:", "training_step"]),
    "a mean with a state": ({"model": Means}, ["test_side_by_side.py:", "training_step"]),
    "an item": ({"model": Items}, ["test_side_by_side.py:", "training_step"]),
    "a branch on a value": ({"model": Branches}, ["test_side_by_side.py:", "training_step"]),
    "a counter": ({"model": Adds}, ["self.number"]),
    "a list": ({"model": Lists}, ["self.losses"]),
    "a counter elsewhere": ({"model": Hides}, ["otherwise than alone"]),
    "a counter in a layer": ({"model": Nested}, ["self.body.number"]),
    "a recurrent layer": ({"model": Recurrent}, ["lstm", "LSTM"]),
    "an attribute of a method": ({"methods": lambda: [Keeps()]}, ["Keeps.last"]),
    "the id of a client": ({"methods": lambda: [Asks()]}, ["client.info.id"]),
    "a rate that a hook sets": ({"methods": lambda: [Slows()]}, ["the optimizer's settings"]),
    "half precision": ({"precision": "bf16-mixed", "data": partial(arrays, doubles=False)}, ["trainer.precision"]),
    "a schedule within the visit": ({"model": Watched, "client_schedulers": "restart"}, ["scheduler"]),
    "a cache of references": ({"model": mlp, "data": digits, "cache_references": True}, ["trainer.cache_references"]),
}


def planned(tmp_path, size, model=Own, methods=list, data=arrays, **kwargs):
    given = {"precision": "64-true", "threads_per_worker": 1, "clients_per_step": size, **kwargs}
    trainer = small_trainer(tmp_path, **given)
    return trainer.doctor(model(), data(), methods())["run"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mapped_is_refused_under_a_number_and_trained_one_by_one_under_auto(tmp_path, name):
    how, words = REFUSED[name]
    with refused("trainer.clients_per_step=4", *words):
        planned(tmp_path, 4, **how)
    plan = planned(tmp_path, "auto", **how)
    assert plan["clients_per_step"] == 1
    assert_names(plan["side_by_side"], *words)


def test_auto_trains_small_models_side_by_side(tmp_path):
    plan = planned(tmp_path, "auto")
    assert plan["clients_per_step"] > 1


def test_random_numbers_are_a_clients_own_under_auto(tmp_path):
    plan = planned(tmp_path, "auto", model=Dropped)
    assert plan["clients_per_step"] == 1
    assert_names(plan["side_by_side"], "random numbers")
    found, _ = trained(tmp_path, 4, model=Dropped, data=arrays, max_rounds=1)
    assert len({visit["metrics"]["train/loss"] for visit in found["visits"].values()}) == len(SIZES)


class Noisy(Arrays):
    """Adds noise to an example when it is read, drawn from torch's own generator."""

    def train_dataloader(self):
        return DataLoader(_Noisy(self.x, self.y), self.batch_size, shuffle=True)


class _Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(8), y


def test_examples_that_draw_random_numbers_are_those_of_a_client_alone(tmp_path):
    data = partial(arrays, kind=Noisy)
    plan = planned(tmp_path, "auto", data=data)
    assert plan["clients_per_step"] == 1
    assert_names(plan["side_by_side"], "random numbers")


class Stream(IterableDataset):
    """The examples of a client, one after the other."""

    def __init__(self, x, y):
        self.rows = list(zip(x, y, strict=True))

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


class Streams(FederatedDataModule):
    """Each client has a stream."""

    def __init__(self):
        super().__init__(num_clients=4)
        inner = arrays((24, 40, 12, 18)).datamodule
        self.parts = [inner.x.split((24, 40, 12, 18)), inner.y.split((24, 40, 12, 18))]

    def setup(self, stage=None):
        self.plan = self.partition(torch.cat(self.parts[1]).numpy(), 3)

    def train_dataloader(self, k=0):
        return DataLoader(Stream(self.parts[0][k], self.parts[1][k]), batch_size=8)

    def val_dataloader(self):
        return []

    test_dataloader = val_dataloader


def test_streams_are_read_before_the_run_by_nobody_and_side_by_side_if_asked(tmp_path):
    plan = planned(tmp_path, "auto", data=Streams)
    assert plan["clients_per_step"] == 1
    assert_names(plan["side_by_side"], "cannot be read")
    assert_same_alone(tmp_path, model=Own, data=Streams)


def test_a_trial_in_a_process_of_its_own_finds_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "can_try_apart", apart.can_try_apart)
    with refused("trainer.clients_per_step=4", "client.info.id"):
        planned(tmp_path, 4, methods=lambda: [Asks()])
    assert planned(tmp_path, "auto")["clients_per_step"] > 1


def test_clients_that_turn_out_to_differ_in_a_later_step_are_trained_one_by_one(tmp_path):
    with warned("cannot train side by side", "global_step"):
        assert_same_alone(tmp_path, model=Late, data=arrays)


class Weighs(Method):
    """Its penalty depends on how many examples the client has, and of which classes."""

    requires = ("logits",)

    def penalty(self, client, step):
        share = client.info.label_counts[0] / client.info.num_examples
        return share * client.info.num_examples * 0.01 * step.taps["logits"].square().mean()


class Remembers(Method):
    """Keeps in many places what belongs to the client: tensors, numbers and lists, which a step changes."""

    requires = ("logits",)

    def on_client_start(self, client):
        visit = client.scratch(self)
        visit.count, visit.size = 0, client.info.num_examples
        visit.total = torch.zeros(3, dtype=torch.float64)
        visit.parts = [torch.zeros(3, dtype=torch.float64)] * (1 + client.info.id % 2)
        visit.before = client.memory(self).get("before", 0.0)

    def penalty(self, client, step):
        visit, logits = client.scratch(self), step.taps["logits"]
        visit.count += 1
        visit.total += logits.detach().mean(0)
        visit.parts = [part + logits.detach().mean(0) for part in visit.parts]
        visit.newest = logits.detach().mean()
        gap = logits.mean(0) - visit.parts[-1] / visit.count
        client.log("gap", gap.square().sum())
        return 0.1 * gap.square().sum() + 1e-3 * visit.size * logits.square().mean() + visit.before * logits.mean()

    def on_client_end(self, client):
        visit = client.scratch(self)
        client.memory(self)["before"] = 0.1 * float(visit.newest) + 0.01 * visit.count + 0.01 * float(visit.total[0])


class Sometimes(Method):
    """Has a penalty from the second pass on."""

    requires = ("logits",)

    def penalty(self, client, step):
        return 0.1 * step.taps["logits"].square().mean() if client.epoch else None


class ByCount(Method):
    """Its corrections depend on the number of the step and on the rates so far."""

    def on_before_optimizer_step(self, client, optimizer):
        client.add_to_gradients(client.drift_so_far(client.trainable), 0.1 * (1 + client.num_steps))

    def on_after_optimizer_step(self, client, optimizer):
        client.add_to_parameters(client.drift_so_far(client.trainable), -0.1 * client.lr_total)


class Last(Method):
    """Sends the loss of the last pass."""

    def on_client_end(self, client):
        return {"last": Weighted.of(torch.tensor(client.epochs[-1]["loss"]))}

    def on_round_end(self, server, payload):
        server.assign({"head.bias": server.state["head.bias"] + payload["last"].mean().to(server.state["head.bias"])})


OWN = [Weighs, Remembers, Sometimes, ByCount, Last]


@pytest.mark.parametrize("method", OWN, ids=lambda method: method.__name__)
def test_a_method_of_ones_own_sees_each_client_as_alone(tmp_path, method):
    taps = {"representation": "body", "logits": "head"}  # and clients make 2 to 4 passes
    assert_same_alone(tmp_path, model=Own, data=arrays, methods=lambda: [method()], taps=taps, local_steps=7)


class Warm(Method):
    """A penalty whose coefficient is another in each round."""

    mu = 0.0

    def on_round_start(self, server):
        self.mu = float(server.round)

    def penalty(self, client, step):
        return self.mu * sum(client.live[name].square().sum() for name in client.trainable)


class Counts(Own):
    """Its loss depends on the step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + batch_idx + self.trainer.global_step)


class Rated(Own):
    """Its loss depends on the learning rate, which a scheduler lowers at each step, and it logs the rate."""

    def training_step(self, batch, batch_idx):
        rate = self.optimizers().param_groups[0]["lr"]
        self.log("rate", rate)
        return super().training_step(batch, batch_idx) * (1 + 10 * rate)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.9), "interval": "step"}]


class Shorter(Method):
    """Its penalty of batches of less than 8 depends on the round."""

    weight = 0.0

    def on_round_start(self, server):
        self.weight = 0.1 * server.round

    def penalty(self, client, step):
        if len(step.targets) < 8:
            return self.weight * sum(p.square().sum() for p in client.module.parameters())
        return None


class ByIndex(Own):
    """Its step is another one for the first batch of a pass."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx == 0 else 1.5 * loss


CHANGES = {
    "a penalty by the round": {"methods": lambda: [Warm()]},
    "a loss by the step": {"model": Counts, "data": arrays},
    "a loss by the rate": {"model": Rated, "data": arrays},
    "a penalty of short batches by the round": {"model": Own, "data": arrays, "methods": lambda: [Shorter()]},
    "a branch on the batch's index": {"model": ByIndex, "data": arrays},
}


@pytest.mark.parametrize("how", CHANGES.values(), ids=list(CHANGES))
def test_what_changes_from_round_to_round_or_from_step_to_step_is_not_repeated(tmp_path, how):
    how = {"max_rounds": 4, **how}
    one, _ = trained(tmp_path, 3, **how)
    other, _ = trained(tmp_path / "alone", 1, **how)
    assert_near(other["state"], one["state"], 1e-10)
