"""A run with one client is one fit of Lightning's Trainer: optimizers, the order of a step, and the hooks in it."""

from functools import partial

import pytest
import torch
from helpers.conformance import PRECISIONS, by_rounds, conform, note, notes_of
from helpers.errors import refused
from helpers.tiers import sample
from helpers.tiny import TinyData, TinyModule, clients, variant
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from fl_lightning import Method
from fl_lightning.methods import SCAFFOLD
from fl_lightning.utilities.errors import ClientError


class Twice(SGD):
    """An optimizer that needs a closure and calls it twice, as sharpness-aware minimisation does."""

    @torch.no_grad()
    def step(self, closure):
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad.clone() for p in parameters]
        torch._foreach_add_(parameters, gradients, alpha=0.05)
        closure()
        torch._foreach_sub_(parameters, gradients, alpha=0.05)
        super().step()
        return loss


OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": partial(Adam, lr=0.05),
    "AdamW": partial(AdamW, lr=0.05, weight_decay=0.1, amsgrad=True),
    "LBFGS": partial(LBFGS, lr=0.05, max_iter=3, history_size=3),
    "Twice": partial(Twice, lr=0.1),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_gives_what_lightning_gives(name, precision):
    conform(partial(TinyModule, OPTIMIZERS[name]), precision, rounds=3)


class Scheduled(TinyModule):
    """Its rate shrinks with every optimizer step."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.8), "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        note(self.current_epoch, batch_idx, self.global_step, float(outputs["loss"]))


@pytest.mark.parametrize("number", [2, 3, 5])
def test_accumulated_batches_with_an_incomplete_group_at_the_end_of_an_epoch(number):
    pair = conform(Scheduled, accumulate_grad_batches=number)
    assert pair.lightning.global_step == 4 * -(-4 // number)


# ---------------------------------------------------------------------- clipping
@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.1), ("value", 0.03), (None, 0.1)])
def test_clipping_by_norm_and_by_value(algorithm, value):
    class Model(TinyModule):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters()])
            note(float(gradient.abs().max() if algorithm == "value" else gradient.norm()))

    pair = conform(Model, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
    assert pair.notes[0] == pytest.approx(value, rel=1e-4)


class OwnClipping(TinyModule):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        note(gradient_clip_val, gradient_clip_algorithm)
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val or 0.05, gradient_clip_algorithm or "norm")


@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
def test_an_own_configure_gradient_clipping_gets_the_arguments_of_the_trainer(algorithm):
    conform(OwnClipping, gradient_clip_val=algorithm and 0.04, gradient_clip_algorithm=algorithm)


# ---------------------------------------------------------------------- own hooks
class WarmUp(TinyModule):
    """The rate grows over the first six optimizer steps, which is more than one visit has."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * min(1.0, (self.trainer.global_step + 1) / 6)
        note(epoch, batch_idx, optimizer.param_groups[0]["lr"])
        note(float(optimizer.step(closure=optimizer_closure)))
        note(self.trainer.global_step, self.global_step)  # by which the form in Lightning's documentation warms up


class NotesItsSteps(Scheduled):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        note("step", epoch, batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class StepsOnSomeBatches(Scheduled):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class StepsTheBareOptimizer(TinyModule):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        loss = optimizer_closure()
        note(loss.item(), loss.requires_grad)
        optimizer.optimizer.step()


class KeepsPartOfTheGradients(TinyModule):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        note(epoch, batch_idx, type(optimizer).__name__)
        if epoch % 2 == 0 and batch_idx == 0:
            optimizer.zero_grad()
        else:
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)


class ChangesGradientsAndWeights(TinyModule):
    def backward(self, loss):
        note(float(loss))
        (3 * loss).backward()

    def on_after_backward(self):
        self.body[0].weight.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer):
        self.head.bias.grad.add_(0.1)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for parameter in self.parameters():
            parameter.clamp_(-0.3, 0.3)


