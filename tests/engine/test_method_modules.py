"""A method may own modules, which train with the client's and are in its state for the run."""

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, differs, plain_sgd_model, small_data, small_trainer, train
from torch import nn
from torch.optim import SGD

from fl_lightning import Method
from fl_lightning.callbacks import Scores
from fl_lightning.functional import as_rows
from fl_lightning.models import MLP, ImageClassifier

pytestmark = pytest.mark.usefixtures("undrawn")
OWN = {"heads.kept.weight", "heads.kept.bias", "heads.sent.weight", "heads.sent.bias"}


class Heads(Method):
    """FedAvg with two other classifiers of the representation: one stays with the client, one is averaged."""

    requires = ("representation",)

    def modules(self, module, taps):
        width = module.get_submodule(taps["representation"]).out_features
        return {name: nn.Linear(width, 10) for name in ("kept", "sent")}

    def exchanges(self, key):
        return not key.startswith("heads.kept.")

    def penalty(self, client, step):
        z = as_rows(step.taps["representation"]).detach()
        parts = (client.module.get_submodule(f"heads.{name}") for name in ("kept", "sent"))
        return sum(nn.functional.cross_entropy(part(z), step.targets) for part in parts)


def own(trainer):
    return [trainer.client.memories().own_entries(k) for k in range(trainer.data.num_clients)]


def model():
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, [16]))


def test_they_train_with_the_clients_optimizer_and_travel_as_exchanges_says(tmp_path):
    plain, of_plain = train(tmp_path, [], model=model())
    state, trainer = train(tmp_path, [Heads()], model=model())
    assert_same_bits(plain, {name: value for name, value in state.items() if name not in OWN})
    assert state.keys() - plain.keys() == OWN
    kept = own(trainer)
    assert all(entries.keys() == {"heads.kept.weight", "heads.kept.bias"} for entries in kept)
    assert differs(kept[0], kept[1])
    sent = state["heads.sent.weight"].nbytes + state["heads.sent.bias"].nbytes
    assert trainer.metrics["bytes/up"] - of_plain.metrics["bytes/up"] == 4 * sent
    assert trainer.metrics["test/accuracy"] == of_plain.metrics["test/accuracy"]
    assert trainer.history[1]["train/heads"] < trainer.history[0]["train/heads"]


@pytest.mark.parametrize("devices", [1, 2])
def test_two_workers_and_a_resume_give_the_same_bits(tmp_path, devices):
    given = {"name": "run", "participation": 0.5}
    whole, trainer = train(tmp_path / "whole", [Heads()], model=model(), max_rounds=3, **given)
    train(tmp_path, [Heads()], model=model(), **given)
    again = small_trainer(tmp_path, max_rounds=3, devices=devices, **given)
    again.fit(model(), small_data(), [Heads()], "last")
    assert_same_bits(whole, again.server.state)
    assert trainer.metrics["train/heads"] == again.metrics["train/heads"]


def test_the_users_module_and_its_files_are_without_them(tmp_path):
    module = model()
    names = [*module.state_dict()]
    _, trainer = train(tmp_path, [Heads()], model=module)
    assert [*module.state_dict()] == names
    folder = trainer.run_dir / "checkpoints"
    for file in ("last.ckpt", "model.ckpt"):
        assert [*torch.load(folder / file, weights_only=True)["state_dict"]] == names
    for methods in ([], [Heads()]):
        with nullcontext() if methods else warned("ckpt_path=", "method=[]", "heads"):
            metrics = small_trainer(tmp_path).test(model(), small_data(), folder / "last.ckpt", method=methods)
        assert metrics["test/accuracy"] == pytest.approx(trainer.metrics["test/accuracy"], abs=1e-6)
        begun = small_trainer(tmp_path, max_rounds=0)
        begun.fit(model(), small_data(), methods, None, folder / "last.ckpt")
        assert not differs({name: trainer.server.state[name] for name in names}, begun.server.state)


def test_a_run_whose_methods_modules_stay_with_the_clients_has_a_global_model(tmp_path):
    _, trainer = train(tmp_path, [Heads()], model=plain_sgd_model(), callbacks=[Scores()], buffers="recalibrate")
    assert trainer.metrics["scores/pooled"] == trainer.metrics["test/accuracy"]


class Named(ImageClassifier):
    """Has an attribute of the name of the method."""

    def __init__(self):
        super().__init__(MLP(64, [16]))
        self.heads = nn.Identity()


class Apart(ImageClassifier):
    """Its optimizer has the classifier alone."""

    def __init__(self):
        super().__init__(MLP(64, [16]))

    def configure_optimizers(self):
        return SGD(self.classifier.parameters(), lr=0.1)


class Wrong(Heads):
    def modules(self, module, taps):
        return {"kept": module.classifier.weight}


def test_what_does_not_fit_is_refused(tmp_path):
    for module, method, words in (
        (Named(), Heads(), ("Named", "heads")),
        (Apart(), Heads(), ("configure_optimizers", "heads.kept.weight")),
        (model(), Wrong(), ("Wrong", "modules")),
    ):
        before = copy.deepcopy(module.state_dict())
        with refused(*words):
            train(tmp_path, [method], model=module)
        assert_same_bits(before, module.state_dict())
