"""A run with one client is one fit of Lightning's Trainer: optimizers, the order of a step, and the hooks in it."""

import pytest
import torch
from helpers.conformance import (
    Net,
    Rows,
    assert_same_notes,
    both_precisions,
    by_rounds,
    clients,
    conform,
    note,
    notes_of,
)
from helpers.errors import refused
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from fl_lightning import Method
from fl_lightning.errors import ClientError
from fl_lightning.methods import SCAFFOLD

OPTIMIZERS = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda parameters: Adam(parameters, lr=0.05),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.05, weight_decay=0.1, amsgrad=True),
    "LBFGS": lambda parameters: LBFGS(parameters, lr=0.05, max_iter=3, history_size=3),
}


@both_precisions
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_gives_what_lightning_gives(name, precision):
    class Model(Net):
        def configure_optimizers(self):
            return OPTIMIZERS[name](self.parameters())

    pair = conform(Model, precision, rounds=3)
    before = Model().to(pair.model.dtype).state_dict()
    assert any((value - before[key]).abs().max() > 0.01 for key, value in pair.model.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_as_in_lightning(precision):
    conform(Net, precision, gradient_clip_val=0.5)
    conform(WarmUp, precision)


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


@both_precisions
def test_an_optimizer_of_the_users_own_gets_a_closure(precision):
    class Model(Net):
        def configure_optimizers(self):
            return Twice(self.parameters(), lr=0.1)

    conform(Model, precision)


def test_groups_of_parameters_have_rates_of_their_own():
    class Model(Net):
        def configure_optimizers(self):
            groups = [{"params": self.net[0].parameters(), "lr": 0.01}, {"params": self.net[2].parameters()}]
            return {"optimizer": Adam(groups, lr=0.1)}

    conform(Model)


def test_local_steps_are_max_steps_of_lightning():
    pair = conform(Net, ours={"local_steps": 6, "rounds": 1}, theirs={"max_epochs": -1, "max_steps": 6}, epochs=9)
    assert pair.lightning.global_step == 6


# ---------------------------------------------------------------------- clipping
@both_precisions
@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.2), ("value", 0.03), (None, 0.2)])
def test_clipping_by_norm_and_by_value(algorithm, value, precision):
    pair = conform(Net, precision, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
    unclipped = conform(Net, precision, rounds=1).model
    assert (pair.model.net[0].weight - unclipped.net[0].weight).abs().max() > 1e-3


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        note(gradient_clip_val, gradient_clip_algorithm)
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class PassedClipping(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


@both_precisions
def test_an_own_configure_gradient_clipping(precision):
    assert_same_notes(conform(OwnClipping, precision))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_an_own_configure_gradient_clipping_gets_the_arguments_of_the_trainer(algorithm):
    conform(PassedClipping, gradient_clip_val=0.04, gradient_clip_algorithm=algorithm)


# ---------------------------------------------------------------------- accumulation
class Scheduled(Net):
    """Its rate shrinks with every optimizer step."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.8), "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        note(self.current_epoch, batch_idx, self.global_step, float(outputs["loss"]))


@both_precisions
@pytest.mark.parametrize("number", [2, 3, 5])
def test_accumulated_batches_with_an_incomplete_group_at_the_end_of_an_epoch(number, precision):
    pair = conform(Scheduled, precision, accumulate_grad_batches=number)
    assert_same_notes(pair, 1e-5)
    assert pair.lightning.global_step == 4 * -(-4 // number)


def test_accumulation_with_clipping_and_an_own_optimizer_step():
    class Model(Scheduled):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            note("step", epoch, batch_idx)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    assert_same_notes(conform(Model, accumulate_grad_batches=3, gradient_clip_val=0.1))


# ---------------------------------------------------------------------- own hooks
class WarmUp(Net):
    """The rate grows over the first six optimizer steps, which is more than one visit has."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * min(1.0, (self.trainer.global_step + 1) / 6)
        note(epoch, batch_idx, optimizer.param_groups[0]["lr"])
        optimizer.step(closure=optimizer_closure)


@both_precisions
def test_an_own_optimizer_step_that_warms_the_rate_up(precision):
    pair = conform(WarmUp, precision, epochs=1)
    assert_same_notes(pair)
    assert pair.notes[0][2] < pair.notes[3][2] < pair.notes[4][2] < pair.notes[5][2]


def test_a_warm_up_that_follows_the_step_within_a_visit():
    """The form in Lightning's documentation."""

    class Model(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(closure=optimizer_closure)
            if self.trainer.global_step < 5:
                for group in optimizer.param_groups:
                    group["lr"] = min(1.0, (self.trainer.global_step + 1) / 5) * 0.1

    conform(Model)


@both_precisions
def test_an_own_optimizer_step_that_only_runs_the_closure_of_some_batches(precision):
    class Model(Scheduled):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    assert_same_notes(conform(Model, precision), 1e-5)


def test_an_own_optimizer_step_may_step_the_bare_optimizer():
    class Model(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            loss = optimizer_closure()
            note(loss.item(), loss.requires_grad)
            optimizer.optimizer.step()

    assert_same_notes(conform(Model))


def test_an_own_optimizer_step_that_never_calls_the_closure_is_an_error():
    class Model(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            pass

    with refused("client 0", "round 0", "optimizer_step", "closure", kind=ClientError):
        by_rounds(Model(), clients(Rows()))


@both_precisions
def test_an_own_backward(precision):
    class Model(Net):
        def backward(self, loss):
            note(float(loss))
            (3 * loss).backward()

    assert_same_notes(conform(Model, precision), 1e-5)


def test_an_own_optimizer_zero_grad_keeps_part_of_the_gradients_within_a_visit():
    class Model(Net):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            note(epoch, batch_idx, type(optimizer).__name__)
            if epoch % 2 == 0 and batch_idx == 0:
                optimizer.zero_grad()
            else:
                for parameter in self.parameters():
                    parameter.grad.mul_(0.5)

    assert_same_notes(conform(Model))


@both_precisions
def test_hooks_that_change_the_gradients(precision):
    class Model(Net):
        def on_after_backward(self):
            self.net[0].weight.grad.mul_(0.5)

        def on_before_optimizer_step(self, optimizer):
            self.net[2].bias.grad.add_(0.1)

    conform(Model, precision, gradient_clip_val=0.5)


def test_hooks_that_change_the_weights():
    class Model(Net):
        @torch.no_grad()
        def on_train_batch_end(self, outputs, batch, batch_idx):
            for parameter in self.parameters():
                parameter.clamp_(-0.4, 0.4)

    pair = conform(Model)
    assert pair.model.net[0].weight.abs().max().item() == pytest.approx(0.4)


# ---------------------------------------------------------------------- what training_step and batch hooks return
@both_precisions
def test_a_batch_whose_training_step_gives_none_counts_as_in_lightning(precision):
    class Model(Scheduled):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else self.loss(batch)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            note(outputs if not outputs else sorted(outputs), self.global_step)

        def on_train_batch_start(self, batch, batch_idx):
            note(self.optimizers().param_groups[0]["lr"])

    assert_same_notes(conform(Model, precision))


@pytest.mark.parametrize("kind", ["tensor", "dictionary", "extras"])
def test_on_train_batch_end_gets_what_training_step_returned(kind):
    class Model(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            extras = {"outputs": self(batch[0]).detach().sum(), "text": "kept"}
            return loss if kind == "tensor" else {"loss": loss, **(extras if kind == "extras" else {})}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            note({name: float(v) if torch.is_tensor(v) else v for name, v in outputs.items()})
            note(outputs["loss"].requires_grad, batch_idx, len(batch[0]))

    assert_same_notes(conform(Model))


@both_precisions
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_minus_one_of_on_train_batch_start_skips_the_rest_of_the_epoch(interval, precision):
    class Model(Net):
        def on_train_batch_start(self, batch, batch_idx):
            note(self.current_epoch, batch_idx, self.global_step, self.optimizers().param_groups[0]["lr"])
            return -1 if batch_idx == 2 and self.current_epoch in (0, 3) else None

        def on_train_epoch_end(self):
            note("end", self.global_step)

        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=0.2)
            return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.8), "interval": interval}]

    assert_same_notes(conform(Model, precision, ours={"client_schedulers": "restart"}, rounds=1, epochs=4), 1e-5)


def test_an_epoch_that_is_skipped_at_its_first_batch():
    class Model(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 1 else None

    conform(Model)


def test_a_training_step_without_batch_idx():
    class Model(Net):
        def training_step(self, batch):
            return self.loss(batch)

    conform(Model)


def test_a_dictionary_without_a_loss_is_an_error():
    class Model(Net):
        def training_step(self, batch, batch_idx):
            return {"log": 1.0}

    with refused("model=Model", "training_step", "loss"):
        by_rounds(Model(), clients(Rows()))


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


class NetOnTheWay(OnTheWay, Net):
    pass


class RowsOnTheWay(OnTheWay, Rows):
    pass


@both_precisions
@pytest.mark.parametrize(
    ("model", "data"),
    [(NetOnTheWay, Rows), (Net, RowsOnTheWay), (NetOnTheWay, RowsOnTheWay)],
    ids=["of the module", "of the data module", "of both"],
)
def test_transfer_hooks(model, data, precision):
    assert_same_notes(conform(model, precision, data=data))


def test_a_batch_of_float64_is_converted_as_lightning_does():
    class Double(Rows):
        def train_dataloader(self):
            loader = super().train_dataloader()
            loader.dataset.tensors = (loader.dataset.tensors[0].double() / 3, loader.dataset.tensors[1])
            return loader

    conform(Net, "64-true", data=Double)


# ---------------------------------------------------------------------- the methods' place in a step
def test_methods_correct_the_gradients_before_clipping_and_see_them_after_it():
    class Watch(Method):
        def on_before_optimizer_step(self, client, optimizer):
            note("corrections")

        def on_after_clipping(self, client, optimizer):
            note("after clipping")

        def on_after_optimizer_step(self, client, optimizer):
            note("after the step")

    class Model(Net):
        def on_before_optimizer_step(self, optimizer):
            note("module")

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            note("clipping")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            note("batch end")

    _, notes = notes_of(lambda: by_rounds(Model(), clients(Rows()), methods=[Watch()], rounds=1, epochs=1))
    assert notes == 4 * ["module", "corrections", "clipping", "after clipping", "after the step", "batch end"]


def test_on_before_backward_gets_the_loss_with_the_penalties_and_on_train_batch_end_without_them():
    class Penalty(Method):
        def penalty(self, client, step):
            return 2.0 * client.module.net[0].weight.square().sum()

    class Model(Net):
        def on_before_backward(self, loss):
            note(loss.item() - self.returned - 2.0 * self.net[0].weight.square().sum().item())

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.returned = loss.item()
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            note(float(outputs["loss"]) - self.returned)

    _, notes = notes_of(lambda: by_rounds(Model(), clients(Rows()), methods=[Penalty()], rounds=1, epochs=1))
    assert notes == 8 * [pytest.approx(0.0, abs=1e-10)]


def test_lbfgs_is_refused_with_methods_that_correct_gradients():
    class Model(Net):
        def configure_optimizers(self):
            return LBFGS(self.parameters())

    with refused("LBFGS"):
        by_rounds(Model(), clients(Rows()), methods=[SCAFFOLD()])
