"""What a visit begins with, what it leaves behind, and what travels."""

import math
from contextlib import nullcontext
from operator import attrgetter

import pytest
import torch
from helpers.conformance import by_rounds, note, notes_of, same
from helpers.errors import refused, warned
from helpers.runs import history
from helpers.tiny import TinyData, TinyModule, clients, variant
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix

from fl_lightning import FederatedTrainer, Method
from fl_lightning.utilities.errors import ClientError


def train(make, devices=1, **options):
    """Train ``make()`` with three clients."""
    torch.manual_seed(0)
    return by_rounds(make(), clients(TinyData(25, val=[6]), 3, 14, 8), devices=devices, **options)


# ---------------------------------------------------------------------- what is in no state
class Collects(TinyModule):
    """Its steps set attributes, and update objects of torchmetrics that they do not log."""

    collects = True

    def build(self):
        self.outputs, self.seen, self.best = [], torch.zeros(()), torch.tensor(math.nan)
        self.confusion, self.auroc = MulticlassConfusionMatrix(3), MulticlassAUROC(3)

    def step(self, batch):
        scores = self(batch[0])
        self.confusion.update(scores, batch[1])
        self.auroc.update(scores.softmax(1), batch[1])
        if self.collects:
            self.outputs.append(scores.sum().item())
            self.seen += len(scores)
            self.last = scores
        return scores

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.step(batch).sum())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.step(batch)


WithPredict = variant(TinyData, predict_dataloader=lambda self: DataLoader(self.rows(18, 30), batch_size=4))


def after(command, devices=0, collects=True):
    """A module after a command: of Lightning's trainer, or of a federated one with some ``devices``."""
    torch.manual_seed(0)
    model, data = Collects(), WithPredict(val=[18], test=[18])
    model.collects = collects
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    if devices:
        getattr(FederatedTrainer(devices=devices, **quiet), command)(model, clients(data))
    else:
        getattr(Trainer(**quiet), command)(model, data)
    return model


def values_of(model):
    metrics = model.confusion.compute().tolist(), model.auroc.compute().item()
    last = getattr(model, "last", torch.zeros(0)).tolist()
    return model.outputs, model.seen.item(), last, *metrics, model.training, model.body.training


COMMANDS = ["validate", "test", "predict"]


@pytest.mark.filterwarnings("ignore:.*(does not have many workers|treespec)")
@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_step_sets_stays_after_a_command_as_in_lightning(command):
    assert values_of(after(command, devices=1)) == same(values_of(after(command)), 1e-6)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_each_of_several_workers_has_set_a_part_of_is_dropped_with_a_warning(command):
    with warned("model=Collects", "2 workers", "trainer.devices=1"):
        model = after(command, devices=2)
    assert (model.outputs, model.seen.item(), hasattr(model, "last")) == ([], 0.0, False)


class CountsInPart(TinyModule):
    """Its step sets an attribute of a part that is no LightningModule."""

    def test_step(self, batch, batch_idx):
        self.body.count = getattr(self.body, "count", 0) + 1
        self.log("loss", self(batch[0]).sum())


@pytest.mark.parametrize("devices", [1, 2])
def test_an_attribute_of_a_part_stays_or_is_dropped_as_one_of_the_module(devices):
    model, quiet = CountsInPart(), {"logger": False, "enable_progress_bar": False}
    with warned("model=CountsInPart") if devices > 1 else nullcontext():
        FederatedTrainer(devices=devices, **quiet).test(model, clients(TinyData(test=[18])))
    assert getattr(model.body, "count", 0) == (5 if devices == 1 else 0)


@pytest.mark.parametrize("command", ["validate", "test"])
def test_objects_of_torchmetrics_have_all_batches_after_a_command_by_several_workers(command):
    alone, together = (values_of(after(command, devices, collects=False)) for devices in (1, 2))
    assert together == alone


class NeverClears(TinyModule):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class Ends(Method):
    """Notes where each client's visit ends."""

    def on_client_end(self, client):
        note(client.info.id, {name: value.tolist() for name, value in client.state().items()})
        return {}


def test_gradients_of_one_visit_are_not_those_of_the_next_where_the_module_never_clears_them():
    def end_of_the_last(cohort):
        options = {"rounds": 1, "sampler": lambda *given: cohort, "methods": [Ends()]}
        _, notes = notes_of(lambda: train(NeverClears, **options))
        return [one for one in notes if one[0] == 2]

    assert end_of_the_last([0, 1, 2]) == end_of_the_last([2])


def test_a_worker_without_clients_evaluates_by_the_same_clock():
    class Clocked(TinyModule):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch) * (1 + self.current_epoch) + self.global_step)

    options = {"rounds": 3, "sampler": lambda seed, round_, *_: [round_]}
    one, two = train(Clocked, 1, **options), train(Clocked, 2, **options)
    assert history(one) == history(two)


