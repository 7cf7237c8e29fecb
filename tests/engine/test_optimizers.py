"""The optimizers that a module configures: what is refused, and whose functions step."""

from functools import partial

import pytest
from helpers.errors import refused
from helpers.runs import assert_same_bits, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fl_lightning.errors import UsageError


def fit(folder, model, rounds=2):
    """Train two clients for some rounds."""
    small_trainer(folder, max_rounds=rounds, enable_progress_bar=False).fit(model, clients(TinyData(), 8, 6))


class Keeps(TinyModule):
    def build(self):
        self.kept = SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.kept


class KeepsItLater(TinyModule):
    kept = None

    def configure_optimizers(self):
        self.kept = self.kept or SGD(self.parameters(), lr=0.1)
        return self.kept


class Replaced(TinyModule):
    """Its optimizer holds parameters that the module no longer has."""

    def build(self):
        self.old = [*self.parameters()]

    def configure_optimizers(self):
        return SGD(self.old, lr=0.1)

    def configure_model(self):
        self.body[0] = nn.Linear(8, 6)


REFUSED = {Keeps: ("'SGD'", "the same"), KeepsItLater: ("'SGD'", "the same"), Replaced: ("2 tensors", "state_dict")}


@pytest.mark.parametrize("make", REFUSED)
def test_an_optimizer_that_a_visit_cannot_begin_with_is_refused(tmp_path, make):
    with refused(f"model={make.__name__}", "configure_optimizers", *REFUSED[make]) as caught:
        fit(tmp_path, make())
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_error_in_configure_optimizers_of_the_users_own_stays_what_it_is(tmp_path):
    class Wrong(TinyModule):
        def configure_optimizers(self):
            raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$") as caught:
        fit(tmp_path, Wrong())
    assert not isinstance(caught.value, UsageError)


# ---------------------------------------------------------------- steps
class Counts(SGD):
    """Notes who calls its own functions."""

    def step(self, closure=None):
        calls.append("step")
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        calls.append("zero_grad")
        super().zero_grad(set_to_none)


calls = []


def test_an_optimizer_of_ones_own_steps_by_its_own_functions(tmp_path):
    calls.clear()
    model, plain = TinyModule(partial(Counts, lr=0.1)), TinyModule(partial(SGD, lr=0.1))
    plain.load_state_dict(model.state_dict())
    fit(tmp_path, model, rounds=1)
    fit(tmp_path, plain, rounds=1)
    assert calls.count("step") == 2 + 2 and "zero_grad" in calls
    assert_same_bits(model.state_dict(), plain.state_dict())


def test_hooks_of_a_step_are_called(tmp_path):
    seen = []

    class Watched(TinyModule):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda *_: seen.append("own"))
            return optimizer

    hook = register_optimizer_step_pre_hook(lambda *_: seen.append("all"))
    fit(tmp_path, Watched(), rounds=1)
    hook.remove()
    assert seen[:8] == ["all", "own"] * 4
