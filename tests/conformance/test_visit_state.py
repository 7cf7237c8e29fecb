"""What a visit begins with, what it leaves behind, and what travels; on one and on two workers the same bits."""

import copy
from collections import deque

import pytest
import torch
from helpers.conformance import Net, Rows, StopAfter, by_rounds, clients, note, notes_of
from helpers.errors import refused
from helpers.runs import assert_same_bits, history
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, lr_scheduler
from torchmetrics import MetricCollection, SumMetric

from fl_lightning import Method
from fl_lightning.errors import ClientError, UsageError


def three_clients(held_out=(6,)):
    return clients(Rows(25, held_out=held_out), 3, 14, 8)


def train(make, devices=1, data=None, **options):
    """Train ``make()`` with three clients."""
    torch.manual_seed(0)
    return by_rounds(make(), (data or three_clients)(), devices=devices, **options)


# ---------------------------------------------------------------------- what is in no state
class Counter:
    """An object of the user's own, which torch and Lightning know nothing of."""

    number = 0


class Stateful(Net):
    """Counts in all that is in no state dict, and lets the loss depend on all of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(2), persistent=False)
        self.tensor, self.number, self.flag = torch.zeros(2), 0.0, False
        self.list, self.dict, self.set, self.queue = [], {"seen": [0]}, set(), deque(maxlen=3)
        self.inner = nn.Module()
        self.inner.count = 0
        self.object, self.hidden = Counter(), [nn.Linear(1, 1, bias=False).requires_grad_(False)]
        nn.init.zeros_(self.hidden[0].weight)
        self.metric = SumMetric()
        self.metrics = MetricCollection({"sum": SumMetric()})
        self.generator = torch.Generator().manual_seed(0)

    def sizes(self):
        """A number for each of them."""
        numbers = [float(self.buffer[0]), float(self.tensor[0]), self.number, float(self.flag), float(self.inner.count)]
        lengths = [len(self.list), self.dict["seen"][0], len(self.set), len(self.queue)]
        others = [self.object.number, float(self.hidden[0].weight)]
        return [*numbers, *lengths, *others, float(self.metric.sum_value), float(self.metrics["sum"].sum_value)]

    def training_step(self, batch, batch_idx):
        self.buffer += 1
        self.tensor = self.tensor + 1
        self.number, self.flag, self.inner.count = self.number + 1, True, self.inner.count + 1
        self.list.append(1)
        self.dict["seen"][0] += 1
        self.set.add(batch_idx)
        self.queue.append(1)
        self.object.number += 1
        self.hidden[0].weight += 1
        self.metric.update(1.0)
        self.metrics.update(1.0)
        self.late = getattr(self, "late", 0) + 1
        noise = torch.randn((), generator=self.generator)
        return self.loss(batch) * (1 + 0.01 * sum(self.sizes()) + 0.1 * self.late + 0.1 * noise)

    def on_train_start(self):
        note("visit", self.sizes(), hasattr(self, "late"))

    def on_validation_start(self):
        note("validation", self.sizes(), hasattr(self, "late"))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def test_what_is_in_no_state_begins_each_visit_and_evaluation_as_at_the_start_of_the_run():
    trainer, notes = notes_of(lambda: train(Stateful))
    fresh = Stateful().sizes()
    assert notes == 2 * [*(3 * [("visit", fresh, False)]), ("validation", fresh, False)]
    assert len(trainer.history) == 2


class Ends(Method):
    """Notes where each client's visit ends."""

    def on_client_end(self, client):
        note(client.info.id, {name: value.tolist() for name, value in client.state().items()})
        return {}


def test_a_visit_sees_nothing_of_the_visits_before_it():
    """A client ends where it ends when it trains alone."""

    def end_of_the_last(cohort):
        options = {"rounds": 1, "sampler": lambda *given: cohort, "methods": [Ends()]}
        _, notes = notes_of(lambda: train(Stateful, **options))
        return [one for one in notes if one[0] == 2]

    assert end_of_the_last([0, 1, 2]) == end_of_the_last([2])


