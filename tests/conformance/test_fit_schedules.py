"""The schedules of a module continue from visit to visit, as in one fit of Lightning's Trainer."""

from functools import partial

import pytest
import torch
from helpers.conformance import (
    Net,
    Rows,
    StopAfter,
    assert_same_notes,
    both_precisions,
    by_lightning,
    by_rounds,
    clients,
    conform,
    note,
    notes_of,
)
from helpers.errors import refused
from helpers.runs import assert_same_bits, history
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from fl_lightning import Method


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


class Scheduled(Net):
    """SGD with a scheduler; it notes the rate and momentum of each step."""

    def __init__(self, name="StepLR", interval="epoch", frequency=1, total=None, lr=0.1):
        super().__init__()
        self.make, self.lr, self.total = SCHEDULERS[name], lr, total
        self.options = {"interval": interval, "frequency": frequency}

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=self.lr, momentum=0.8)
        stepwise = self.options["interval"] == "step"
        total = self.total or (self.trainer.estimated_stepping_batches if stepwise else self.trainer.max_epochs)
        scheduler = self.make(optimizer, total)
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
    pair = conform(partial(Scheduled, name, interval), rounds=3)
    assert_same_notes(pair)
    assert len({rate for rate, _ in pair.notes}) > 1


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "SequentialLR"])
def test_schedulers_continue_in_float32(name):
    assert_same_notes(conform(partial(Scheduled, name, "step"), "32-true"))


@pytest.mark.parametrize("frequency", [2, 3])
@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", ["ExponentialLR", "CyclicLR", "OneCycleLR"])
def test_the_frequency_is_lightnings(name, interval, frequency):
    """It counts batches from the start of each epoch, and epochs from the start of the fit."""
    pair = conform(partial(Scheduled, name, interval, frequency), rounds=4, epochs=3)
    assert_same_notes(pair)
    assert len({rate for rate, _ in pair.notes}) > 1


@pytest.mark.parametrize("frequency", [1, 2])
def test_step_schedulers_count_accumulated_batches_as_lightning_does(frequency):
    make = partial(Scheduled, "ExponentialLR", "step", frequency)
    assert_same_notes(conform(make, accumulate_grad_batches=3))


@both_precisions
def test_two_schedulers_of_different_intervals(precision):
    class Model(Net):
        def configure_optimizers(self):
            optimizer = Adam(self.parameters(), lr=0.1)
            each_epoch = schedules.StepLR(optimizer, 1, 0.7)
            each_step = {"scheduler": schedules.ExponentialLR(optimizer, 0.95), "interval": "step"}
            return [optimizer], [each_epoch, each_step]

        def on_train_batch_start(self, batch, batch_idx):
            note(*(scheduler.get_last_lr()[0] for scheduler in self.lr_schedulers()))
            note(self.optimizers().param_groups[0]["lr"])

    assert_same_notes(conform(Model, precision))


def test_groups_of_parameters_have_schedules_of_their_own():
    class Model(Net):
        def configure_optimizers(self):
            groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.01}]
            optimizer = SGD(groups, lr=0.1)
            factors = [lambda epoch: 0.9**epoch, lambda epoch: 1 + epoch]
            return [optimizer], [schedules.LambdaLR(optimizer, factors)]

    conform(Model, rounds=3)


def test_an_own_lr_scheduler_step_is_called_for_each_step_of_the_fit():
    class Model(Scheduled):
        def lr_scheduler_step(self, scheduler, metric):
            assert metric is None
            scheduler.step()
            scheduler.step()

    assert_same_notes(conform(partial(Model, "ExponentialLR", "step"), rounds=3))


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


def test_a_scheduler_that_is_told_the_epoch():
    class Model(Net):
        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=0.1)
            return [optimizer], [ByEpoch(optimizer)]

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step(epoch=self.current_epoch + 1)

        def on_before_optimizer_step(self, optimizer):
            note(optimizer.param_groups[0]["lr"])

    pair = conform(Model, rounds=3)
    assert_same_notes(pair)
    assert len(set(pair.notes)) == 6


# ---------------------------------------------------------------------- continue and restart
def rates_by_rounds(data, model=None, **options):
    """The rate of each step by client and round, and the trainer."""
    model = model or Scheduled("CosineAnnealingLR", "step")
    trainer, notes = notes_of(lambda: by_rounds(model, data, methods=[Rates()], **options))
    visits = {}
    for k, round_, rate in (one for one in notes if len(one) == 3):
        visits.setdefault((k, round_), []).append(rate)
    return visits, trainer


def rates_alone(number, rounds, epochs, model=None):
    """The rate of each step of one fit of Lightning's on ``number`` rows, by round."""
    model = model or Scheduled("CosineAnnealingLR", "step")
    _, notes = notes_of(lambda: by_lightning(model, Rows(number), rounds, epochs))
    each = len(notes) // rounds
    return [[rate for rate, _ in notes[r * each : (r + 1) * each]] for r in range(rounds)]


