"""Clients side by side: each gives what it gives alone, up to rounding, whatever trains."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.beside import SIZES, Normed, assert_near, assert_same_alone, digits, etf, mlp, normed, rows, sgd, trained
from helpers.errors import assert_names, refused, warned
from helpers.gradients import Dropping
from helpers.lora import lora_model
from helpers.methods import METHODS as LISTS
from helpers.runs import Stops, assert_same_bits, small_trainer
from helpers.tiers import sample
from helpers.tiny import TinyData, TinyModule
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import Method, Weighted
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.data import RandomCrop, RandomFlip
from fl_lightning.methods import (
    APFL,
    IFCA,
    MOON,
    SCAFFOLD,
    DeCov,
    Ditto,
    FedALA,
    FedAMP,
    FedAS,
    FedASAM,
    FedBABU,
    FedBN,
    FedCKA,
    FedDecorr,
    FedDisco,
    FedDyn,
    FedExLoRA,
    FedExP,
    FedIT,
    FedLC,
    FedNova,
    FedNTD,
    FedPer,
    FedProto,
    FedProx,
    FedRep,
    FedRoD,
    FedRS,
    FedSAM,
    FedUV,
    FedVLS,
    FFALoRA,
    FixBN,
    Freeze,
    HetLoRA,
    LGFedAvg,
    Local,
    LogitAdjustment,
    LoRAProduct,
    PFedMe,
    StructuredDeCov,
)
from fl_lightning.models import MOONCNN, FedCKACNN
from fl_lightning.utilities.errors import ClientError
from fl_lightning.vectorized import group_size

pytestmark = pytest.mark.filterwarnings("error:clients that cannot train side by side")


@pytest.fixture(autouse=True)
def _quick(undrawn, monkeypatch):
    """Few clients may train side by side."""
    monkeypatch.setattr(group_size, "LEAST_CLIENTS", 2)
    monkeypatch.setattr("fl_lightning.trainer.code_of_run", lambda *args: {})


# ---------------------------------------------------------------------- methods
MOMENTUM = {"model": partial(mlp, sgd(momentum=0.9, weight_decay=1e-3))}
# its units are of tanh: dead ones of ReLU have no variance, by which FedDecorr would divide
SMOOTH = {"model": TinyModule, "data": rows, "taps": {"representation": "body"}}
NORMED = {"model": normed}
CLIPPED = {"gradient_clip_val": 0.5}
ONE = {"local_epochs": 1}
ROUND = {"max_rounds": 1, **ONE}
SOME = {"cohort_size": 4, "max_rounds": 3, **ONE}
DEFAULT_METHODS = {
    "FedAvg without callbacks": (list, {"visits": False}),
    "SCAFFOLD scaled": (lambda: [SCAFFOLD("gradients", "post_step", scaled=True)], {**CLIPPED, **ONE}),
    "SCAFFOLD of some": (lambda: [SCAFFOLD()], SOME),
    "FedDyn of some": (lambda: [FedDyn(0.1, reported="all", scaled=False)], SOME),
    "FedRS": (lambda: [FedRS(use_bias=False)], MOMENTUM | ONE),
    "FedDecorr": (lambda: [FedDecorr()], SMOOTH | ONE),
    "FixBN": (lambda: [FixBN()], NORMED | ONE),
    "FedProx, SCAFFOLD, FedLC": (lambda: [FedProx(0.1), SCAFFOLD(), FedLC()], ONE),
    "MOON, FedCKA": (lambda: [MOON(pool_size=2), FedCKA()], SOME),
    "FedNova, FedBABU": (lambda: [FedNova(), FedBABU()], {"model": partial(mlp, sgd(momentum=0.9)), **ONE}),
    "FedBN, FedUV": (lambda: [FedBN(), FedUV()], NORMED),
    "DeCov": (lambda: [DeCov()], {}),
    "FedProto": (lambda: [FedProto()], {}),
    "FedVLS": (lambda: [FedVLS(beta=0.5, lam=5.0)], SOME),
    "FedNTD, FedLC": (lambda: [FedNTD(temperature=3.0), FedLC()], SOME),
    "Local, FedProx, StructuredDeCov": (lambda: [Local(), FedProx(0.1), StructuredDeCov(groups=3, gamma=0.1)], ONE),
    "FedDisco, FedExP": (lambda: [FedDisco(), FedExP(eps=0)], SOME),
    "FedETF": (lambda: [LogitAdjustment()], {"model": etf, **ONE}),
    "LogitAdjustment by the global prior, FedProx": (lambda: [LogitAdjustment(prior="global"), FedProx(0.1)], ROUND),
    "Freeze, FedLC, FedProx": (lambda: [Freeze(), FedLC(), FedProx(0.1)], MOMENTUM),
    "FedSAM": (lambda: [FedSAM(), FedLC(), FedProx(0.1)], NORMED | ONE),
    "FedASAM": (lambda: [FedASAM(), FedDecorr()], SMOOTH | ONE),
    "FedALA": (lambda: [FedALA(window=2), FedProx(0.1)], NORMED | SOME),
    "FedAS": (lambda: [FedAS(), FedBN()], NORMED | SOME),
    "FedPer": (lambda: [FedPer(2), SCAFFOLD()], SOME),
    "FedRoD, SCAFFOLD": (lambda: [FedRoD(), SCAFFOLD()], SOME),
    "Ditto, FedBN": (lambda: [Ditto(2.0), FedBN()], NORMED | SOME),
    "APFL, FedProx": (lambda: [APFL(adaptive=True, alpha_decay=0.02), FedProx(0.1)], MOMENTUM | SOME),
    "PFedMe": (lambda: [PFedMe(5.0, 2)], {"model": partial(mlp, sgd(weight_decay=1e-3)), **SOME}),
    "FedRep": (lambda: [FedRep(), FedLC()], MOMENTUM),
    "IFCA, FedBN": (lambda: [IFCA(2, 0.5), FedBN()], NORMED | SOME),
    "FedAMP, FedProx": (lambda: [FedAMP(start="own"), FedProx(0.1)], MOMENTUM | SOME),
    "LGFedAvg": (lambda: [LGFedAvg(), FedBN()], NORMED | ONE),
    "Chosen, FedProx": (LISTS["Chosen, FedProx"], SOME),
}
ADAPTERS = FedIT, FFALoRA, LoRAProduct, FedExLoRA
METHODS = DEFAULT_METHODS | {
    "SCAFFOLD by gradients": (lambda: [SCAFFOLD("gradients", weighting="examples")], MOMENTUM),
    "FedUV spectral": (lambda: [FedUV(hinge="square", detach_bandwidth=True, spectral=0.1)], {}),
    "MOON from a random model": (lambda: [MOON(pool_size=2, first="random")], {"max_rounds": 3, **ONE}),
    "Freeze that resets": (lambda: [Freeze(mode="reset_each_round", orthogonal=True)], MOMENTUM),
    "Shifted, SCAFFOLD, MOON": (LISTS["Shifted, SCAFFOLD, MOON"], SOME),
    "FedBN, Shifted": (LISTS["FedBN, Shifted"], NORMED | SOME),
    "HetLoRA": (lambda: [HetLoRA([1, 4, 2])], {"model": lora_model}),
    **{kind.__name__: (lambda kind=kind: [kind()], {"model": lora_model}) for kind in ADAPTERS},
    "FedBN, SCAFFOLD": (lambda: [FedBN(), SCAFFOLD()], NORMED | SOME),
}


@pytest.mark.parametrize("name", sample([*METHODS], *DEFAULT_METHODS, *(kind.__name__ for kind in ADAPTERS)))
def test_a_method_gives_side_by_side_what_it_gives_one_by_one(tmp_path, name):
    methods, how = METHODS[name]
    assert_same_alone(tmp_path, methods=methods, **how)


@pytest.mark.parametrize("name", sample(["FedDecorr", "FedProx, SCAFFOLD, FedLC"], "FedProx, SCAFFOLD, FedLC"))
def test_single_precision_agrees_until_rounding_has_grown(tmp_path, name):
    methods, how = METHODS[name]
    how = {**how, "precision": "32-true", "max_rounds": 1, "local_steps": 10}
    assert_same_alone(tmp_path, 1e-5, methods=methods, **how)


class Weighs(Method):
    """Its penalty depends on how many examples the client has, and of which classes."""

    requires = ("logits",)

    def penalty(self, client, step):
        share = client.info.label_counts[0] / client.info.num_examples
        return share * client.info.num_examples * 0.01 * step.taps["logits"].square().mean()


class Remembers(Method):
    """Keeps tensors, numbers and lists of a client, which a step changes."""

    requires = ("logits",)

    def on_client_start(self, client):
        visit = client.scratch(self)
        visit.count, visit.size, visit.newest = 0, client.info.num_examples, torch.zeros((), dtype=torch.float64)
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
        return {"last": Weighted.of(torch.tensor(client.visit.loss_terms()[-1]["loss"]))}

    def on_round_end(self, server, payload):
        server.assign({"head.bias": server.state["head.bias"] + payload["last"].mean().to(server.state["head.bias"])})


@pytest.mark.parametrize("methods", [[Weighs, Remembers, Last], [Sometimes], [ByCount]])
def test_a_method_of_ones_own_sees_each_client_as_alone(tmp_path, methods):
    taps = {"representation": "body", "logits": "head"}  # and clients make 2 to 4 passes
    how = {"model": TinyModule, "data": rows, "taps": taps, "local_steps": 7}
    assert_same_alone(tmp_path, methods=lambda: [method() for method in methods], **how)


# ---------------------------------------------------------------------- models
class Tied(TinyModule):
    """Two layers share their weights, a parameter has two names, and the loss reads all of them."""

    def build(self):
        self.again = nn.Linear(6, 8)
        self.twice = nn.Linear(8, 6, bias=False)
        self.twice.weight = self.body[0].weight

    def forward(self, x):
        return self.head(torch.tanh(self.twice(self.again(self.body(x)))))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss + 0.01 * sum(p.square().sum() for p in self.parameters()), "more": 1}


class Frozen(TinyModule):
    """Neither its first layer nor the BatchNorm after it is trained; the statistics move."""

    def build(self):
        self.norm = nn.BatchNorm1d(6).requires_grad_(False)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


class Buffers(TinyModule):
    """Puts other tensors in the places of its buffers, one of them not in its state, and changes one in place."""

    def build(self):
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("total", torch.tensor(0.0))
        self.register_buffer("last", torch.zeros(6), persistent=False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        z = self.body(x * self.scale)
        before, self.last = self.last, z.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        self.seen = self.seen + len(x)
        self.total += z.detach().sum()
        return self.head(z - self.mean - 0.1 * before)


class Unused(TinyModule):
    """Has a parameter that no loss depends on, and one that only batches of 8 use."""

    def build(self):
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(3))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.sometimes.square().mean() if len(batch[0]) == 8 else loss


class Counts(TinyModule):
    """Its loss depends on the number of the batch in its pass, by a branch, too, of the pass, and of the round."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * (1 + batch_idx) * (1 + 0.1 * self.current_epoch)
        return 2 * loss if batch_idx % 2 else loss


