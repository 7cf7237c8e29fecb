"""What modules of Lightning's users do beside a loss: statistics, teachers, frozen parts, weights that warm up."""

import copy
import math

import pytest
import torch
from helpers.conformance import PRECISIONS, assert_close, by_rounds, conform, note
from helpers.errors import refused
from helpers.tiers import sample
from helpers.tiny import TinyData, TinyModule, clients, variant
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD, SparseAdam
from torch.utils.checkpoint import checkpoint

from fl_lightning.methods import MOON, SCAFFOLD, FedDyn, FedProx, FedRS, FedUV


# ---------------------------------------------------------------------- statistics
class Normalised(TinyModule):
    def build(self):
        self.body.extend([nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)])


class Rebound(TinyModule):
    """A mean and a count that are bound anew at each step, and a queue in a submodule, as in contrastive learning."""

    def build(self):
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.tensor(0))
        self.inner = nn.ModuleList([nn.Module()])
        self.inner[0].register_buffer("queue", torch.zeros(3, 8))

    def training_step(self, batch, batch_idx):
        (x, y), inner = batch, self.inner[0]
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.steps = self.steps + 1
        inner.queue = torch.cat([inner.queue[1:], x.mean(0, keepdim=True)])
        return cross_entropy(self(x - self.mean - inner.queue.mean(0)), y)


class TakesThePlaceOfAnother(TinyModule):
    def build(self):
        self.register_buffer("present", torch.zeros(8))
        self.register_buffer("previous", torch.zeros(8))

    def training_step(self, batch, batch_idx):
        self.previous, self.present = self.present, self.present + batch[0].mean(0)
        return self.loss((batch[0] - self.previous, batch[1]))


class Shares(TinyModule):
    """Two parts have the same buffer and the same generator, and a hook fills a dictionary that the module holds."""

    def build(self):
        seen = self.seen = {}
        self.body[0].register_forward_hook(lambda module, inputs, output: seen.update(hidden=output))
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("mean", torch.zeros(8))
        self.inner = nn.Module()
        self.inner.generator = self.generator
        self.inner.register_buffer("mean", self.mean)

    def training_step(self, batch, batch_idx):
        self.mean.mul_(0.9).add_(0.1 * batch[0].mean(0))
        loss = cross_entropy(self(batch[0] - self.inner.mean), batch[1])
        draws = [torch.rand((), generator=part.generator) for part in (self, self.inner)]
        return loss + draws[0] * draws[1] * self.seen["hidden"].square().mean()


# ---------------------------------------------------------------------- frozen parts and teachers
class FrozenBackbone(TinyModule):
    """A frozen backbone in eval mode, with BatchNorm and dropout, below a head that learns."""

    def build(self):
        self.body.extend([nn.BatchNorm1d(6), nn.Dropout(0.5)])
        self.body[2].running_mean += 0.3
        self.body.requires_grad_(False).eval()

    def training_step(self, batch, batch_idx):
        note([part.training for part in self.modules()])
        return self.loss(batch)


class FrozenBatchNorm(Normalised):
    """It learns its statistics, as it is in train mode, and its weights from the second epoch."""

    def build(self):
        super().build()
        self.body.requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch >= 1:
            self.body.requires_grad_(True)


class Teachers(TinyModule):
    """Teachers that are moving averages of the student, each updated in another hook."""

    def build(self):
        self.teachers = nn.ModuleDict()
        for index, name in enumerate(("on_train_batch_end", "on_before_zero_grad", "optimizer_step")):
            self.teachers[name] = copy.deepcopy(self.head).requires_grad_(False)
            self.teachers[name].bias += 0.1 * (1 + index)

    def training_step(self, batch, batch_idx):
        hidden = self.body(batch[0])
        taught = sum(mse_loss(self.head(hidden), teacher(hidden.detach())) for teacher in self.teachers.values())
        return self.loss(batch) + taught

    @torch.no_grad()
    def update(self, name):
        for own, other in zip(self.teachers[name].parameters(), self.head.parameters(), strict=True):
            own.lerp_(other, 0.2)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.update("on_train_batch_end")

    def on_before_zero_grad(self, optimizer):
        self.update("on_before_zero_grad")

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.update("optimizer_step")


# ---------------------------------------------------------------------- weights
class TiedWeights(TinyModule):
    """Two layers share a weight, and one has a parametrisation."""

    def build(self):
        self.body.extend([nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)])
        self.body[4].weight = self.body[2].weight
        self.body[0] = weight_norm(self.body[0])


class SetsWeightsAtTheStart(TinyModule):
    @torch.no_grad()
    def on_fit_start(self):
        for parameter in self.parameters():
            parameter.mul_(0.5)


class UnusedParameters(TinyModule):
    """Some have no gradient, some no elements, and one no dimension."""

    def build(self):
        self.unused = nn.Linear(2, 2)
        with pytest.warns(UserWarning, match="zero-element"):
            self.none = nn.Linear(8, 0)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, x):
        return super().forward(x) * self.scale + self.none(x).sum()