def test_restart_begins_anew_at_each_visit():
    visits, _ = rates_by_rounds(clients(Rows()), client_schedulers="restart", rounds=3)
    assert visits[0, 0] == visits[0, 1] == visits[0, 2]
    assert len(set(visits[0, 0])) == 8


def test_restart_of_a_schedule_over_the_epochs_of_a_visit():
    model = Scheduled("CosineAnnealingLR", "epoch", total=3)
    visits, _ = rates_by_rounds(clients(Rows()), model, client_schedulers="restart", rounds=3, epochs=1)
    assert [rates[0] for rates in visits.values()] == [0.1, 0.1, 0.1]
    model = Scheduled("CosineAnnealingLR", "epoch", total=3)
    visits, _ = rates_by_rounds(clients(Rows()), model, rounds=3, epochs=1)
    assert [rates[0] for rates in visits.values()] == pytest.approx([0.1, 0.0775, 0.0325])


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR"])
def test_clients_of_unequal_sizes_have_schedules_of_their_own_length(name, interval):
    sizes = (3, 14, 8)
    visits, _ = rates_by_rounds(clients(Rows(25), *sizes), Scheduled(name, interval), rounds=3)
    for k, number in enumerate(sizes):
        alone = rates_alone(number, 3, 2, Scheduled(name, interval))
        assert [visits[k, r] for r in range(3)] == [pytest.approx(rates) for rates in alone]


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "MultiplicativeLR", "OneCycleLR"])
def test_a_client_that_skips_rounds_has_the_rate_of_the_round(name):
    def sampler(seed, round_, number, size):
        return [0] if round_ in (0, 3) else [1] if round_ == 2 else [0, 1]

    data = clients(Rows(17), 3, 14)
    visits, _ = rates_by_rounds(data, Scheduled(name, "step"), rounds=4, sampler=sampler)
    assert set(visits) == {(0, 0), (0, 1), (1, 1), (1, 2), (0, 3)}
    for k, number in enumerate((3, 14)):
        alone = rates_alone(number, 4, 2, Scheduled(name, "step"))
        for (client, round_), rates in visits.items():
            if client == k:
                assert rates == pytest.approx(alone[round_])


def test_local_steps_schedule_over_all_rounds():
    visits, _ = rates_by_rounds(clients(Rows()), local_steps=3, rounds=2)
    model = Scheduled("CosineAnnealingLR", "step")
    _, notes = notes_of(lambda: by_lightning(model, Rows(), epochs=9, max_epochs=-1, max_steps=6))
    assert visits[0, 0] + visits[0, 1] == pytest.approx([rate for rate, _ in notes])


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "MultiplicativeLR", "ChainedScheduler"])
def test_schedules_have_the_same_bits_on_one_and_two_workers(name):
    def train(devices):
        torch.manual_seed(0)
        return by_rounds(Scheduled(name, "step"), clients(Rows(25), 3, 14, 8), devices=devices, participation=0.7)

    one, two = train(1), train(2)
    assert_same_bits(one.server.state, two.server.state)
    assert history(one) == history(two)


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "CyclicLR"])
def test_a_run_that_resumes_in_the_middle_gives_the_same_bits(name, tmp_path):
    def train(folder, **options):
        torch.manual_seed(0)
        data = clients(Rows(22), 14, 8)
        given = {"folder": folder, "participation": 0.5, "checkpoint_every_n_rounds": 1, **options}
        return by_rounds(Scheduled(name, "step"), data, rounds=4, **given)

    whole = train(tmp_path / "whole")
    train(tmp_path / "part", callbacks=[StopAfter(2)])
    resumed = train(tmp_path / "part", ckpt_path="last")
    assert len(resumed.history) == 4
    assert_same_bits(resumed.server.state, whole.server.state)


# ---------------------------------------------------------------------- what is refused
def test_a_schedule_that_ends_before_the_run_is_refused_before_round_0(tmp_path):
    started = []

    class Model(Scheduled):
        def on_train_start(self):
            started.append(1)

    with refused("OneCycleLR"):
        by_rounds(Model("OneCycleLR", "step", total=5), clients(Rows()), folder=tmp_path)
    assert not started
    assert not list(tmp_path.rglob("metrics.csv"))


def test_one_client_whose_schedule_ends_early_is_enough():
    with refused("OneCycleLR"):
        by_rounds(Scheduled("OneCycleLR", "step", total=10), clients(Rows(17), 3, 14))


class OneCycle(Net):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": schedules.OneCycleLR(optimizer, 0.1, steps), "interval": "step"}]

    def on_train_start(self):
        note(self.trainer.num_training_batches)