class Logs(TinyModule):
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


class Named(TinyData):
    """Batches are dictionaries with tensors, words and numbers."""

    def loader(self, *args):
        return DataLoader(self.rows(self.train, 1), self.batch_size, shuffle=True, collate_fn=self.collate)

    def collate(self, pairs):
        x, y = map(torch.stack, zip(*pairs, strict=True))
        return {"x": x, "label": y, "more": [len(pairs), float(x[0, 0]), None, ("words", y[0])], "word": "odd"}


class Reads(TinyModule):
    """Takes such batches."""

    def training_step(self, batch, batch_idx):
        number, first, _, (_, label) = batch["more"]
        loss = super().training_step((batch["x"], batch["label"]), batch_idx)
        return loss * (1 + 0.1 * number) + 0.1 * first * label * self.head.bias.square().sum()


IMAGES = {"data": partial(digits, image_size=16, train_size=120), **ROUND}
DEFAULT_MODELS = {
    "GroupNorm": {"model": lambda: mlp(encoder=MOONCNN(1, 16, norm="group")), **IMAGES},
    "tied weights": {"model": Tied, "data": rows},
    "frozen parts": {"model": Frozen, "data": rows},
    "frozen parts of reference models": {
        "model": Frozen,
        "data": rows,
        "methods": lambda: [MOON()],
        "taps": {"representation": "head"},
        "max_rounds": 3,
    },
    "buffers": {"model": Buffers, "data": rows},
    "unused parameters": {"model": Unused, "data": rows},
    # the last batches of the clients of 34 and 26 examples wait for each other
    "numbers of batches and passes": {"model": Counts, "data": partial(rows, (42, 34, 26, 10, 18, 12))},
    "batches of many things": {"model": Reads, "data": partial(rows, kind=Named), **ROUND},
    "logs": {"model": Logs, "data": rows},
    "logs without callbacks": {"model": Logs, "data": rows, "visits": False, **ROUND},
}
MODELS = DEFAULT_MODELS | {
    "a convolutional net": {"model": lambda: mlp(encoder=FedCKACNN(1, 16)), **IMAGES},
    "buffers without callbacks": {"model": Buffers, "data": rows, "visits": False},
}