class Keeping(Net):
    """Never sets its gradients to zero."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        note(batch_idx, self.net[0].weight.grad is None)


def test_gradients_do_not_pass_from_client_to_client():
    _, notes = notes_of(lambda: train(Keeping, rounds=1, epochs=1))
    assert [empty for batch_idx, empty in notes if batch_idx == 0] == [True, True, True]
    assert not any(empty for batch_idx, empty in notes if batch_idx > 0)


# ---------------------------------------------------------------------- the same bits on two workers
class Rebound(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def training_step(self, batch, batch_idx):
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        return self.loss((batch[0] - self.mean, batch[1]))


class Teacher(Net):
    """A teacher that follows the student, and a frozen backbone in eval mode with dropout before both."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.backbone = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)).requires_grad_(False).eval()

    def training_step(self, batch, batch_idx):
        x = self.backbone(batch[0])
        return self.loss((x, batch[1])) + mse_loss(self(x), self.teacher(x))

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            own.lerp_(other, 0.3)


class OwnHooks(Net):
    """Steps, clips, and warms up by itself; draws noise on the batch's way; has a schedule."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, total), "interval": "step"}]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 0.1 * torch.randn_like(batch[0]) * self.trainer.training, batch[1]]

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        loss = optimizer.step(closure=optimizer_closure)
        self.log("weighted", float(loss) * (self.global_step + 1) / self.trainer.estimated_stepping_batches)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.1 * (1 + self.current_epoch), "norm")


class Average:
    """A moving average of parameters, kept by an object that is no module."""

    def __init__(self, parameters):
        self.updates, self.values = 0, [parameter.detach().double() for parameter in parameters]

    def update(self, parameters):
        self.updates += 1
        for value, parameter in zip(self.values, parameters, strict=True):
            value.lerp_(parameter.detach().double(), 1 / (1 + self.updates))


class Averaged(Net):
    """Follows itself in an object, and in a copy that it hides from the state dict."""

    def __init__(self):
        super().__init__()
        self.average, self.hidden = Average(self.net.parameters()), [copy.deepcopy(self.net).double()]

    def training_step(self, batch, batch_idx):
        self.average.update(self.net.parameters())
        with torch.no_grad():
            for own, other in zip(self.hidden[0].parameters(), self.net.parameters(), strict=True):
                own.lerp_(other.double(), 0.5)
        pairs = zip(self.net.parameters(), self.average.values, self.hidden[0].parameters(), strict=True)
        return self.loss(batch) + sum((p - a).square().sum() + (p - h).square().sum() for p, a, h in pairs)


class Hooking(Net):
    """Registers a hook in each visit, and never removes it."""

    def on_train_start(self):
        self.net[0].register_forward_hook(lambda module, inputs, output: 1.5 * output)


class Clocked(Net):
    """Is evaluated by the clock, also on a worker that has trained nobody in the round."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) * (1 + self.current_epoch) + self.global_step)


def test_a_worker_without_clients_evaluates_by_the_same_clock():
    options = {"rounds": 3, "sampler": lambda seed, round_, *_: [round_]}
    one, two = train(Clocked, 1, **options), train(Clocked, 2, **options)
    assert history(one) == history(two)


@pytest.mark.parametrize("make", [Stateful, Rebound, Teacher, OwnHooks, Keeping, Averaged, Hooking])
def test_one_and_two_workers_give_the_same_bits(make):
    one, two = train(make), train(make, 2)
    assert_same_bits(one.server.state, two.server.state)
    assert history(one) == history(two)


@pytest.mark.parametrize("make", [Stateful, Teacher, OwnHooks, Averaged, Hooking])
def test_a_run_that_resumes_gives_the_same_bits(make, tmp_path):
    def part(folder, **options):
        return train(make, rounds=3, folder=folder, checkpoint_every_n_rounds=1, **options)

    whole = part(tmp_path / "whole")
    part(tmp_path / "part", callbacks=[StopAfter(1)])
    assert_same_bits(part(tmp_path / "part", ckpt_path="last").server.state, whole.server.state)


