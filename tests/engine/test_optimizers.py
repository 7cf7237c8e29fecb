"""An optimizer that the module keeps begins each visit as it was when the run began."""

import pytest
import torch
from helpers.conformance import Net, Rows, by_rounds, clients, conform
from helpers.errors import refused
from helpers.runs import assert_same_bits
from torch import nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fl_lightning.engine.optimizers import clear_gradients, take_step


def sgd(parameters):
    return SGD(parameters, lr=0.1, momentum=0.9)


def sequence(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=1), StepLR(optimizer, 1, 0.5)], [1])


# an optimizer and its schedule, and how often it steps
RECIPES = {
    "SGD": (sgd, None, {}),
    "Adam, StepLR": (lambda p: Adam(p, lr=0.01), lambda o: StepLR(o, 1, 0.5), {}),
    "Adagrad": (lambda p: Adagrad(p, lr=0.1), None, {}),
    "LinearLR": (sgd, lambda o: LinearLR(o, 0.1, total_iters=3), {}),
    "LambdaLR": (sgd, lambda o: LambdaLR(o, lambda step: 1 / (1 + step)), {"interval": "step"}),
    "SequentialLR": (sgd, sequence, {}),
    "ReduceLROnPlateau": (sgd, lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0), {"monitor": "train/rate"}),
}

MODES = ("continue", "continue", "continue", "restart", "continue", "continue", "continue")


def recipe(name, parameters, optimizer=None):
    make, schedule, how = RECIPES[name]
    optimizer = optimizer or make(parameters)
    if schedule is None:
        return {"optimizer": optimizer}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), **how}}


class Anew(Net):
    """Builds both in ``configure_optimizers``."""

    def __init__(self, name):
        torch.manual_seed(0)
        super().__init__()
        self.name = name

    def training_step(self, batch, batch_idx):
        self.log("rate", torch.ones(()))  # it never falls, so that a plateau is seen
        return self.loss(batch)

    def configure_optimizers(self):
        return recipe(self.name, self.parameters())


class Keeps(Anew):
    """Keeps both, in the dictionary that it returns."""

    def __init__(self, name):
        super().__init__(name)
        self.recipe = recipe(name, self.parameters())

    def configure_optimizers(self):
        return self.recipe


class KeepsOptimizer(Keeps):
    """Keeps the optimizer, and builds the scheduler anew."""

    def __init__(self, name):
        Anew.__init__(self, name)
        self.optimizer = RECIPES[name][0](self.parameters())

    def configure_optimizers(self):
        return recipe(self.name, self.parameters(), self.optimizer)


class StepsItself(Keeps):
    """A hook of its own steps the scheduler."""

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


def trained(make, what, mode="continue", **how):
    model, how = make(what), {"rounds": 2, "epochs": 1, "precision": "32-true", "client_schedulers": mode, **how}
    trainer = by_rounds(model, clients(Rows(), 8, 6), **how)
    return model, [row.get("lr") for row in trainer.history]


@pytest.mark.parametrize(("name", "mode"), zip(RECIPES, MODES, strict=True))
def test_a_kept_optimizer_has_the_bits_of_one_that_is_built_anew(name, mode):
    anew, rates = trained(Anew, name, mode)
    for make in (Keeps, KeepsOptimizer, *[StepsItself] * (name == "SequentialLR")):
        kept, same = trained(make, name, mode)
        assert_same_bits(kept.state_dict(), anew.state_dict())
        assert rates == same


