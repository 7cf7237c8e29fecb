"""Methods read any output of any submodule: maps and tokens, and fields of outputs that are no tensor."""

from functools import partial

import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, differs, small_data
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning import Method
from fl_lightning.callbacks import SpectrumMonitor
from fl_lightning.errors import ClientError
from fl_lightning.methods import MOON, DeCov, FedCKA, FedDecorr, FedLC, FedProto, FedRS, FedUV, StructuredDeCov


class Maps(nn.Module):
    """Maps ``(B, 3, 2, 2)`` of an image, or a field of an output that is no tensor."""

    def __init__(self, form=None):
        super().__init__()
        self.linear, self.form = nn.Linear(64, 12), form

    def forward(self, x):
        maps = self.linear(x.flatten(1)).relu().view(-1, 3, 2, 2)
        return {"states": (x, maps)} if self.form == "fields" else maps


class Net(LightningModule):
    """A classifier whose taps can be bound before or after its maps are flattened, and to fields of outputs."""

    def __init__(self, form=None):
        super().__init__()
        self.form = form
        self.body, self.flat = Maps(form), nn.Flatten()
        self.head = Head(form)
        self.unused = nn.Linear(1, 1)

    def forward(self, x):
        out = self.body(x)
        out = self.head(self.flat(out["states"][1] if self.form == "fields" else out))
        return out["scores"] if self.form == "fields" else out

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Head(nn.Linear):
    def __init__(self, form=None):
        super().__init__(12, 10)
        self.form = form

    def forward(self, x):
        scores = super().forward(x)
        return {"scores": scores} if self.form == "fields" else scores


def net(form=None):
    torch.manual_seed(0)
    return Net(form)


ON_REPRESENTATIONS = {
    "moon": MOON,
    "fedproto": partial(FedProto, aggregate_weights=True),
    "feduv": FedUV,
    "feddecorr": FedDecorr,
    "decov": partial(DeCov, weight=1.0),
    "structureddecov": partial(StructuredDeCov, weight=1.0, groups=4),
    "fedcka": partial(FedCKA, layers=["representation"]),
}


@pytest.mark.parametrize("name", ON_REPRESENTATIONS)
def test_maps_are_flattened_by_every_method(run, name, undrawn):
    method = ON_REPRESENTATIONS[name]
    states = []
    for bound in ("body", "flat"):
        taps = {"representation": bound, "logits": "head"}
        monitor = SpectrumMonitor()
        state, trainer = run([method()], model=net(), taps=taps, callbacks=[monitor])
        states.append(state | {"rank": torch.tensor(trainer.metrics["rank/representation/effective"])})
    assert_same_bits(*states)
    assert differs(states[0], run(model=net())[0] | {"rank": states[0]["rank"]})


@pytest.mark.parametrize("name", [*ON_REPRESENTATIONS, "fedlc", "fedrs"])
def test_fields_of_outputs_are_tensors_like_any_other(run, name):
    method = {**ON_REPRESENTATIONS, "fedlc": FedLC, "fedrs": partial(FedRS, alpha=0.2)}[name]
    plain = run([method()], model=net(), taps={"representation": "body", "logits": "head"})[0]
    bound = {"representation": "body:states:1", "logits": "head:scores"}
    assert_same_bits(run([method()], model=net("fields"), taps=bound)[0], plain)
    assert differs(run(model=net())[0], plain)


@pytest.mark.parametrize("layers", [1, ["early.0"]])
def test_one_layer_is_enough_for_fedcka(run, layers):
    model = net()
    model.taps = {"early.0": "body"}
    _, trainer = run([FedCKA(layers=layers)], model=model)
    assert trainer.metrics["train/fedcka"] > 0
    with refused("FedCKA", "'early.1'", "Net"):
        run([FedCKA()], model=model)


class Reads(Method):
    requires = ("z",)

    def penalty(self, client, step):
        return step.taps["z"].sum()


@pytest.mark.parametrize("method", [Reads(), MOON(first="global")])
def test_a_tap_of_a_submodule_that_training_does_not_call_is_named(run, method):
    taps = {"z": "unused", "representation": "unused"}
    with refused("trainer.taps", f"{method.requires[0]}='unused'"):
        run([method], model=net(), taps=taps)


def test_nothing_of_one_batch_is_taken_for_anothers(run):
    class Every(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.unused(torch.ones(1, 1))
            return super().training_step(batch, batch_idx)

    with refused("trainer.taps", "z='unused'"):
        run([Reads()], model=Every(), taps={"z": "unused"})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(), ("RuntimeError", "test_outputs.py:", "(training_step)", "raise error")),
        (KeyError("label"), ("KeyError", "test_outputs.py:", "(training_step)", "'label'")),
    ],
)
def test_an_error_of_a_visit_has_its_type_and_its_place(run, error, words):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if self.trainer.sanity_checking:
                return super().training_step(batch, batch_idx)
            raise error

    with refused("client 0", "round 0", *words, kind=ClientError):
        run(model=Fails())


def test_the_cache_of_references_holds_maps_and_fields(run):
    given = {"data": small_data(partitioner=None), "local_epochs": 2, "taps": {"representation": "body:states:1"}}
    plain, cached = (run([MOON()], model=net("fields"), cache_references=c, **given)[0] for c in (False, True))
    assert_same_bits(plain, cached)
