"""The schedules of a module continue from visit to visit, as in one fit of Lightning's Trainer."""

from functools import partial

import pytest
import torch
from helpers.conformance import by_lightning, by_rounds, conform, note, notes_of
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, history
from helpers.tiny import TinyData, TinyModule, clients, variant
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from fl_lightning import Method
from fl_lightning.callbacks import Callback

# Lightning doubts an interval that it supports
pytestmark = pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using:RuntimeWarning")


def sequential(optimizer, total):
    first = schedules.LinearLR(optimizer, 0.3, total_iters=2)
    second = schedules.CosineAnnealingLR(optimizer, max(total - 2, 1))
    return schedules.SequentialLR(optimizer, [first, second], milestones=[2])


def chained(optimizer, total):
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, total_iters=3), schedules.ExponentialLR(optimizer, 0.9)]
    )


# each from (optimizer, number of times that it is stepped in the fit)
SCHEDULERS = {
    "StepLR": lambda o, total: schedules.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o, total: schedules.MultiStepLR(o, [1, 3], gamma=0.4),
    "ConstantLR": lambda o, total: schedules.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o, total: schedules.LinearLR(o, 0.2, total_iters=3),
    "ExponentialLR": lambda o, total: schedules.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o, total: schedules.PolynomialLR(o, total_iters=total, power=2.0),
    "CosineAnnealingLR": lambda o, total: schedules.CosineAnnealingLR(o, total, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda o, total: schedules.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "CyclicLR": lambda o, total: schedules.CyclicLR(o, 0.02, 0.2, step_size_up=3),
    "OneCycleLR": lambda o, total: schedules.OneCycleLR(o, 0.3, total_steps=total),
    "LambdaLR": lambda o, total: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o, total: schedules.MultiplicativeLR(o, lambda step: 0.5 + 0.1 * (step % 3)),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "SWALR": lambda o, total: SWALR(o, 0.02, anneal_epochs=3),
}


class Scheduled(TinyModule):
    """SGD with a scheduler; it notes the rate and momentum of each step."""

    def __init__(self, name="CosineAnnealingLR", interval="step", frequency=1, total=None):
        super().__init__()
        self.make, self.total = SCHEDULERS[name], total
        self.options = {"interval": interval, "frequency": frequency}

    def configure_optimizers(self):
        optimizer, trainer = SGD(self.parameters(), lr=0.1, momentum=0.8), self.trainer
        whole = trainer.estimated_stepping_batches if self.options["interval"] == "step" else trainer.max_epochs
        scheduler = self.make(optimizer, self.total or whole)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.options}}

    def on_before_optimizer_step(self, optimizer):
        (group,) = optimizer.param_groups
        note(group["lr"], group["momentum"])


class Rates(Method):
    """Notes the client, the round and the rate of each step."""

    def on_round_start(self, server):
        self.round = server.round

    def on_before_optimizer_step(self, client, optimizer):
        note(client.info.id, self.round, optimizer.param_groups[0]["lr"])


def test_every_scheduler_of_torch_is_here():
    """Those that need a metric or give no rate are left out by name."""
    base = schedules.LRScheduler
    known = {name for name, one in vars(schedules).items() if isinstance(one, type) and issubclass(one, base)}
    assert known - {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"} <= set(SCHEDULERS)


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_continues(name, interval):
    pair = conform(partial(Scheduled, name, interval))
    assert len({rate for rate, _ in pair.notes}) > 1


@pytest.mark.parametrize("frequency", [2, 3])
@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", ["ExponentialLR", "CyclicLR", "OneCycleLR"])
def test_the_frequency_is_lightnings(name, interval, frequency):
    """It counts batches from the start of each epoch, and epochs from the start of the fit."""
    pair = conform(partial(Scheduled, name, interval, frequency), epochs=3)
    assert len({rate for rate, _ in pair.notes}) > 1


@pytest.mark.parametrize("frequency", [1, 2])
def test_step_schedulers_count_accumulated_batches_as_lightning_does(frequency):
    conform(partial(Scheduled, "ExponentialLR", "step", frequency), accumulate_grad_batches=3)


class TwoIntervals(TinyModule):
    def configure_optimizers(self):
        optimizer = Adam(self.parameters(), lr=0.1)
        each_step = {"scheduler": schedules.ExponentialLR(optimizer, 0.95), "interval": "step"}
        return [optimizer], [schedules.StepLR(optimizer, 1, 0.7), each_step]

    def on_train_batch_start(self, batch, batch_idx):
        note([scheduler.get_last_lr()[0] for scheduler in self.lr_schedulers()])
        note(self.optimizers().param_groups[0]["lr"])


class ScheduleOfEachGroup(TinyModule):
    def configure_optimizers(self):
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 0.01}]
        optimizer = SGD(groups, lr=0.1)
        factors = [lambda epoch: 0.9**epoch, lambda epoch: 1 + epoch]
        return [optimizer], [schedules.LambdaLR(optimizer, factors)]


