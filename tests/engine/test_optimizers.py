"""The optimizers that a module configures: what is refused, and whose functions step."""

import copy
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, small_trainer
from helpers.tiny import TinyData, TinyModule, clients, variant
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fl_lightning.callbacks import Callback
from fl_lightning.utilities.errors import UsageError


def fit(folder, model, rounds=2):
    """Train two clients for some rounds."""
    small_trainer(folder, max_rounds=rounds, enable_progress_bar=False).fit(model, clients(TinyData(), 8, 6))


class Replaced(TinyModule):
    """Its optimizer holds parameters that the module no longer has."""

    def build(self):
        self.old = [*self.parameters()]

    def configure_optimizers(self):
        return SGD(self.old, lr=0.1)

    def configure_model(self):
        self.body[0] = nn.Linear(8, 6)


def scheduled(**functions):
    """A module whose scheduler has these functions of a state alone."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [SimpleNamespace(optimizer=optimizer, step=lambda: None, **functions)]

    return variant(
        TinyModule,
        configure_optimizers=configure_optimizers,
        lr_scheduler_step=lambda self, scheduler, metric: scheduler.step(),
    )


def keeps_it(module):
    module.kept = getattr(module, "kept", None) or SGD(module.parameters(), lr=0.1)
    return module.kept


NO_STATE = ("lr_scheduler='SimpleNamespace'", "state_dict")
REFUSED = {
    "one optimizer for all": (variant(TinyModule, configure_optimizers=keeps_it), ("'SGD'", "the same")),
    "of the constructor": (variant(TinyModule, build=keeps_it, configure_optimizers=keeps_it), ("'SGD'", "the same")),
    "replaced": (Replaced, ("2 tensors", "state_dict")),
    "no state": (scheduled(), NO_STATE),
    "no dictionary": (scheduled(state_dict=lambda: None, load_state_dict=lambda state: None), NO_STATE),
    "not loaded": (scheduled(state_dict=dict), NO_STATE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_a_visit_cannot_begin_with_is_refused(tmp_path, name):
    make, words = REFUSED[name]
    with refused(f"model={make.__name__}", "configure_optimizers", *words) as caught:
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


class Averaging(SGD):
    """SGD whose parameters are the mean of its iterates after ``eval()``, as with schedule-free optimizers."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.mode, self.iterates = "eval", []

    def train(self):
        if self.mode == "eval" and self.iterates:
            self.put(self.iterates[-1])
        self.mode = "train"

    def eval(self):
        if self.mode == "train":
            self.put([torch.stack(values).mean(0) for values in zip(*self.iterates, strict=True)])
        self.mode = "eval"

    def step(self, closure=None):
        if self.mode == "eval":
            raise RuntimeError("call train() before a step")
        loss = super().step(closure)
        self.iterates.append([value.detach().clone() for value in self.param_groups[0]["params"]])
        return loss

    @torch.no_grad()
    def put(self, values):
        for parameter, value in zip(self.param_groups[0]["params"], values, strict=True):
            parameter.copy_(value)


def averaged_by_hand(model, steps):
    """The parameters after ``steps`` batches, in a plain loop."""
    copied = copy.deepcopy(model)
    optimizer = Averaging(copied.parameters(), lr=0.1)
    optimizer.train()
    for batch in itertools.islice(TinyData().train_dataloader(), steps):
        optimizer.zero_grad()
        copied.loss(batch).backward()
        optimizer.step()
    optimizer.eval()
    return copied.state_dict()


class Tunes(Callback):
    """Fine-tunes the global model by two steps."""

    def on_round_end(self, trainer):
        self.tuned = trainer.fine_tune(0, None, 2)


def test_an_optimizer_with_train_and_eval_sends_the_weights_of_eval(tmp_path):
    model, tunes = TinyModule(partial(Averaging, lr=0.1)), Tunes()
    expected = averaged_by_hand(model, 4)
    trainer = small_trainer(tmp_path, max_rounds=1, callbacks=[tunes])
    trainer.fit(model, clients(TinyData()))
    torch.testing.assert_close(dict(trainer.server.state), dict(expected))
    torch.testing.assert_close(dict(tunes.tuned), dict(averaged_by_hand(model, 2)))


@pytest.mark.parametrize("make", [lambda: {"lr": torch.tensor(1.0)}, partial(dict, lr=torch.tensor(1.0))])
def test_a_tensor_as_rate_is_logged_as_the_number_that_each_step_had(tmp_path, make):
    class Falls(TinyModule):
        def on_train_batch_start(self, batch, batch_idx):
            self.optimizers().param_groups[0]["lr"].mul_(0.5)

    seen = []

    looks = variant(Callback, on_client_end=lambda self, trainer, client: seen.append((type(client.lr), client.lr)))()

    model = Falls(lambda parameters: SGD(parameters, **make()))
    small_trainer(tmp_path, max_rounds=2, callbacks=[looks]).fit(model, clients(TinyData()))
    assert seen == [(float, 0.5**4)] * 2


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_rate_by_epoch_is_that_of_the_first_epoch_in_each_visit(tmp_path, scheduled):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1 / (1 + self.current_epoch))
        return [optimizer], [StepLR(optimizer, 100)] * scheduled

    model = variant(TinyModule, configure_optimizers=configure_optimizers)()
    for rounds, path in ((1, None), (3, "last")):
        trainer = small_trainer(tmp_path, max_rounds=rounds)
        trainer.fit(model, clients(TinyData()), ckpt_path=path)
    assert [row["lr"] for row in trainer.history] == [0.1] * 3


def test_a_rate_by_the_number_of_batches_is_that_of_each_client(tmp_path):
    def configure_optimizers(self):
        return SGD(self.parameters(), lr=1 / self.trainer.num_training_batches)

    model = variant(TinyModule, configure_optimizers=configure_optimizers)
    for size in (1, 2):
        trainer = small_trainer(tmp_path, clients_per_step=size)
        trainer.fit(model(), clients(TinyData(40), 12, 12, 8, 8))
        assert [row["lr"] for row in trainer.history] == [pytest.approx((1 / 3 + 1 / 2) / 2)] * 2


# ---------------------------------------------------------------- layers that unfreeze
def unfreezing(condition):
    """A module whose body is trained in the epochs for which the condition holds."""

    class Unfreezes(TinyModule):
        def build(self):
            self.body.requires_grad_(False)

        def on_train_epoch_start(self):
            if condition(self.current_epoch):
                self.body.requires_grad_(True)

    return Unfreezes()


def test_a_layer_that_is_unfrozen_for_one_visit_alone_is_named_once(tmp_path):
    with warned("model=Unfreezes", "requires_grad", "body.0.weight", "body.0.bias", "round 1", "round 2") as lines:
        fit(tmp_path, unfreezing(lambda epoch: epoch == 1), rounds=5)
    assert sum("requires_grad" in str(line.message) for line in lines) == 1


def test_a_layer_that_is_unfrozen_in_every_visit_from_a_round_on_causes_no_warning(tmp_path):
    fit(tmp_path, unfreezing(lambda epoch: epoch >= 1), rounds=4)