def test_a_run_that_resumes_knows_the_last_evaluation(tmp_path):
    class Model(TinyModule):
        def training_step(self, batch, batch_idx):
            note(float(self.trainer.callback_metrics.get("val_loss", -1.0)))
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0 + self.current_epoch)

    def part(rounds, **options):
        how = {"folder": tmp_path, "checkpoint_every_n_rounds": 1, "epochs": 1, **options}
        return notes_of(lambda: train(Model, rounds=rounds, **how))

    trainer, _ = part(1)
    _, notes = part(2, ckpt_path="last")
    assert set(notes) == {trainer.metrics["val_loss"]}


# ---------------------------------------------------------------------- modes
class Modes(TinyModule):
    """Some parts are in eval mode from the start."""

    def build(self):
        self.body.extend([nn.BatchNorm1d(6), nn.Dropout(0.5)])
        self.body[2].eval()

    def modes(self):
        return self.training, *(part.training for part in self.body)

    def training_step(self, batch, batch_idx):
        note("train", self.modes())
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        note("validation", self.modes())


LeavesEval = variant(Modes, on_train_end=lambda self: self.body.eval())


class OwnEval(Modes):
    """In evaluation only its body is in eval mode, and the next visit trains as every other."""

    def on_validation_model_eval(self):
        self.body.eval()

    def on_validation_model_train(self):
        pass


@pytest.mark.parametrize(("make", "evaluated"), [(Modes, False), (LeavesEval, False), (OwnEval, True)])
def test_submodules_keep_their_mode_through_visits_and_evaluations(make, evaluated):
    model = make()
    with warned("model"):
        _, notes = notes_of(lambda: train(lambda: model, rounds=3, epochs=1))
    training, evaluation = (True, True, True, False, True), (evaluated, False, False, False, False)
    assert set(notes) == {("train", training), ("validation", evaluation)}
    if make is Modes:
        assert model.modes() == training


# ---------------------------------------------------------------------- what is refused
class Grows(TinyModule):
    def build(self):
        self.inner = nn.Module()
        self.inner.register_buffer("seen", torch.zeros(0))

    def training_step(self, batch, batch_idx):
        self.inner.seen = torch.cat([self.inner.seen, batch[0][:, 0]])
        return self.loss(batch)


def leaving_out(part, base=TinyModule):
    """A module whose state dict lacks the entries with ``part`` in their names."""

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in base.state_dict(self, *args, **kwargs).items() if part not in name}

    return variant(base, state_dict=state_dict)


def plateau_of_steps(module):
    optimizer = SGD(module.parameters(), lr=0.1)
    schedule = {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "loss", "interval": "step"}
    return {"optimizer": optimizer, "lr_scheduler": schedule}


def set_later(path, value):
    """A module that sets an attribute when a visit begins."""
    *owner, name = path.split(".")
    return variant(TinyModule, on_train_start=lambda self: setattr(attrgetter(".".join(owner))(self), name, value))


def add_group(module):
    module.optimizers().add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


AddsGroup = variant(TinyModule, on_train_start=add_group)
BEFORE_THE_RUN = {
    ("configure_optimizers", "lr_scheduler.interval='step'", "epoch"): variant(
        TinyModule, configure_optimizers=plateau_of_steps
    ),
    ("self.log('early', ...)", "configure_optimizers"): variant(
        TinyModule, configure_optimizers=lambda self: self.log("early", 1.0)
    ),
    ("body.0.bias",): leaving_out("bias"),
}
IN_A_VISIT = {
    ("inner.seen",): Grows,
    ("body.late",): variant(TinyModule, on_train_end=lambda self: self.body.register_buffer("late", torch.zeros(2))),
    ("late",): variant(TinyModule, on_train_epoch_end=lambda self: self.add_module("late", nn.Linear(2, 2))),
    ("head.weight",): set_later("head.weight", nn.Parameter(torch.zeros(3, 6).double())),
    ("add_param_group", "configure_optimizers"): AddsGroup,
    ("automatic_optimization", "False"): variant(
        TinyModule, on_train_start=lambda self: setattr(self, "automatic_optimization", False)
    ),
    ("self.trainer.should_stop", "EarlyStopping"): set_later("trainer.should_stop", True),
    ("self.trainer.gradient_clip_val",): set_later("trainer.gradient_clip_val", 1.0),
}


@pytest.mark.parametrize("words", BEFORE_THE_RUN)
def test_what_does_not_fit_is_refused_before_the_run(words):
    with refused(*words):
        train(BEFORE_THE_RUN[words])


@pytest.mark.parametrize("words", IN_A_VISIT)
def test_what_only_a_visit_shows_is_refused_there_with_the_remedy(words):
    with refused("client 0", "round 0", *words, kind=ClientError):
        train(IN_A_VISIT[words])


def test_frozen_parameters_may_be_left_out_of_the_state_dict_and_the_only_visit_may_add_groups():
    large = variant(TinyModule, build=lambda self: self.add_module("large", nn.Linear(8, 500).requires_grad_(False)))
    train(leaving_out("large", large))
    train(AddsGroup, rounds=1)