class StepsTwice(Scheduled):
    def lr_scheduler_step(self, scheduler, metric):
        assert metric is None
        scheduler.step()
        scheduler.step()


class KeepsTheParts(TinyModule):
    """A sequence of schedulers, which the module keeps as well."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        self.parts = [schedules.LinearLR(optimizer, 0.5, total_iters=2)]
        self.last = schedules.ExponentialLR(optimizer, 0.9)
        return [optimizer], [schedules.SequentialLR(optimizer, [*self.parts, self.last], [2])]


class ByEpoch:
    """A scheduler that is none of torch's, as timm's are: it is told the epoch."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + epoch)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class ToldTheEpoch(TinyModule):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [ByEpoch(optimizer)]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch + 1)

    def on_before_optimizer_step(self, optimizer):
        note(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("make", [TwoIntervals, ScheduleOfEachGroup, StepsTwice, KeepsTheParts, ToldTheEpoch])
def test_schedules_of_other_forms_continue(make):
    conform(make, rounds=3)


# ---------------------------------------------------------------------- continue and restart
def rates_by_rounds(model, data=None, **options):
    """The rate of each step by client and round, and the trainer."""
    data = data or clients(TinyData())
    trainer, notes = notes_of(lambda: by_rounds(model, data, methods=[Rates()], **options))
    visits = {}
    for k, round_, rate in (one for one in notes if len(one) == 3):
        visits.setdefault((k, round_), []).append(rate)
    return visits, trainer


def rates_alone(model, number, rounds):
    """The rate of each step of one fit of Lightning's on ``number`` examples, by round."""
    _, notes = notes_of(lambda: by_lightning(model, TinyData(number), rounds))
    each = len(notes) // rounds
    return [[rate for rate, _ in notes[r * each : (r + 1) * each]] for r in range(rounds)]


def test_restart_begins_anew_at_each_visit():
    visits, _ = rates_by_rounds(Scheduled(), client_schedulers="restart", rounds=3)
    assert visits[0, 0] == visits[0, 1] == visits[0, 2]
    assert len(set(visits[0, 0])) == 8
    visits, _ = rates_by_rounds(Scheduled(interval="epoch", total=3), client_schedulers="restart", rounds=3, epochs=1)
    assert [rates[0] for rates in visits.values()] == [0.1, 0.1, 0.1]


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR"])
def test_clients_of_unequal_sizes_have_schedules_of_their_own_length(name, interval):
    sizes = (3, 14, 8)
    visits, _ = rates_by_rounds(Scheduled(name, interval), clients(TinyData(25), *sizes))
    for k, number in enumerate(sizes):
        alone = rates_alone(Scheduled(name, interval), number, 2)
        assert [visits[k, r] for r in range(2)] == [pytest.approx(rates) for rates in alone]


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "MultiplicativeLR", "OneCycleLR"])
def test_a_client_that_skips_rounds_has_the_rate_of_the_round(name):
    def sampler(seed, round_, number, size):
        return [0] if round_ in (0, 3) else [1] if round_ == 2 else [0, 1]

    visits, _ = rates_by_rounds(Scheduled(name), clients(TinyData(17), 3, 14), rounds=4, sampler=sampler)
    alone = [rates_alone(Scheduled(name), number, 4) for number in (3, 14)]
    trained = [(0, 0), (0, 1), (1, 1), (1, 2), (0, 3)]
    assert visits == {(k, round_): pytest.approx(alone[k][round_]) for k, round_ in trained}


def test_local_steps_schedule_over_all_rounds():
    visits, _ = rates_by_rounds(Scheduled(), local_steps=3)
    _, notes = notes_of(lambda: by_lightning(Scheduled(), TinyData(), epochs=9, max_epochs=-1, max_steps=6))
    assert visits[0, 0] + visits[0, 1] == pytest.approx([rate for rate, _ in notes])


# ---------------------------------------------------------------------- what is refused
def test_a_schedule_that_ends_before_the_run_of_any_client_is_refused_before_round_0(tmp_path):
    Model = variant(Scheduled, on_train_start=lambda self: note("started"))

    def fit():
        with refused("OneCycleLR"):
            by_rounds(Model("OneCycleLR", total=10), clients(TinyData(17), 3, 14), folder=tmp_path)

    assert notes_of(fit)[1] == []
    assert not list(tmp_path.rglob("metrics.csv"))