def refused_by_torch(name):
    """Torch 2.6 can run neither GroupNorm after a convolution side by side, nor Adagrad whose state is begun anew."""
    word = {"GroupNorm": "group_norm", "Adagrad": "_init_group"}.get(name)
    return refused("trainer.clients_per_step=4", word) if word and torch.__version__ < "2.7" else nullcontext()


@pytest.mark.filterwarnings("ignore:Trying to infer")  # of many things
@pytest.mark.parametrize("name", sample([*MODELS], *DEFAULT_MODELS))
def test_a_model_gives_side_by_side_what_it_gives_one_by_one(tmp_path, name):
    with refused_by_torch(name):
        assert_same_alone(tmp_path, **MODELS[name])


def test_each_client_has_batch_statistics_and_random_numbers_of_its_own(tmp_path):
    class Dropped(Normed):
        def __init__(self):
            super().__init__(8)
            self.layers.append(nn.Dropout(0.2))

    found, _ = trained(tmp_path, 4, lambda: mlp(encoder=Dropped()), rows, max_rounds=1)
    visits = found["visits"].values()
    means = {tuple(visit["state"]["encoder.layers.2.running_mean"].tolist()) for visit in visits}
    assert len(means) == len({visit["metrics"]["train/loss"] for visit in visits}) == len(SIZES)