class Ending(Net):
    def on_fit_end(self):
        note(self.net[0].weight.tolist())


def test_a_run_that_resumes_with_no_round_left_ends_with_the_global_model(tmp_path):
    _, first = notes_of(lambda: train(Ending, folder=tmp_path))
    _, again = notes_of(lambda: by_rounds(Ending(), three_clients(), folder=tmp_path, ckpt_path="last"))
    assert first == again


def test_a_run_that_resumes_knows_the_last_evaluation(tmp_path):
    class Model(Net):
        def training_step(self, batch, batch_idx):
            known = self.trainer.callback_metrics.get("val_loss", torch.tensor(1.0))
            return self.loss(batch) * float(known)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch))

    def part(folder, rounds=3, **options):
        return train(Model, rounds=rounds, folder=folder, checkpoint_every_n_rounds=1, **options)

    whole = part(tmp_path / "whole")
    part(tmp_path / "part", rounds=1)
    assert_same_bits(part(tmp_path / "part", ckpt_path="last").server.state, whole.server.state)


# ---------------------------------------------------------------------- modes
class Modes(Net):
    """Some parts are in eval mode from the start."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
        self.net[1].eval()

    def modes(self):
        return [self.training, *(part.training for part in self.net)]

    def training_step(self, batch, batch_idx):
        note("train", self.modes())
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        note("validation", self.modes())


TRAINING, EVALUATION = [True, True, False, True, True], 5 * [False]


def test_submodules_keep_their_mode_through_visits_and_evaluations():
    torch.manual_seed(0)
    model = Modes()
    _, notes = notes_of(lambda: by_rounds(model, three_clients(), rounds=3, epochs=1))
    assert {tuple(modes) for phase, modes in notes if phase == "train"} == {tuple(TRAINING)}
    assert {tuple(modes) for phase, modes in notes if phase == "validation"} == {tuple(EVALUATION)}
    assert model.modes() == TRAINING


def test_a_mode_that_a_visit_changes_is_undone_by_the_next():
    class Model(Modes):
        def on_train_end(self):
            self.net.eval()

    _, notes = notes_of(lambda: by_rounds(Model(), three_clients(), epochs=1))
    assert {tuple(modes) for phase, modes in notes if phase == "train"} == {tuple(TRAINING)}


def test_an_own_on_validation_model_eval():
    class Model(Modes):
        def on_validation_model_eval(self):
            self.net.eval()

        def on_validation_model_train(self):
            note("train again", [])

    _, notes = notes_of(lambda: by_rounds(Model(), three_clients(), epochs=1))
    assert {tuple(modes) for phase, modes in notes if phase == "validation"} == {(True, False, False, False, False)}
    assert {tuple(modes) for phase, modes in notes if phase == "train"} == {tuple(TRAINING)}
    assert ("train again", []) in notes


# ---------------------------------------------------------------------- what travels
def size_of(tensors, bytes_each):
    return sum(value.numel() for value in tensors) * bytes_each


class Adapter(Net):
    """A small trained part beside a large frozen one."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(5, 500)
        self.large.requires_grad_(False)

    def forward(self, x):
        return self.net(x + 0.01 * self.large(x)[:, :5])


@pytest.mark.parametrize(("precision", "bytes_each"), [("32-true", 4), ("64-true", 8)])
def test_frozen_parameters_that_did_not_change_do_not_travel(precision, bytes_each):
    trainer = train(Adapter, precision=precision)
    expected = 3 * size_of(Net().parameters(), bytes_each)
    assert [row["bytes/up"] for row in trainer.history] == [expected, expected]
    assert trainer.history[-1]["bytes/down"] == expected


