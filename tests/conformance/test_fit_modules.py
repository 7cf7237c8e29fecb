"""What modules of Lightning's users do beside a loss: statistics, teachers, frozen parts, weights that warm up."""

import copy
import math

import pytest
import torch
from helpers.conformance import (
    Net,
    Rows,
    assert_close,
    assert_same_notes,
    both_precisions,
    by_rounds,
    clients,
    conform,
    note,
)
from helpers.errors import refused
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from fl_lightning.methods import MOON, SCAFFOLD, FedDyn, FedProx, FedRS, FedUV


def changed(pair, prefix):
    """Whether training moved the entries of the state that begin with ``prefix``."""
    torch.manual_seed(0)
    fresh = type(pair.model)().state_dict()
    trained = {name: value for name, value in pair.model.state_dict().items() if name.startswith(prefix)}
    assert trained, prefix
    return any(not torch.equal(value.double(), fresh[name].double()) for name, value in trained.items())


@pytest.fixture(autouse=True)
def _same_weights():
    torch.manual_seed(0)


# ---------------------------------------------------------------------- statistics
class Normalised(Net):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(6))


@both_precisions
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm(momentum, precision):
    class Model(Normalised):
        def __init__(self):
            super().__init__()
            self.net[1].momentum = momentum

    pair = conform(Model, precision)
    assert pair.model.net[1].num_batches_tracked == 16


class Rebound(Net):
    """A running mean that is bound anew at each step, a count, and a queue, as in contrastive learning."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("queue", torch.zeros(3, 5))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.steps = self.steps + 1
        self.queue = torch.cat([self.queue[1:], x.mean(0, keepdim=True)])
        return cross_entropy(self(x - self.mean - self.queue.mean(0)), y)


@both_precisions
def test_buffers_that_are_rebound(precision):
    pair = conform(Rebound, precision, rounds=3)
    assert pair.model.steps == 24
    assert pair.model.mean.abs().max() > 0.01


def test_buffers_of_a_submodule_that_are_rebound():
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([Rebound()])

        def training_step(self, batch, batch_idx):
            return self.inner[0].training_step(batch, batch_idx)

    assert conform(Model).model.inner[0].steps == 16


def test_a_buffer_that_takes_the_place_of_another():
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("present", torch.zeros(5))
            self.register_buffer("previous", torch.zeros(5))

        def training_step(self, batch, batch_idx):
            self.previous, self.present = self.present, self.present + batch[0].mean(0)
            return self.loss((batch[0] - self.previous, batch[1]))

    conform(Model, rounds=3, epochs=1, data=lambda: Rows(4))  # one step a visit


def test_objects_to_which_others_refer():
    class Model(Net):
        def __init__(self):
            super().__init__()
            seen = self.seen = {}
            self.net[0].register_forward_hook(lambda module, inputs, output: seen.update(hidden=output))
            self.generator = torch.Generator().manual_seed(0)
            self.inner = nn.Module()
            self.inner.generator = self.generator

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            draws = [torch.rand((), generator=part.generator) for part in (self, self.inner)]
            return loss + draws[0] * draws[1] * self.seen["hidden"].square().mean()

    conform(Model, rounds=1)


def test_buffers_that_share_a_tensor():
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(5))
            self.other = nn.Module()
            self.other.register_buffer("mean", self.mean)

        def training_step(self, batch, batch_idx):
            self.mean.mul_(0.9).add_(0.1 * batch[0].mean(0))
            return cross_entropy(self(batch[0] - self.other.mean), batch[1])

    conform(Model)


# ---------------------------------------------------------------------- frozen parts and teachers
class Backbone(Net):
    """A frozen backbone in eval mode, with BatchNorm and dropout, below a head that learns."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
        self.net[1].running_mean += 0.3
        self.net[:4].requires_grad_(False).eval()

    def training_step(self, batch, batch_idx):
        note([part.training for part in self.net])
        return self.loss(batch)


@both_precisions
def test_a_frozen_backbone_in_eval_mode_stays_as_it_is(precision):
    pair = conform(Backbone, precision)
    assert_same_notes(pair)
    assert pair.notes[-1] == [False, False, False, False, True]
    assert not changed(pair, "net.0") and not changed(pair, "net.1") and changed(pair, "net.4")


def test_a_frozen_batch_norm_in_train_mode_learns_its_statistics():
    class Model(Normalised):
        def __init__(self):
            super().__init__()
            self.net[:2].requires_grad_(False)

    assert changed(conform(Model), "net.1.running_mean")