class BuiltInSetup(TinyModule):
    """The number of outputs is only known from the data module."""

    built_in = "setup"

    def build(self):
        self.head = None

    def complete(self, hook):
        note(hook)
        if hook == self.built_in and self.head is None:
            torch.manual_seed(1)
            self.head = nn.Linear(6, self.trainer.datamodule.num_outputs)

    def setup(self, stage):
        self.complete("setup")

    def configure_model(self):
        self.complete("configure_model")


class BuiltInConfigureModel(BuiltInSetup):
    built_in = "configure_model"


class KnowsItsOutputs(TinyData):
    num_outputs = 3


# ---------------------------------------------------------------------- what a module asks for
class WarmsUp(TinyModule):
    """Terms of the loss whose weights grow, each by another clock."""

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        weights = [
            min(1.0, self.current_epoch / 3),
            self.global_step / 16,
            trainer.global_step / trainer.estimated_stepping_batches,
            trainer.current_epoch / trainer.max_epochs,
            (self.global_step % trainer.num_training_batches) / 4,
        ]
        note(weights, self.lr_schedulers(), trainer.lr_scheduler_configs, len(trainer.optimizers))
        return self.loss(batch) + sum(weights) * self(batch[0]).square().mean()


# a module, and the arguments of both trainers
MODULES = {
    Normalised: {},
    Rebound: {"rounds": 3},
    TakesThePlaceOfAnother: {"rounds": 3, "epochs": 1, "data": lambda: TinyData(4)},  # one step a visit
    Shares: {"rounds": 1},
    FrozenBackbone: {},
    FrozenBatchNorm: {},
    Teachers: {},
    TiedWeights: {},
    SetsWeightsAtTheStart: {},
    UnusedParameters: {},
    BuiltInSetup: {"data": KnowsItsOutputs},
    BuiltInConfigureModel: {"data": KnowsItsOutputs},
    WarmsUp: {},
}


@pytest.mark.parametrize("precision", sample(PRECISIONS, "64-true"))
@pytest.mark.parametrize("make", MODULES)
@pytest.mark.filterwarnings("ignore:. submodules of the model")  # of Teachers
def test_a_module_trains_as_in_lightning(make, precision):
    pair = conform(make, precision, **MODULES[make])
    tied = [len({id(one) for one in part.parameters()}) for part in (pair.model, pair.expected)]
    assert tied[0] == tied[1]


# ---------------------------------------------------------------------- kinds of gradients
def state_after(make, *given, data=None, **options):
    """The state of a module after a run of one epoch a round."""
    torch.manual_seed(0)
    model = make(*given)
    by_rounds(model, data or clients(TinyData()), epochs=1, **options)
    return model.state_dict()


class Embedded(TinyModule):
    """Rows of an embedding are added to the inputs; each step looks a few of them up."""

    def __init__(self, sparse):
        super().__init__()
        self.embedding = nn.Embedding(7, 8, sparse=sparse)

    def forward(self, x):
        return super().forward(x + self.embedding((x[:, 0].abs() * 3).long().clamp(max=6)))

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("method", [FedProx(0.1), SCAFFOLD(), SCAFFOLD(variate="gradients"), FedDyn(0.1)])
def test_methods_correct_sparse_gradients_as_dense_ones(method):
    how = {"data": clients(TinyData(), 8, 6), "methods": [method], "gradient_clip_val": 0.1}
    assert_close(state_after(Embedded, True, **how), state_after(Embedded, False, **how), 1e-10)


def test_sparse_adam_beside_a_method_that_corrects_gradients_is_refused():
    Model = variant(Embedded, configure_optimizers=lambda self: SparseAdam(self.embedding.parameters()))

    with refused("method=['FedProx']", "Adam"):
        by_rounds(Model(True), clients(TinyData()), methods=[FedProx()])


# ---------------------------------------------------------------------- taps of a network that is called in other ways
TAPS = {"taps": {"representation": "body", "logits": "head"}}


def test_a_reference_model_observes_the_same_call_as_the_client():
    """With a learning rate of 0, all models are the same, and MOON's term is log(2) whichever view it compares."""

    class TwoViews(TinyModule):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) + self(0.5 * batch[0]).square().mean()

        def configure_optimizers(self):
            return SGD(self.parameters(), lr=0.0)

    trainer = by_rounds(TwoViews(), clients(TinyData()), methods=[MOON(mu=1.0, first="global")], epochs=1, **TAPS)
    assert trainer.metrics["train/moon"] == pytest.approx(math.log(2), abs=1e-12)


class Checkpointed(TinyModule):
    use_reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x.clone().requires_grad_(), use_reentrant=self.use_reentrant)


class Reentrant(Checkpointed):
    use_reentrant = True


@pytest.mark.parametrize(("make", "methods"), [(Checkpointed, [FedUV(), MOON(first="global")]), (Reentrant, [FedRS()])])
def test_methods_act_through_activation_checkpoints(make, methods):
    plain, checkpointed = (state_after(one, methods=methods, **TAPS) for one in (TinyModule, make))
    assert_close(checkpointed, plain, 1e-10)


def test_penalties_on_reentrant_checkpoints_are_refused():
    with refused("trainer.taps", "representation='body'", "use_reentrant=False"):
        by_rounds(Reentrant(), clients(TinyData()), methods=[FedUV()], tried=True, **TAPS)