def test_the_schedule_is_that_of_each_clients_own_number_of_batches():
    class OneCycle(KeepsOptimizer):
        def configure_optimizers(self):
            optimizer = self.optimizer if self.keeps else SGD(self.parameters(), lr=0.1, momentum=0.9)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = OneCycleLR(optimizer, 0.2, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    states = []
    for OneCycle.keeps in (True, False):
        states.append(trained(OneCycle, "SGD")[0].state_dict())
    assert_same_bits(*states)


@pytest.mark.parametrize("name", ["Adam, StepLR", "ReduceLROnPlateau"])
def test_it_does_not_depend_on_workers_nor_on_a_stop(tmp_path, name):
    expected, _ = trained(Anew, name)
    several, _ = trained(Keeps, name, devices=2)
    assert_same_bits(several.state_dict(), expected.state_dict())
    trained(Keeps, name, rounds=1, folder=tmp_path, name="run")
    resumed, _ = trained(Keeps, name, folder=tmp_path, name="run", ckpt_path="last")
    assert_same_bits(resumed.state_dict(), expected.state_dict())


def test_a_visit_is_that_of_lightning():
    conform(lambda: Keeps("SGD"))
    conform(lambda: KeepsOptimizer("LambdaLR"))


class Warm(Keeps):
    """Its optimizer has taken a step before the run, and a hook writes into it in each visit."""

    def __init__(self, name):
        super().__init__(name)
        self.loss((torch.ones(2, 5), torch.tensor([0, 1]))).backward()
        self.recipe["optimizer"].step()

    def on_train_start(self):
        if self.trainer.current_epoch:
            noted.append(self.buffers_of_momentum())
        self.recipe["optimizer"].param_groups[0]["lr"] = 0.3

    def on_train_batch_end(self, outputs, batch, batch_idx):
        rates.append(self.optimizers().param_groups[0]["lr"])

    def buffers_of_momentum(self):
        return [one["momentum_buffer"].clone() for one in self.recipe["optimizer"].state.values()]


noted, rates = [], []


def test_the_initial_state_is_that_of_the_beginning_of_the_run_and_given_back():
    noted.clear()
    rates.clear()
    model = Warm("SGD")
    before = model.buffers_of_momentum()
    by_rounds(model, clients(Rows(), 8, 6), rounds=2, precision="32-true")
    assert len(noted) == 2 and all(map(torch.equal, noted[0] + noted[1], before + before))
    assert set(rates) == {0.3}  # what the module keeps is what trains
    assert all(map(torch.equal, model.buffers_of_momentum(), before))
    assert model.recipe["optimizer"].param_groups[0]["lr"] == 0.1


class OwnSGD(SGD):
    pass


class OwnStepLR(StepLR):
    pass


class OfOwnClass(Keeps):
    def __init__(self, name):
        super().__init__(name)
        self.recipe = OwnSGD(self.parameters(), lr=0.1)


class OwnScheduler(Keeps):
    def __init__(self, name):
        super().__init__(name)
        self.recipe = [self.recipe["optimizer"]], [OwnStepLR(self.recipe["optimizer"], 1)]


class Hooked(Keeps):
    def __init__(self, name):
        super().__init__(name)
        self.recipe["optimizer"].register_step_pre_hook(lambda *_: None)


class InAClosure(Anew):
    def __init__(self, name):
        super().__init__(name)
        optimizer = sgd(self.parameters())
        self.give = lambda: optimizer

    def configure_optimizers(self):
        return self.give()


class Replaced(Keeps):
    def configure_model(self):
        self.net[0] = nn.Linear(5, 6)


class OfAnother(Anew):
    def configure_optimizers(self):
        return [sgd(self.parameters())], [StepLR(sgd(self.parameters()), 1)]


class WithoutOptimizer(Anew):
    def configure_optimizers(self):
        return {"lr_scheduler": None}


REFUSED = {
    OfOwnClass: ("'OwnSGD'", "returns the same"),
    OwnScheduler: ("'SGD'", "returns the same"),
    Hooked: ("'SGD'", "returns the same"),
    Replaced: ("2 tensors", "state_dict"),
    OfAnother: ("lr_scheduler='StepLR'",),
    WithoutOptimizer: ("KeyError", "'optimizer'"),
}


def test_one_that_a_closure_holds_is_brought_back_like_any_other():
    kept, _ = trained(InAClosure, "SGD")
    InAClosure.configure_optimizers, before = lambda self: sgd(self.parameters()), InAClosure.configure_optimizers
    try:
        anew, _ = trained(InAClosure, "SGD")
    finally:
        InAClosure.configure_optimizers = before
    assert_same_bits(kept.state_dict(), anew.state_dict())


def test_a_state_from_before_the_module_was_converted_is_refused(tmp_path):
    with refused("model=Keeps", "configure_optimizers='Adagrad'", "torch.float64"):
        by_rounds(Keeps("Adagrad"), clients(Rows()), folder=tmp_path, precision="64-true")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", REFUSED)
def test_what_cannot_be_brought_back_is_refused(tmp_path, make):
    with refused(f"model={make.__name__}", "configure_optimizers", *REFUSED[make]):
        by_rounds(make("SGD"), clients(Rows()), folder=tmp_path)
    assert not list(tmp_path.iterdir())


class Counts(SGD):
    """Notes who calls its own functions."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.calls = []

    def step(self, closure=None):
        self.calls.append("step")
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)


def with_gradient(make):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter, make([parameter])


@pytest.mark.parametrize("make", [sgd, RECIPES["Adam, StepLR"][0], Counts])
def test_a_step_is_that_of_torch(make):
    (ours, optimizer), (theirs, reference) = with_gradient(make), with_gradient(make)
    for _ in range(2):
        take_step(optimizer)
        reference.step()
    assert ours.detach().equal(theirs.detach()) and not ours.detach().equal(torch.ones(2))
    clear_gradients(optimizer)
    assert ours.grad is None
    assert getattr(optimizer, "calls", ["step", "step", "zero_grad"]) == ["step", "step", "zero_grad"]


def test_hooks_of_a_step_and_a_profiler_see_it():
    seen = []
    _, optimizer = with_gradient(sgd)
    hooks = [register_optimizer_step_pre_hook(lambda *_: seen.append("all"))]
    hooks.append(optimizer.register_step_post_hook(lambda *_: seen.append("own")))
    take_step(optimizer)
    for hook in hooks:
        hook.remove()
    take_step(optimizer)
    assert seen == ["all", "own"]
    with torch.profiler.profile() as profile:
        take_step(optimizer)
        clear_gradients(optimizer)
    spans = {event.name for event in profile.events()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= spans


def test_a_function_in_the_place_of_a_step_is_called():
    parameter, optimizer = with_gradient(sgd)
    StepLR(optimizer, 1)  # puts one there, which notes that the optimizer has stepped
    optimizer._opt_called = False
    take_step(optimizer)
    assert optimizer._opt_called and not parameter.detach().equal(torch.ones(2))
