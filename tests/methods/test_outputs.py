"""Methods read any output of any submodule: maps and tokens, and fields of outputs that are no tensor."""

from functools import partial

import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, differs
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning import Method
from fl_lightning.methods import (
    MOON,
    DeCov,
    FedCKA,
    FedDecorr,
    FedLC,
    FedNTD,
    FedProto,
    FedRS,
    FedUV,
    FedVLS,
    LogitAdjustment,
    StructuredDeCov,
)


class Maps(nn.Module):
    """Maps ``(B, 3, 2, 2)`` of an image; as a field of an output that is no tensor if ``fields``."""

    def __init__(self, fields):
        super().__init__()
        self.linear, self.fields = nn.Linear(64, 12), fields

    def forward(self, x):
        maps = self.linear(x.flatten(1)).relu().view(-1, 3, 2, 2)
        return {"states": (x, maps)} if self.fields else maps


class Net(LightningModule):
    """A classifier whose taps can be bound before or after its maps are flattened, and to fields of outputs."""

    def __init__(self, fields=False):
        super().__init__()
        torch.manual_seed(0)
        self.fields, self.body, self.flat, self.head = fields, Maps(fields), nn.Flatten(), nn.Linear(12, 10)
        self.unused = nn.Linear(1, 1)

    def forward(self, x):
        out = self.body(x)
        return self.head(self.flat(out["states"][1] if self.fields else out))

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


METHODS = {
    "moon": MOON,
    "fedproto": partial(FedProto, aggregate_weights=True),
    "feduv": FedUV,
    "feddecorr": FedDecorr,
    "decov": partial(DeCov, weight=1.0),
    "structureddecov": partial(StructuredDeCov, weight=1.0, groups=4),
    "fedcka": partial(FedCKA, layers=["representation"]),
    "fedntd": partial(FedNTD, beta=20.0),
    "fedlc": FedLC,
    "fedvls": partial(FedVLS, beta=0.5, lam=20.0),
    "fedrs": partial(FedRS, alpha=0.2),
    "logitadjustment": LogitAdjustment,
}
TAPS = {
    "maps": {"representation": "body", "logits": "head"},
    "rows": {"representation": "flat", "logits": "head"},
    "fields": {"representation": "body:states:1", "logits": "head"},
}


@pytest.mark.parametrize("name", METHODS)
def test_maps_rows_and_fields_of_outputs_train_alike(run, name):
    states = [run([METHODS[name]()], model=Net(bound == "fields"), taps=taps)[0] for bound, taps in TAPS.items()]
    assert_same_bits(states[0], states[1])
    assert_same_bits(states[0], states[2])
    assert differs(states[0], run(model=Net())[0])


def test_the_cache_of_references_holds_maps_and_fields(run):
    given = {"local_epochs": 2, "taps": TAPS["fields"]}
    plain, cached = (run([MOON()], model=Net(fields=True), cache_references=c, **given)[0] for c in (False, True))
    assert_same_bits(plain, cached)


class Reads(Method):
    requires = ("z",)

    def penalty(self, client, step):
        return step.taps["z"].sum()


@pytest.mark.parametrize("method", [Reads(), MOON(first="global")])
def test_a_tap_of_a_submodule_that_training_does_not_call_is_named(run, method):
    taps = {"z": "unused", "representation": "unused"}
    with refused("trainer.taps", f"{method.requires[0]}='unused'"):
        run([method], model=Net(), taps=taps)


def test_nothing_of_one_batch_is_taken_for_anothers(run):
    class Every(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.unused(torch.ones(1, 1))
            return super().training_step(batch, batch_idx)

    with refused("trainer.taps", "z='unused'"):
        run([Reads()], model=Every(), taps={"z": "unused"})