@pytest.mark.parametrize("sizes", [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_a_client_without_batches_has_no_fit_and_no_schedule(sizes):
    trainer, notes = notes_of(lambda: by_rounds(OneCycle(), clients(Rows(7), *sizes)))
    assert notes == [1, 1, 1, 1]
    assert trainer.history[-1]["clients"] == 3


class Keeping(Net):
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
    assert_same_notes(conform(Keeping, rounds=1))
    with refused("Keeping.schedule='ExponentialLR'", "configure_optimizers"):
        by_rounds(Keeping(), clients(Rows()))
    data = clients(Rows(24), 8, 8, 8)
    _, notes = notes_of(lambda: by_rounds(Keeping(), data, epochs=1, client_schedulers="restart"))
    assert notes == 6 * [0.05, 0.025]


def test_a_sequence_whose_parts_the_module_keeps_is_taken():
    class Model(Net):
        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=0.1)
            self.parts = [schedules.LinearLR(optimizer, 0.5, total_iters=2)]
            self.last = schedules.ExponentialLR(optimizer, 0.9)
            return [optimizer], [schedules.SequentialLR(optimizer, [*self.parts, self.last], [2])]

    conform(Model, rounds=3)


class CountingSteps(Net):
    """Counts and draws in its own hook, and lets the loss depend on both."""

    def __init__(self):
        super().__init__()
        self.number = 0

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
        data, sampler = clients(Rows(42), 14, 14, 14), lambda seed, round_, *_: [0] if round_ == 1 else [0, 1, 2]
        return by_rounds(CountingSteps(), data, rounds=3, devices=devices, sampler=sampler)

    one, two = train(1), train(2)
    assert_same_bits(one.server.state, two.server.state)
    assert history(one) == history(two)


def test_a_schedule_of_the_module_beside_client_lr_scheduler_is_refused():
    options = {"client_lr_scheduler": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9)}
    with refused("trainer.client_lr_scheduler="):
        by_rounds(Scheduled(), clients(Rows()), **options)
    by_rounds(Net(), clients(Rows()), **options)


def test_an_unknown_way_to_schedule_is_refused():
    with refused("trainer.client_schedulers='go on'", "continue", "restart"):
        by_rounds(Scheduled(), clients(Rows()), client_schedulers="go on")


# ---------------------------------------------------------------------- the server's
class Plateau(Net):
    """Its rate falls by half after each evaluation that is no better; the loss of validation rises by construction."""

    def __init__(self, monitor="val_loss", **options):
        super().__init__()
        self.monitor, self.options = monitor, options

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0 + self.current_epoch)

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        scheduler = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **self.options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor}}


def plateau_rates(model, rounds=5, **options):
    """The rate of each round."""
    data = clients(Rows(28, held_out=[6]), 14, 14)
    visits, trainer = rates_by_rounds(data, model, rounds=rounds, epochs=1, **options)
    by_round = {}
    for (_, round_), rates in visits.items():
        by_round.setdefault(round_, set()).update(rates)
    assert all(len(rates) == 1 for rates in by_round.values())
    return [by_round[r].pop() for r in range(rounds)], trainer


def expected_rates(metrics, **options):
    """What torch's scheduler makes of the metric of each round, None in rounds without one."""
    optimizer = SGD([torch.zeros(1)], lr=0.1)
    scheduler = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **options)
    rates = []
    for metric in metrics:
        rates.append(optimizer.param_groups[0]["lr"])
        if metric is not None:
            scheduler.step(metric)
    return rates


def metric_of(row):
    return next((row[name] for name in ("val_loss", "val/loss", "val/val_loss") if name in row), None)


def test_a_schedule_that_watches_a_metric_steps_once_a_round_on_the_metric_of_the_round():
    rates, trainer = plateau_rates(Plateau())
    metrics = [metric_of(row) for row in trainer.history]
    assert rates == expected_rates(metrics)
    assert len(set(rates)) > 2


def test_it_steps_after_rounds_that_evaluated_only():
    rates, trainer = plateau_rates(Plateau(), eval_every_n_rounds=2)
    metrics = [metric_of(row) for row in trainer.history]
    assert [metric is None for metric in metrics] == [True, False, True, False, False]
    assert rates == expected_rates(metrics)
    assert rates[-1] < rates[0]


def test_it_is_the_same_on_two_workers_and_after_a_resume(tmp_path):
    def train(folder, **options):
        torch.manual_seed(0)
        data = clients(Rows(28, held_out=[6]), 14, 14)
        return by_rounds(Plateau(), data, 5, 1, folder=folder, checkpoint_every_n_rounds=1, **options)

    whole = train(tmp_path / "whole")
    assert_same_bits(train(tmp_path / "two", devices=2).server.state, whole.server.state)
    train(tmp_path / "part", callbacks=[StopAfter(2)])
    assert_same_bits(train(tmp_path / "part", ckpt_path="last").server.state, whole.server.state)


def test_a_metric_that_nothing_logs_is_refused_by_name():
    with refused("monitor='no_such_metric'", "val_loss"):
        plateau_rates(Plateau("no_such_metric"), rounds=1)