class Marked(Net):
    """The client of three rows moves the frozen mark by 1 in a visit."""

    def __init__(self):
        super().__init__()
        self.mark = nn.Parameter(torch.zeros(()), requires_grad=False)

    def on_train_epoch_end(self):
        if self.trainer.num_training_batches == 1:
            with torch.no_grad():
                self.mark += 1


@pytest.mark.parametrize("devices", [1, 2])
def test_frozen_parameters_that_one_client_changed_are_averaged(devices):
    trainer = train(Marked, devices, epochs=1, rounds=3)
    assert float(trainer.server.state["mark"]) == pytest.approx(3 * 3 / 25)
    plain = train(Net, epochs=1)
    assert trainer.history[0]["bytes/up"] > plain.history[0]["bytes/up"]


# ---------------------------------------------------------------------- what is refused
def test_trained_parameters_that_the_state_dict_leaves_out_are_refused():
    class Model(Net):
        def state_dict(self, *args, **kwargs):
            return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "bias" not in name}

    with refused("net.0.bias"):
        train(Model)


def test_frozen_parameters_that_the_state_dict_leaves_out_are_not():
    class Model(Adapter):
        def state_dict(self, *args, **kwargs):
            return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "large" not in name}

    train(Model)


def test_a_buffer_that_changes_its_shape_is_an_error_that_names_it():
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("seen", torch.zeros(0))

        def training_step(self, batch, batch_idx):
            self.inner.seen = torch.cat([self.inner.seen, batch[0][:, 0]])
            return self.loss(batch)

    with refused("inner.seen", kind=ClientError):
        train(Model)


class LateBuffer(Net):
    def training_step(self, batch, batch_idx):
        if not hasattr(self, "late"):
            self.net.register_buffer("late", torch.zeros(2))
        return self.loss(batch)


class LateLayer(Net):
    def on_train_epoch_end(self):
        self.late = nn.Linear(2, 2)


class NewParameter(Net):
    def on_train_epoch_end(self):
        self.net[0].weight = nn.Parameter(torch.zeros_like(self.net[0].weight))


@pytest.mark.parametrize("make", [LateBuffer, LateLayer, NewParameter])
def test_entries_of_the_state_that_a_visit_adds_or_replaces_are_an_error_that_names_them(make):
    """They would never be averaged."""
    with pytest.raises((UsageError, ClientError), match=r"late|net\.0\.weight"):
        train(make)


# ---------------------------------------------------------------------- what only a visit shows
class AddsGroup(Net):
    def on_train_start(self):
        self.optimizers().add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


class TurnsManual(Net):
    def on_train_start(self):
        self.automatic_optimization = False


class Stops(Net):
    def on_train_start(self):
        self.trainer.should_stop = True


class SetsClipping(Net):
    def on_train_start(self):
        self.trainer.gradient_clip_val = 1.0


REFUSED = {
    AddsGroup: ("add_param_group", "configure_optimizers"),
    TurnsManual: ("automatic_optimization", "False"),
    Stops: ("self.trainer.should_stop", "EarlyStopping"),
    SetsClipping: ("self.trainer.gradient_clip_val",),
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_only_a_visit_shows_is_refused_there_with_the_remedy(make):
    with refused("client 0", "round 0", *REFUSED[make], kind=ClientError):
        train(make)


def test_the_only_visit_may_add_parameter_groups():
    train(AddsGroup, rounds=1)


# ---------------------------------------------------------------------- what configure_optimizers shows
class WithinAnEpoch(Net):
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss", "interval": "step"}}


class LogsTooEarly(Net):
    def configure_optimizers(self):
        self.log("early", 1.0)
        return super().configure_optimizers()


@pytest.mark.parametrize("mode", ["continue", "restart"])
def test_a_schedule_that_watches_a_metric_within_an_epoch_is_refused(mode):
    with refused("configure_optimizers", "lr_scheduler.interval='step'", "epoch"):
        train(WithinAnEpoch, client_schedulers=mode)


def test_a_value_that_configure_optimizers_logs_is_refused():
    with refused("self.log('early', ...)", "configure_optimizers"):
        train(LogsTooEarly)
