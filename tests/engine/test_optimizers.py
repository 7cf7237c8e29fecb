"""An optimizer that the module keeps begins each visit as it was when the run began."""

from functools import partial

import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fl_lightning.errors import UsageError

sgd = partial(SGD, lr=0.1, momentum=0.9)


def sequence(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=1), StepLR(optimizer, 1, 0.5)], [1])


# an optimizer and its schedule, how often it steps, and ``trainer.client_schedulers``
RECIPES = {
    "SGD": (sgd, None, {}, "continue"),
    "Adam, StepLR": (partial(Adam, lr=0.01), lambda o: StepLR(o, 1, 0.5), {}, "continue"),
    "Adagrad": (partial(Adagrad, lr=0.1), None, {}, "continue"),
    "LinearLR": (sgd, lambda o: LinearLR(o, 0.1, total_iters=3), {}, "restart"),
    "LambdaLR": (sgd, lambda o: LambdaLR(o, lambda step: 1 / (1 + step)), {"interval": "step"}, "continue"),
    "SequentialLR": (sgd, sequence, {}, "continue"),
    "ReduceLROnPlateau": (
        sgd,
        lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0),
        {"monitor": "train/rate"},
        "continue",
    ),
}


class Anew(TinyModule):
    """Builds the optimizer and its scheduler in ``configure_optimizers``."""

    def __init__(self, name="SGD"):
        self.name = name
        torch.manual_seed(0)
        super().__init__()

    def recipe(self, optimizer=None):
        make, schedule, how, _ = RECIPES[self.name]
        optimizer = optimizer or make(self.parameters())
        if schedule is None:
            return {"optimizer": optimizer}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), **how}}

    def training_step(self, batch, batch_idx):
        self.log("rate", torch.ones(()))  # it never falls, so that a plateau is seen
        return self.loss(batch)

    def configure_optimizers(self):
        return self.recipe()


class Keeps(Anew):
    """Keeps both, in the dictionary that it returns."""

    def build(self):
        self.kept = self.recipe()

    def configure_optimizers(self):
        return self.kept


class KeepsOptimizer(Anew):
    """Keeps the optimizer, and builds the scheduler anew."""

    def build(self):
        self.kept = RECIPES[self.name][0](self.parameters())

    def configure_optimizers(self):
        return self.recipe(self.kept)


class StepsItself(Keeps):
    """A hook of its own steps the scheduler."""

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


def fit(folder, model, rounds=2, **kwargs):
    """Train two clients for some rounds; returns the trainer."""
    trainer = small_trainer(folder, max_rounds=rounds, enable_progress_bar=False, **kwargs)
    trainer.fit(model, clients(TinyData(), 8, 6))
    return trainer


def trained(folder, make, name):
    model = make(name)
    trainer = fit(folder, model, client_schedulers=RECIPES[name][3])
    return model.state_dict(), [row.get("lr") for row in trainer.history]


@pytest.mark.parametrize("name", RECIPES)
def test_a_kept_optimizer_has_the_bits_of_one_that_is_built_anew(tmp_path, name):
    anew, rates = trained(tmp_path, Anew, name)
    for make in (Keeps, KeepsOptimizer, *[StepsItself] * (name == "SequentialLR")):
        kept, same = trained(tmp_path, make, name)
        assert_same_bits(kept, anew)
        assert rates == same


class Warm(Keeps):
    """Its optimizer has taken a step before the run, and a hook writes into it in each visit."""

    def build(self):
        super().build()
        self.loss((torch.ones(2, 8), torch.tensor([0, 1]))).backward()
        self.kept["optimizer"].step()

    def on_train_start(self):
        if self.trainer.current_epoch:
            noted.append(self.buffers_of_momentum())
        self.kept["optimizer"].param_groups[0]["lr"] = 0.3

    def on_train_batch_end(self, outputs, batch, batch_idx):
        rates.append(self.optimizers().param_groups[0]["lr"])

    def buffers_of_momentum(self):
        return [one["momentum_buffer"].clone() for one in self.kept["optimizer"].state.values()]


noted, rates = [], []


def test_a_visit_begins_with_the_optimizer_as_it_was_before_the_run_and_so_does_the_user(tmp_path):
    noted.clear()
    rates.clear()
    model = Warm()
    before = model.buffers_of_momentum()
    fit(tmp_path, model)
    assert len(noted) == 2 and all(map(torch.equal, noted[0] + noted[1], before + before))
    assert set(rates) == {0.3}  # what the module keeps is what trains
    assert all(map(torch.equal, model.buffers_of_momentum(), before))
    assert model.kept["optimizer"].param_groups[0]["lr"] == 0.1


class OwnSGD(SGD):
    pass


class OfOwnClass(Keeps):
    def build(self):
        self.kept = OwnSGD(self.parameters(), lr=0.1)


class Hooked(Keeps):
    def build(self):
        super().build()
        self.kept["optimizer"].register_step_pre_hook(lambda *_: None)


class Replaced(Keeps):
    def configure_model(self):
        self.body[0] = nn.Linear(8, 6)


REFUSED = {
    OfOwnClass: ("'OwnSGD'", "returns the same"),
    Hooked: ("'SGD'", "returns the same"),
    Replaced: ("2 tensors", "state_dict"),
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_cannot_be_brought_back_is_refused(tmp_path, make):
    with refused(f"model={make.__name__}", "configure_optimizers", *REFUSED[make]) as caught:
        fit(tmp_path, make())
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_state_from_before_the_module_was_converted_is_refused(tmp_path):
    with refused("model=Keeps", "configure_optimizers='Adagrad'", "torch.float64"):
        fit(tmp_path, Keeps("Adagrad"), precision="64-true")
    assert not list(tmp_path.iterdir())


def test_an_error_in_configure_optimizers_of_the_users_own_stays_what_it_is(tmp_path):
    class Wrong(Anew):
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