def test_layers_that_thaw_at_an_epoch():
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self):
            if self.current_epoch >= 1:
                self.net[0].requires_grad_(True)

    assert changed(conform(Model, epochs=2), "net.0")


class Teacher(Net):
    """A teacher that is the moving average of the student."""

    updates_in = "on_train_batch_end"

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        for parameter in self.teacher.parameters():
            parameter.add_(0.1)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + mse_loss(self(batch[0]), self.teacher(batch[0]))

    @torch.no_grad()
    def update(self, where):
        if where == self.updates_in:
            for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.mul_(0.8).add_(other, alpha=0.2)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.update("on_train_batch_end")

    def on_before_zero_grad(self, optimizer):
        self.update("on_before_zero_grad")

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.update("optimizer_step")


@both_precisions
@pytest.mark.parametrize("where", ["on_train_batch_end", "on_before_zero_grad", "optimizer_step"])
def test_a_teacher_that_is_a_moving_average(where, precision):
    class Model(Teacher):
        updates_in = where

    assert changed(conform(Model, precision), "teacher")


# ---------------------------------------------------------------------- weights
@both_precisions
def test_tied_weights(precision):
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
            self.net[2].weight = self.net[0].weight

    pair = conform(Model, precision)
    assert pair.model.net[2].weight is pair.model.net[0].weight


def test_parametrised_weights():
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.net[0] = weight_norm(self.net[0])

    conform(Model)


def test_weights_that_are_set_when_the_fit_starts():
    class Model(Net):
        @torch.no_grad()
        def on_fit_start(self):
            for parameter in self.parameters():
                parameter.mul_(0.5)

    conform(Model)


def test_parameters_without_a_gradient():
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.net(x) * self.scale

    pair = conform(Model)
    assert not changed(pair, "unused") and changed(pair, "scale")


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_layers_that_are_built_late(hook):
    """The number of outputs is only known from the data module."""

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.net = None

        def build(self):
            if self.net is None:
                torch.manual_seed(1)
                outputs = self.trainer.datamodule.num_outputs
                self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs))

        def setup(self, stage):
            note("setup", stage)
            if hook == "setup":
                self.build()

        def configure_model(self):
            if hook == "configure_model":
                self.build()

    assert_same_notes(conform(Model))


# ---------------------------------------------------------------------- the clock
WARM_UPS = {
    "current_epoch": lambda self: min(1.0, self.current_epoch / 3),
    "global_step": lambda self: self.global_step / 16,
    "estimated_stepping_batches": lambda self: self.trainer.global_step / self.trainer.estimated_stepping_batches,
    "max_epochs": lambda self: self.trainer.current_epoch / self.trainer.max_epochs,
    "num_training_batches": lambda self: (self.global_step % self.trainer.num_training_batches) / 4,
}


@both_precisions
@pytest.mark.parametrize("clock", WARM_UPS)
def test_a_weight_of_the_loss_that_warms_up(clock, precision):
    class Model(Net):
        def training_step(self, batch, batch_idx):
            weight = WARM_UPS[clock](self)
            note(weight)
            return self.loss(batch) + weight * self(batch[0]).square().mean()

    pair = conform(Model, precision)
    assert_same_notes(pair)
    assert len(set(pair.notes)) > 2