# ---------------------------------------------------------------------- optimizers and the trainer's arguments
def of(kind, **kwargs):
    return {"model": lambda: TinyModule(partial(kind, **{"lr": 0.01, **kwargs}))}


class ParameterGroups(TinyModule):
    def configure_optimizers(self):
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 0.1, "momentum": 0.5}]
        return SGD(groups, lr=0.01, momentum=0.9)


class ByEpoch(TinyModule):
    kind, how = partial(StepLR, step_size=1, gamma=0.5), {"interval": "epoch"}

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.kind(optimizer), **self.how}}


class Watches(ByEpoch):
    kind, how = partial(ReduceLROnPlateau, mode="max", patience=0, factor=0.5), {"monitor": "train/loss"}


LESS = {"data": partial(rows, (20, 34, 3, 42, 5, 5))}  # some clients have less than a batch
# clients with equally many batches share a schedule
PAIRS = {"data": partial(rows, (10, 12, 34, 40, 20, 24))}
DEFAULT_OPTIONS = {
    "nesterov": {**of(SGD, momentum=0.9, nesterov=True, weight_decay=0.01), **ROUND},
    "dampening": {**of(SGD, momentum=0.9, dampening=0.3, maximize=True), **LESS, **ROUND},
    "Adam": {**of(Adam, amsgrad=True), **LESS, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "Adagrad": {**of(Adagrad, initial_accumulator_value=0.5, lr_decay=0.1), **LESS, **ROUND},
    "groups of parameters": {"model": ParameterGroups, **ROUND},
    "local steps": {**of(Adam), "local_steps": 7},
    "a parameter that is sometimes used by Adam": {"model": lambda: Unused(partial(Adam, lr=0.01))},
    "a schedule by epoch that restarts": {"model": ByEpoch, **PAIRS, "client_schedulers": "restart", "local_epochs": 3},
    "a schedule that watches a metric": {"model": Watches, **PAIRS, "max_rounds": 3, **ONE},
    "stragglers and losses": {
        "model": ByEpoch,
        "methods": lambda: [SCAFFOLD("gradients")],
        "systems": SystemsHeterogeneity(stragglers=0.5, dropout_before=0.1, dropout_after=0.2),
        "local_epochs": 3,
        "max_rounds": 3,
    },
    "buffers of each client": {"model": partial(normed, 8), "buffers": "local", **SOME},
    "an empty client, equal weights and a server optimizer": {
        **of(SGD),
        "data": partial(rows, (10, 20, 0, 16), shuffle=False),
        "weighting": "uniform",
        "server_optimizer": partial(Adam, lr=0.01),
        "visits": False,
    },
    "augmented images": {"data": partial(digits, augment=[RandomCrop(1), RandomFlip()]), "model": mlp, **ROUND},
}
OPTIONS = DEFAULT_OPTIONS | {
    "RMSprop": {**of(RMSprop, momentum=0.5, centered=True), **ROUND},
    "AdamW": of(AdamW, weight_decay=0.1),
    "a single batch": {**of(SGD), "fast_dev_run": True, "visits": False},
    "small steps in single precision": {**of(SGD, lr=1e-5), "precision": "32-true", "limit": 1e-5, "max_rounds": 1},
    "a schedule by epoch": {"model": ByEpoch, **PAIRS},
    "a schedule of rounds": {**of(SGD), "client_lr_scheduler": partial(StepLR, step_size=1, gamma=0.1)},
    "buffers computed anew": {"model": partial(normed, 8), "buffers": "recalibrate"},
    "stragglers by step": {
        **of(SGD),
        "systems": SystemsHeterogeneity(stragglers=0.5, late="keep"),
        "local_steps": 5,
        "visits": False,
    },
}


@pytest.mark.filterwarnings("ignore:data. 1 of 4 clients")  # the empty one
@pytest.mark.parametrize("name", sample([*OPTIONS], *DEFAULT_OPTIONS))
def test_an_option_gives_side_by_side_what_it_gives_one_by_one(tmp_path, name):
    with refused_by_torch(name):
        assert_same_alone(tmp_path, **{"data": rows, **OPTIONS[name]})


# ---------------------------------------------------------------------- what changes is seen
class Warm(Method):
    """A penalty whose coefficient depends on the round."""

    mu = 0.0

    def on_round_start(self, server):
        self.mu = float(server.round)

    def penalty(self, client, step):
        return self.mu * sum(client.live[name].square().sum() for name in client.trainable)


class Rated(ByEpoch):
    """Its loss depends on the learning rate, which a scheduler lowers after each pass, and it logs the rate."""

    def training_step(self, batch, batch_idx):
        rate = self.optimizers().param_groups[0]["lr"]
        self.log("rate", rate)
        return super().training_step(batch, batch_idx) * (1 + 10 * rate)


CHANGES = {
    "a penalty by the round": {"methods": lambda: [Warm()]},
    "a loss by the rate": {"model": Rated},
}


@pytest.mark.parametrize("how", CHANGES.values(), ids=list(CHANGES))
def test_what_changes_with_the_round_or_the_step_is_not_repeated(tmp_path, how):
    how = {"model": TinyModule, "data": rows, "visits": False, "max_rounds": 4, **how}
    one, _ = trained(tmp_path, 3, **how)
    other, _ = trained(tmp_path / "alone", 1, **how)
    assert_near(other["state"], one["state"], 1e-10)


class Late(TinyModule):
    """Reads how many steps came before, which differ by client from the second round on."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / (1 + self.trainer.global_step)


def test_clients_that_turn_out_to_differ_in_a_later_step_are_trained_one_by_one(tmp_path):
    with warned("cannot train side by side", "global_step"):
        assert_same_alone(tmp_path, model=Late, data=rows)


# ---------------------------------------------------------------------- workers, checkpoints, replays
RESUMED = {"methods": lambda: [SCAFFOLD(), MOON()], "name": "run", "checkpoint_every_n_rounds": 1, **ONE}


def test_two_workers_and_a_resume_give_the_same_bits(tmp_path):
    how = {**RESUMED, "max_rounds": 2}
    whole, _ = trained(tmp_path / "whole", 3, **how)
    # on disk, or not
    several, _ = trained(tmp_path / "several", 3, devices=2, visits=False, client_memory=0.0, **how)
    with refused("stopped", kind=ClientError):
        trained(tmp_path, 3, **how, callbacks=[Stops(1)])
    with refused("ckpt_path=", "trainer.clients_per_step"):
        trained(tmp_path, 4, **how, ckpt_path="last")
    resumed, _ = trained(tmp_path, 3, **how, ckpt_path="last")
    for other in (several, resumed):
        assert_same_bits(whole["state"], other["state"])
        assert whole["metrics"] == other["metrics"]


def test_a_visit_is_repeated_from_a_checkpoint_to_its_bits(tmp_path):
    found, _ = trained(tmp_path, 4, **RESUMED)
    model, visit = mlp(), found["visits"]["1-4"]
    trainer = small_trainer(tmp_path, clients_per_step=4, precision="64-true", name="run", **ONE)
    path = tmp_path / "run/version_0/checkpoints/previous.ckpt"
    logged = trainer.replay(model, digits(), 1, 4, path, RESUMED["methods"]())
    assert_same_bits(model.state_dict(), visit["state"])
    assert logged == {"steps": visit["num_steps"], "lr": visit["lr"], **visit["metrics"]}


# ---------------------------------------------------------------------- failures
K = 3
BEFORE = sum(SIZES[:K])  # the first example of client 3


class NotNumbers(TinyData):
    """Client 3 has an example that is not finite."""

    def rows(self, *args):
        found = super().rows(*args)
        found.tensors[0][BEFORE, 0] = torch.nan
        return found


class Unreadable(TinyData):
    """Client 3 has an example that cannot be read."""

    def rows(self, *args):
        return UnreadableRows(*super().rows(*args).tensors)


class UnreadableRows(TensorDataset):
    def __getitem__(self, index):
        if index == BEFORE:
            raise ValueError("unreadable")
        return super().__getitem__(index)


class FailsAtStart(Method):
    def on_client_start(self, client):
        if client.info.id == K:
            raise ValueError("a mistake")


class FailsAtEnd(Method):
    on_client_end = FailsAtStart.on_client_start


FAILURES = {
    "nan": ({"data": partial(rows, kind=NotNumbers), "visits": False}, "loss"),
    "an example": ({"data": partial(rows, kind=Unreadable), "visits": False}, "unreadable"),
    "the beginning of a visit": ({"methods": lambda: [FailsAtStart()]}, "mistake"),
    "the end of a visit": ({"methods": lambda: [FailsAtEnd()], "visits": False}, "mistake"),
}


def skipped(caught):
    """The warnings of clients that are left out."""
    return {text for text in (str(warning.message) for warning in caught) if text.startswith("skipped")}


@pytest.mark.parametrize("name", FAILURES)
def test_the_others_of_a_group_go_on_without_a_client_that_fails(tmp_path, name):
    given, word = FAILURES[name]
    how = {"model": TinyModule, "data": rows, "on_client_error": "skip", **ONE, **given}
    with warned(f"client {K}", "round 0", word) as said:
        alone, _ = trained(tmp_path, 1, **how)
    with warned(f"client {K}", "round 0", word) as caught:
        beside, trainer = trained(tmp_path, 4, **how)
    assert [row["clients/failed"] for row in trainer.history] == [1, 1]
    assert skipped(caught) == skipped(said)
    assert_near(alone, beside, 1e-10)


def test_all_failures_in_a_group_are_recorded_and_the_error_names_the_first(tmp_path):
    class FailsTwice(Method):
        def on_client_end(self, client):
            if client.info.id in (3, 5):
                raise ValueError("a mistake")

    trainer = small_trainer(tmp_path, clients_per_step=4, max_rounds=1)
    with refused("client 3", "round 0", "mistake", kind=ClientError):
        trainer.fit(TinyModule(), rows(), [FailsTwice()])
    recorded = {path.name for path in tmp_path.rglob("failures/*.pt")}
    assert recorded == {"round-0-client-3.pt", "round-0-client-5.pt"}


@pytest.mark.parametrize("name", ["nan", "the end of a visit"])
def test_a_failure_is_repeated_in_its_group(tmp_path, name):
    given, word = FAILURES[name]
    data, methods = given.get("data", rows), given.get("methods", list)
    how = {"clients_per_step": 4, "precision": "64-true", "name": "run"}
    with refused(f"client {K}", "round 0", word, kind=ClientError) as first:
        small_trainer(tmp_path, **how).fit(TinyModule(), data(), methods())
    with refused(f"client {K}", "round 0", word, kind=ClientError) as again:
        small_trainer(tmp_path, **how).replay(TinyModule(), data(), 0, K, first.value.record, methods())
    assert str(again.value) == str(first.value)


# ---------------------------------------------------------------------- what cannot be mapped over clients
class Hooked(TinyModule):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Measures(TinyModule):
    def build(self):
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)


class Branches(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if loss > 1 else loss


class Adds(TinyModule):
    def build(self):
        self.body.number = 0

    def training_step(self, batch, batch_idx):
        self.body.number += 1
        return super().training_step(batch, batch_idx)


_losses = []


class Hides(TinyModule):
    """Counts its steps outside of itself, where no trial looks."""

    def training_step(self, batch, batch_idx):
        _losses.append(batch_idx)
        return super().training_step(batch, batch_idx) * len(_losses)


class Recurrent(TinyModule):
    def build(self):
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return super().forward(self.lstm(x[:, None])[0][:, 0])


class Keeps(Method):
    """Keeps on itself what belongs to a client."""

    def penalty(self, client, step):
        self.last = len(step.targets)


class Asks(Method):
    """Looks something up by the client's id."""

    def penalty(self, client, step):
        return torch.tensor(float(client.info.id))


class Grows(Method):
    """Keeps more for a visit after a step than before it."""

    def penalty(self, client, step):
        client.scratch(self).size = len(step.targets)


class Slows(Method):
    """Lowers the learning rate in a hook; each visit begins with the module's own."""

    def on_before_optimizer_step(self, client, optimizer):
        optimizer.param_groups[0]["lr"] *= 0.9


class ByStep(ByEpoch):
    kind, how = partial(StepLR, step_size=1), {"interval": "step"}


class Watched(ByEpoch):
    kind, how = ReduceLROnPlateau, {"monitor": "loss"}


class Apart(TinyData):
    """A process of its own reads its batches."""

    def loader(self, *args):
        return DataLoader(self.rows(self.train, 1), self.batch_size, num_workers=1)


PLACE = ["test_side_by_side.py:", "training_step"]
REFUSED = {
    "a hook around batches": ({"model": Hooked}, ["Hooked", "on_train_batch_end"]),
    "another optimizer": (of(LBFGS), ["LBFGS"]),
    "a tensor as rate": (of(AdamW, lr=torch.tensor(0.1)), ["lr", "AdamW"]),
    "a metric with a state": ({"model": Measures}, PLACE),
    "a branch on a value": ({"model": Branches}, PLACE),
    "a counter": ({"model": Adds}, ["self.body.number"]),
    "a counter elsewhere": ({"model": Hides}, ["otherwise than alone"]),
    "a recurrent layer": ({"model": Recurrent}, ["lstm", "LSTM"]),
    "an attribute of a method": ({"methods": lambda: [Keeps()]}, ["Keeps.last"]),
    "the id of a client": ({"methods": lambda: [Asks()]}, ["client.info.id"]),
    "a rate that a hook sets": ({"methods": lambda: [Slows()]}, ["the optimizer's settings"]),
    "values that a step begins to keep": ({"methods": lambda: [Grows()]}, ["client.scratch", "on_client_start"]),
    "batches of another process": ({"data": partial(rows, kind=Apart)}, ["its batches"]),
    "accumulated batches": ({"accumulate_grad_batches": 2}, ["trainer.accumulate_grad_batches"]),
    "a schedule by step": ({"model": ByStep}, ["scheduler"]),
    "half precision": ({"precision": "bf16-mixed"}, ["trainer.precision"]),
    "a schedule within the visit": ({"model": Watched, "client_schedulers": "restart"}, ["scheduler"]),
    "a cache of references": ({"model": mlp, "data": digits, "cache_references": True}, ["trainer.cache_references"]),
}


def planned(tmp_path, size, model=TinyModule, methods=list, data=rows, **kwargs):
    given = {"precision": "64-true", "threads_per_worker": 1, "clients_per_step": size, **kwargs}
    return small_trainer(tmp_path, **given).doctor(model(), data(), methods())["run"]


def assert_one_by_one(tmp_path, *words, **how):
    """Clients train one by one under ``auto``, and the plan names why."""
    plan = planned(tmp_path, "auto", **how)
    assert plan["clients_per_step"] == 1
    assert_names(plan["side_by_side"], *words)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mapped_is_refused_under_a_number_and_trained_one_by_one_under_auto(tmp_path, name):
    how, words = REFUSED[name]
    with refused("trainer.clients_per_step=4", *words):
        planned(tmp_path, 4, **how)
    assert_one_by_one(tmp_path, *words, **how)


@pytest.mark.parametrize("rounds", [0, 2])
def test_auto_trains_small_models_side_by_side(tmp_path, rounds):
    assert planned(tmp_path, "auto", max_rounds=rounds)["clients_per_step"] > 1


class Noisy(TinyData):
    """Adds noise to an example when it is read, drawn from torch's own generator."""

    def rows(self, *args):
        return NoisyRows(*super().rows(*args).tensors)


class NoisyRows(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(8), y


@pytest.mark.parametrize("how", [{"model": Dropping}, {"data": partial(rows, kind=Noisy)}], ids=["layer", "data"])
def test_auto_trains_clients_that_draw_random_numbers_one_by_one(tmp_path, how):
    assert_one_by_one(tmp_path, "random numbers", **how)