@pytest.mark.parametrize("sizes", [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_a_client_without_batches_has_no_fit_and_no_schedule(sizes):
    with warned("data"):
        visits, trainer = rates_by_rounds(Scheduled("OneCycleLR"), clients(TinyData(7), *sizes))
    assert set(visits) == {(k, r) for k in range(3) for r in range(2) if sizes[k]}
    assert {len(rates) for rates in visits.values()} == {2}
    assert trainer.history[-1]["clients"] == 2


class Keeping(TinyModule):
    """Keeps a scheduler that Lightning knows nothing of, and steps it by itself."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        self.schedule = schedules.ExponentialLR(optimizer, 0.5)
        return optimizer

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.schedule.step()
        note(self.trainer.optimizers[0].param_groups[0]["lr"])


def test_a_scheduler_that_the_module_keeps_is_refused_unless_visits_begin_anew():
    conform(Keeping, rounds=1)
    with refused("Keeping.schedule='ExponentialLR'", "configure_optimizers"):
        by_rounds(Keeping(), clients(TinyData()))
    data = clients(TinyData(16), 8, 8)
    _, notes = notes_of(lambda: by_rounds(Keeping(), data, epochs=1, client_schedulers="restart"))
    assert notes == 4 * [0.05, 0.025]


class CountingSteps(TinyModule):
    """Counts and draws in its own hook, and lets the loss depend on both."""

    number = 0

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [schedules.ExponentialLR(optimizer, 0.9)]

    def lr_scheduler_step(self, scheduler, metric):
        self.number += 1 + torch.rand(())
        scheduler.step()

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.number + torch.rand(()))


def test_what_the_hook_does_to_reach_a_position_is_no_part_of_a_visit():
    """On one worker fewer steps lead to the beginning of a visit, since clients of one size share a position."""

    def train(devices):
        torch.manual_seed(0)
        data, sampler = clients(TinyData(42), 14, 14, 14), lambda seed, round_, *_: [0] if round_ == 1 else [0, 1, 2]
        return by_rounds(CountingSteps(), data, rounds=3, devices=devices, sampler=sampler)

    one, two = train(1), train(2)
    assert_same_bits(one.server.state, two.server.state)
    assert history(one) == history(two)


def test_a_schedule_of_the_module_beside_client_lr_scheduler_and_an_unknown_mode_are_refused():
    options = {"client_lr_scheduler": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9)}
    with refused("trainer.client_lr_scheduler="):
        by_rounds(Scheduled(), clients(TinyData()), **options)
    by_rounds(TinyModule(), clients(TinyData()), **options)
    with refused("trainer.client_schedulers='go on'", "continue", "restart"):
        by_rounds(Scheduled(), clients(TinyData()), client_schedulers="go on")


# ---------------------------------------------------------------------- the server's
class Plateau(TinyModule):
    """Its rate falls by half after each evaluation that is no better; the loss of validation rises by construction."""

    monitor = "val_loss"

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0 + self.current_epoch)

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        scheduler = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor}}


def two_clients():
    return clients(TinyData(28, val=[6]), 14, 14)


@pytest.mark.parametrize(("every", "expected"), [(1, [0.1, 0.1, 0.05, 0.025, 0.0125]), (2, [0.1, 0.1, 0.1, 0.1, 0.05])])
def test_a_schedule_that_watches_a_metric_steps_once_a_round_that_was_evaluated(every, expected):
    visits, _ = rates_by_rounds(Plateau(), two_clients(), rounds=5, epochs=1, eval_every_n_rounds=every)
    assert visits == {(k, r): 4 * [expected[r]] for r in range(5) for k in range(2)}


class Recalls(TinyModule):
    """Its rate depends on the last loss of validation that it knows."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0 + self.current_epoch)

    def on_train_start(self):
        self.optimizers().param_groups[0]["lr"] = 0.1 / float(self.trainer.callback_metrics.get("val_loss", 1.0))


@pytest.mark.parametrize("kind", [Plateau, Recalls])
def test_an_evaluation_that_only_a_callback_requires_does_not_change_training(kind):
    requires = variant(Callback, requires_evaluation=lambda self, round_: True)
    visits = []
    for callbacks in ([], [requires()]):
        how = {"rounds": 5, "epochs": 1, "eval_every_n_rounds": 2, "callbacks": callbacks}
        visits.append(rates_by_rounds(kind(), two_clients(), **how)[0])
    assert visits[0] == visits[1]


class Unlogged(Plateau):
    monitor = "no_such_metric"


@pytest.mark.parametrize("mode", ["continue", "restart"])
def test_a_metric_that_nothing_logs_is_refused_by_name_or_warned_of_if_the_schedule_is_not_strict(mode):
    class Lenient(Unlogged):
        def configure_optimizers(self):
            both = super().configure_optimizers()
            return {**both, "lr_scheduler": {**both["lr_scheduler"], "strict": False}}

    how = {"rounds": 2, "epochs": 1, "client_schedulers": mode}
    with refused("monitor='no_such_metric'", "loss"):
        by_rounds(Unlogged(), two_clients(), **how)
    with warned("monitor='no_such_metric'", "loss", "strict"):
        trainer = by_rounds(Lenient(), two_clients(), **how)
    assert [row["lr"] for row in trainer.history] == [0.1, 0.1]