# ---------------------------------------------------------------------- what a module calls
def test_optimizers_and_schedulers_of_the_module(capsys):
    class Model(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def training_step(self, batch, batch_idx):
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            note(optimizer.param_groups[0]["lr"], scheduler.get_last_lr(), type(scheduler).__name__)
            note(type(self.optimizers(use_pl_optimizer=False)).__name__, isinstance(optimizer, torch.optim.Optimizer))
            self.print("epoch", self.current_epoch, batch_idx)
            return self.loss(batch)

    assert_same_notes(conform(Model))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert len(lines) == 32 and lines[:16] == lines[16:]


def test_a_module_without_schedulers_has_none():
    class Model(Net):
        def on_train_start(self):
            note(self.lr_schedulers(), self.trainer.lr_scheduler_configs, len(self.trainer.optimizers))

    pair = conform(Model)
    assert pair.notes == 2 * pair.expected_notes == 2 * [(None, [], 1)]


def test_loggers_of_a_run_without_any():
    class Model(Net):
        def training_step(self, batch, batch_idx):
            note(self.logger, list(self.loggers), self.trainer.logger, list(self.trainer.loggers))
            if self.logger:
                self.logger.log_metrics({"loss": 1.0}, step=self.global_step)
            return self.loss(batch)

    assert_same_notes(conform(Model))


def test_all_gather_and_ranks_see_one_process():
    class Model(Net):
        def training_step(self, batch, batch_idx):
            gathered = self.all_gather(batch[0])
            note(tuple(gathered.shape), self.global_rank, self.local_rank, self.trainer.world_size, self.on_gpu)
            note(torch.distributed.is_available() and torch.distributed.is_initialized(), str(self.device))
            return self.loss(batch)

    assert_same_notes(conform(Model))


def test_a_frozen_module_and_toggled_optimizers():
    class Model(Net):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.untoggle_optimizer(optimizer)
            return loss

    conform(Model)


def test_the_rows_of_these_tests_have_an_incomplete_last_batch():
    assert [len(y) for _, y in Rows().train_dataloader()] == [4, 4, 4, 2]


# ---------------------------------------------------------------------- kinds of tensors and gradients
def test_parameters_and_buffers_without_elements():
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.none = nn.Linear(5, 0)
            self.register_buffer("nothing", torch.zeros(0, 3))

        def forward(self, x):
            return self.net(x) + self.none(x).sum()

    conform(Model)


class Embedded(Net):
    """Rows of an embedding are added to the inputs; each step looks a few of them up."""

    def __init__(self, sparse):
        super().__init__()
        self.embedding = nn.Embedding(7, 5, sparse=sparse)

    def forward(self, x):
        return self.net(x + self.embedding((x[:, 0].abs() * 3).long().clamp(max=6)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("method", [FedProx(0.1), SCAFFOLD(), SCAFFOLD(variate="gradients"), FedDyn(0.1)])
def test_methods_correct_sparse_gradients_as_dense_ones(method):
    states = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = Embedded(sparse)
        by_rounds(model, clients(Rows(), 8, 6), methods=[method], epochs=1, gradient_clip_val=0.1)
        states.append(model.state_dict())
    assert_close(*states, 1e-10)


def test_sparse_adam_beside_a_method_that_corrects_gradients_is_refused():
    class Model(Embedded):
        def configure_optimizers(self):
            return torch.optim.SparseAdam(self.embedding.parameters())

    with refused("method=['FedProx']", "Adam"):
        by_rounds(Model(True), clients(Rows()), methods=[FedProx()])


# ---------------------------------------------------------------------- taps of a network that is called in other ways
TAPS = {"taps": {"representation": "net.1", "logits": "net.2"}}


class TwoViews(Net):
    """The loss is of both views, as in contrastive learning; the taps record the second."""

    second = 0.5

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + self(self.second * batch[0]).square().mean()


def test_a_reference_model_observes_the_same_call_as_the_client():
    """With a learning rate of 0, all models are the same, and MOON's term is log(2) whichever view it compares."""

    class Model(TwoViews):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer = by_rounds(Model(), clients(Rows()), methods=[MOON(mu=1.0, first="global")], epochs=1, **TAPS)
    assert trainer.metrics["train/moon"] == pytest.approx(math.log(2), abs=1e-12)


class Checkpointed(Net):
    use_reentrant = False

    def forward(self, x):
        return checkpoint(self.net, x.clone().requires_grad_(), use_reentrant=self.use_reentrant)


def test_penalties_act_through_activation_checkpoints():
    states = []
    for kind in (Net, Checkpointed):
        torch.manual_seed(0)
        model = kind()
        by_rounds(model, clients(Rows()), methods=[FedUV(), MOON(first="global")], epochs=1, **TAPS)
        states.append(model.state_dict())
    assert_close(*states, 1e-10)


def test_penalties_on_reentrant_checkpoints_are_refused_and_changed_logits_are_not():
    class Model(Checkpointed):
        use_reentrant = True

    with refused("trainer.taps", "representation='net.1'", "use_reentrant=False"):
        by_rounds(Model(), clients(Rows()), methods=[FedUV()], **TAPS)
    states = []
    for kind in (Net, Model):
        torch.manual_seed(0)
        model = kind()
        by_rounds(model, clients(Rows()), methods=[FedRS()], epochs=1, **TAPS)
        states.append(model.state_dict())
    assert_close(*states, 1e-10)