class SkipsABatch(Scheduled):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else self.loss(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        note(outputs if not outputs else sorted(outputs), self.global_step)

    def on_train_batch_start(self, batch, batch_idx):
        note(self.optimizers().param_groups[0]["lr"])


class ReturnsDictionaries(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        extras = {"outputs": self(batch[0]).detach().sum(), "text": "kept"} if batch_idx == 1 else {}
        return {"loss": loss, **extras} if batch_idx else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        note({name: float(value) if torch.is_tensor(value) else value for name, value in outputs.items()})
        note(outputs["loss"].requires_grad, batch_idx, len(batch[0]))


class EndsEpochs(TinyModule):
    """Ends some epochs after two batches and one before its first, and has schedules of both intervals."""

    def on_train_batch_start(self, batch, batch_idx):
        note(self.current_epoch, batch_idx, self.global_step, self.optimizers().param_groups[0]["lr"])
        return -1 if batch_idx == {0: 2, 1: 0, 3: 2}.get(self.current_epoch) else None

    def on_train_epoch_end(self):
        note("end", self.global_step)

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.2)
        return [optimizer], [StepLR(optimizer, 1, 0.7), {"scheduler": StepLR(optimizer, 1, 0.8), "interval": "step"}]


class GroupsOfParameters(TinyModule):
    """Each has a rate of its own; its training step does without the index of the batch."""

    def training_step(self, batch):
        return self.loss(batch)

    def configure_optimizers(self):
        groups = [{"params": self.body.parameters(), "lr": 0.01}, {"params": self.head.parameters()}]
        return {"optimizer": Adam(groups, lr=0.1)}


# a module, and the arguments of both trainers
MODULES = {
    WarmUp: {"epochs": 1},
    NotesItsSteps: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    StepsOnSomeBatches: {},
    StepsTheBareOptimizer: {},
    KeepsPartOfTheGradients: {},
    ChangesGradientsAndWeights: {"gradient_clip_val": 0.5},
    SkipsABatch: {},
    ReturnsDictionaries: {},
    EndsEpochs: {"ours": {"client_schedulers": "restart"}, "rounds": 1, "epochs": 4},
    GroupsOfParameters: {},
}


@pytest.mark.filterwarnings("ignore:model=SkipsABatch")  # as Lightning warns, which conform ignores
@pytest.mark.parametrize("precision", sample(PRECISIONS, "64-true"))
@pytest.mark.parametrize("make", MODULES)
def test_a_module_with_hooks_of_its_own_trains_as_in_lightning(make, precision):
    conform(make, precision, **MODULES[make])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_as_in_lightning(precision):
    conform(TinyModule, precision, gradient_clip_val=0.5)
    conform(WarmUp, precision)


def test_an_own_optimizer_step_that_never_calls_the_closure_is_an_error():
    with refused("client 0", "round 0", "optimizer_step", "closure", kind=ClientError):
        by_rounds(variant(TinyModule, optimizer_step=lambda self, *args: None)(), clients(TinyData()))


def test_a_dictionary_without_a_loss_is_an_error():
    model = variant(TinyModule, training_step=lambda self, batch, batch_idx: {"log": 1.0})()
    with refused("training_step", "loss"):
        by_rounds(model, clients(TinyData()), tried=True)


# ---------------------------------------------------------------------- the batch on its way
class OnTheWay:
    """Changes the inputs on their way to the device, more while training."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        note("before", dataloader_idx)
        return [batch[0] * 0.5, batch[1]]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        note("transfer", device.type, dataloader_idx)
        return super().transfer_batch_to_device([batch[0] + 0.25, batch[1]], device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        note("after", dataloader_idx, self.trainer.training)
        return [batch[0].square() if self.trainer.training else batch[0], batch[1]]


class DoubleData(TinyData):
    """Numbers that are exact in no shorter type."""

    def rows(self, number, seed):
        dataset = super().rows(number, seed)
        dataset.tensors = (dataset.tensors[0].double() / 3, dataset.tensors[1])
        return dataset


ModuleOnTheWay, DataOnTheWay = (type("OnTheWay", (OnTheWay, base), {}) for base in (TinyModule, TinyData))


@pytest.mark.parametrize(
    ("make", "data"),
    [(ModuleOnTheWay, TinyData), (TinyModule, DataOnTheWay), (ModuleOnTheWay, DataOnTheWay), (TinyModule, DoubleData)],
)
def test_batches_are_transferred_as_in_lightning(make, data):
    conform(make, data=data)


# ---------------------------------------------------------------------- the methods' place in a step
class Corrects(Method):
    def penalty(self, client, step):
        return 2.0 * client.module.head.weight.square().sum()

    def on_before_optimizer_step(self, client, optimizer):
        note("corrections")

    def on_after_clipping(self, client, optimizer):
        note("after clipping")

    def on_after_optimizer_step(self, client, optimizer):
        note("after the step")


class Corrected(TinyModule):
    def training_step(self, batch, batch_idx):
        self.returned = self.loss(batch)
        return self.returned

    def on_before_backward(self, loss):
        penalty = 2.0 * self.head.weight.square().sum()
        note("backward", float(loss - self.returned - penalty))

    def on_before_optimizer_step(self, optimizer):
        note("module")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        note("clipping")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        note("batch end", float(outputs["loss"] - self.returned))


def test_methods_add_penalties_correct_gradients_before_clipping_and_see_them_after_it():
    """``on_before_backward`` gets the loss with the penalties, ``on_train_batch_end`` without them."""
    how = {"methods": [Corrects()], "rounds": 1, "epochs": 1}
    _, notes = notes_of(lambda: by_rounds(Corrected(), clients(TinyData()), **how))
    zero = pytest.approx(0.0, abs=1e-10)
    step = ["module", "corrections", "clipping", "after clipping", "after the step"]
    assert notes == 4 * [("backward", zero), *step, ("batch end", zero)]


def test_steps_without_the_corrections_of_methods_are_refused():
    with refused("LBFGS"):
        by_rounds(TinyModule(LBFGS), clients(TinyData()), methods=[SCAFFOLD()])
    with refused("client 0", "optimizer.optimizer.step", kind=ClientError):
        by_rounds(StepsTheBareOptimizer(partial(SGD, lr=0.1)), clients(TinyData()), methods=[SCAFFOLD()])
