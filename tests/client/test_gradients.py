"""A method requests gradients elsewhere and separate batches, and the run continues as if it had not."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers.beside import SIZES, assert_near, rows
from helpers.errors import refused, warned
from helpers.gradients import Ahead, InStep, scales_gradients
from helpers.quadratics import Curved, curved_data
from helpers.runs import assert_same_bits, fitted, history, plain_sgd_model, small_data, train
from helpers.tiny import TinyData, TinyModule, variant
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import Method
from fl_lightning.core.state import clone
from fl_lightning.data import FederatedDataModule, RandomCrop
from fl_lightning.methods import FedDecorr, FedLC, FedProto
from fl_lightning.utilities.errors import ClientError

TAPS = {"representation": "body", "logits": "head"}


@pytest.fixture(autouse=True)
def _quick(undrawn, monkeypatch):
    monkeypatch.setattr("fl_lightning.trainer.code_of_run", lambda *args: {})


class Noisy(TinyModule):
    """Has all that a second pass might move: running statistics, dropout, a metric, a counter and a list."""

    def build(self):
        self.body.append(nn.BatchNorm1d(6))
        self.body.append(nn.Dropout(0.3))
        self.accuracy = MulticlassAccuracy(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("again", torch.zeros(3), persistent=False)
        self.calls, self.losses = 0, []

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.mean = 0.9 * self.mean + logits.detach().mean(0)  # rebound
        self.again.add_(logits.detach().mean(0))
        loss = cross_entropy(logits, batch[1]) + 0.01 * (self.mean + self.again).sum()
        self.calls += 1
        self.losses.append(loss.detach())
        self.log("calls", float(self.calls))
        self.log("memory", torch.stack(self.losses).sum())
        return loss


class Repeats(Method):
    """Computes the gradients of a step again, and compares them with those that it has."""

    needs_gradients = True

    def __init__(self, **given):
        self.given, self.seen = given, []

    def on_before_optimizer_step(self, client, optimizer):
        found = client.gradients(**self.given)
        assert found.loss.isfinite()
        self.seen += [torch.equal(found[name], client.live[name].grad) for name in client.trainable]

    def on_client_end(self, client):
        assert self.seen and all(self.seen)


class Elsewhere(Method):
    """Computes gradients at other values, on the present and on other batches, and ignores them."""

    needs_gradients = True

    def on_client_start(self, client):
        for batch in client.batches("elsewhere", fraction=0.5):
            client.gradients(batch=batch, loss="own")

    def on_before_optimizer_step(self, client, optimizer):
        at = {name: client.live[name] + 1.0 for name in client.trainable}
        other = next(client.batches("elsewhere"))
        for given in ({}, {"at": at}, {"at": at, "batch": other}, {"loss": "own"}, {"loss": self.square}):
            client.gradients(**given)

    def on_client_end(self, client):
        client.gradients(batch=next(client.batches("elsewhere")), loss=self.square)

    def square(self, step):
        return step.taps["logits"].square().mean()

    requires = ("logits",)


fit = partial(fitted, model=Noisy, data=rows, taps=TAPS, clients_per_step=1, enable_progress_bar=False)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("others", [list, lambda: [FedLC(), FedDecorr(0.1)]], ids=["alone", "with penalties"])
def test_at_the_same_values_it_is_the_gradient_of_the_step_bit_for_bit(tmp_path, precision, others):
    fit(tmp_path, [Repeats(), *others()], precision=precision)


@pytest.mark.parametrize("others", [list, lambda: [FedProto(0.1, aggregate_weights=True), FedLC()]])
def test_extra_passes_change_nothing_of_a_run(tmp_path, others):
    data = partial(rows, (10, 20))
    plain, extra = (fit(tmp_path / str(len(m)), [*m, *others()], data=data) for m in ([], [Elsewhere()]))
    assert_same_bits(plain.server.state, extra.server.state)
    assert history(plain) == history(extra)
    assert_same_bits(dict(plain.client.live), dict(extra.client.live))


def test_gradients_of_a_quadratic_elsewhere_are_in_closed_form(tmp_path):
    found = []

    class Asks(Method):
        needs_gradients = True

        def on_before_optimizer_step(self, client, optimizer):
            y = client.live["y"].item()
            gradient = client.gradients({"y": torch.tensor([3.0])})
            assert client.live["y"].item() == y and not client.live["y"].grad.equal(gradient["y"])
            found.append((gradient["y"].item(), gradient.loss.item()))

    train(tmp_path, [Asks()], model=Curved(), data=curved_data([2.0], [-1.0]), max_rounds=1)
    assert found == [(8.0, 16.0)]  # of 2 / 2 (y + 1)^2 at 3


def test_own_is_the_loss_of_the_module_and_full_has_the_terms_and_logits_of_the_methods(tmp_path):
    checked = []

    class Asks(Method):
        requires = ("representation", "logits")
        needs_gradients = True

        def penalty(self, client, step):
            return 0.3 * step.taps["representation"].square().mean()

        def transform_logits(self, client, logits):
            return 2 * logits

        def on_before_optimizer_step(self, client, optimizer):
            x, y = client.visit.present.batch
            at = {name: client.live[name].detach() * 1.5 for name in client.trainable}
            leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
            z = torch.tanh(x @ leaves["body.0.weight"].T + leaves["body.0.bias"])
            logits, term = z @ leaves["head.weight"].T + leaves["head.bias"], 0.3 * z.square().mean()
            losses = {"own": cross_entropy(logits, y), "full": cross_entropy(2 * logits, y) + term}
            losses[self.squares] = logits.square().sum()
            for kind, loss in losses.items():
                found, names = client.gradients(at, loss=kind), [*at]
                wanted = [leaves[name] for name in names]
                right = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
                assert found.loss.item() == pytest.approx(loss.item())
                for name, value in zip(names, right, strict=True):
                    torch.testing.assert_close(found[name], torch.zeros_like(at[name]) if value is None else value)
            checked.append(len(losses))

        def squares(self, step):
            assert len(step.targets) == len(step.taps["logits"])
            return step.taps["logits"].square().sum()

    fit(tmp_path, [Asks()], model=TinyModule, max_rounds=1)
    assert set(checked) == {3}


@pytest.mark.parametrize("clients_per_step", [1, pytest.param(2, marks=pytest.mark.vectorized)])
def test_gradients_of_some_parameters_and_the_loss_alone_are_those_of_all(tmp_path, clients_per_step):
    class Asks(Method):
        needs_gradients = True

        def on_before_optimizer_step(self, client, optimizer):
            at = {"head.weight": 1.5 * client.live["head.weight"].detach()}
            every, head, none = (client.gradients(dict(at), names=names) for names in (None, ["head.weight"], ()))
            assert [*head] == ["head.weight"] and not none and [*every] == client.trainable
            gap = (head["head.weight"] - every["head.weight"]).abs().max()
            client.log("gap", gap + (head.loss - every.loss).abs() + (none.loss - every.loss).abs())
            client.log("at", every.loss)

    trainer = fit(tmp_path, [Asks()], model=TinyModule, data=partial(rows, (10, 10)), clients_per_step=clients_per_step)
    assert trainer.metrics["train/gap"] == 0 < trainer.metrics["train/at"]
    with refused("client.gradients: names", "body.9"):
        fit(tmp_path, [Misspells()], model=TinyModule)


class Misspells(Method):
    needs_gradients = True

    def on_before_optimizer_step(self, client, optimizer):
        client.gradients(names=["body.9"])


def test_buffers_among_the_values_move_as_in_training_and_those_of_the_client_do_not(tmp_path):
    """A personal model that begins where the client's does, and takes the same steps, stays equal to it."""

    class Personal(Method):
        needs_gradients = True

        def on_client_start(self, client):
            client.scratch(self).own = clone(client.received)

        def on_before_optimizer_step(self, client, optimizer):
            own = client.scratch(self).own
            for name, gradient in client.gradients(own, loss="own").items():
                own[name] = own[name] - 0.1 * gradient

        def on_client_end(self, client):
            # the last step has moved the client's parameters, after this method's
            assert_near(dict(client.scratch(self).own), client.state(), 1e-12)

    model = partial(Noisy, partial(torch.optim.SGD, lr=0.1))
    fit(tmp_path, [Personal()], model=model, precision="64-true", max_rounds=1)


def test_outside_of_steps_the_gradients_of_batches_add_up_to_that_of_all_data(tmp_path):
    found = []

    class Asks(Method):
        def on_client_start(self, client):
            batches = [*client.batches("asks")]
            parts = [client.gradients(batch=batch, loss="own") for batch in batches]
            whole = client.gradients(batch=[torch.cat(part) for part in zip(*batches, strict=True)], loss="own")
            sizes = [len(y) for _, y in batches]
            for name, value in whole.items():
                mean = sum(n * part[name] for n, part in zip(sizes, parts, strict=True)) / sum(sizes)
                torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-6)
            found.append((client.info.id, sum(sizes)))

        on_client_end = on_client_start

    fit(tmp_path, [Asks()], model=TinyModule, max_rounds=1)
    assert found == [(k, size) for k, size in enumerate(SIZES) for _ in range(2)]


def test_sixteen_bit_gradients_are_unscaled_and_do_not_overflow(tmp_path, monkeypatch):
    """The scaled gradients of the loss overflow float32."""

    class Steep(TinyModule):
        def loss(self, batch):
            return 2.0**115 * super().loss(batch)

    class Asks(Method):
        needs_gradients = True

        def on_before_optimizer_step(self, client, optimizer):
            for name, value in client.gradients().items():
                torch.testing.assert_close(value, client.live[name].grad)
                client.live[name].grad = value * 2.0**-115

    scales_gradients(monkeypatch, 2.0)
    monkeypatch.setattr("fl_lightning.training.extra_passes.SCALE", 2.0**16)
    fit(tmp_path, [Asks()], model=Steep, precision="bf16-mixed", max_rounds=1)


# ---------------------------------------------------------------------- batches
class Given(FederatedDataModule):
    """Returns the same loaders in each call, which shuffle and add random numbers of the global generator."""

    def setup(self, stage=None):
        self.plan, data = self.partition(np.arange(40) % 3, 3), TinyData().rows(40, 1)
        self.loaders = [
            DataLoader(Subset(data, part), 4, shuffle=True, generator=torch.Generator(), collate_fn=self.noisy)
            for part in self.plan.parts
        ]

    def noisy(self, examples):
        x, y = map(torch.stack, zip(*examples, strict=True))
        return x + 0.1 * torch.randn(x.shape), y

    def train_dataloader(self, k=0):
        return self.loaders[k]


class Reads(Method):
    """Reads batches at each step, in the middle of training's own passes."""

    def on_client_start(self, client):
        client.scratch(self).endless = client.batches("endless", math.inf)

    def on_after_optimizer_step(self, client, optimizer):
        next(client.scratch(self).endless)
        assert [*client.batches("reads", 2, 0.5)]


CROPPED = partial(small_data, train_size=120, augment=[RandomCrop(1)])


@pytest.mark.parametrize(
    ("model", "data"),
    [(TinyModule, partial(Given, 2)), (TinyModule, rows), (plain_sgd_model, CROPPED)],
    ids=["the same loaders", "loaders", "arrays"],
)
def test_reading_batches_leaves_those_of_training_as_they_are(tmp_path, model, data):
    plain, reads = (
        fit(tmp_path / str(len(methods)), methods, model=model, data=data, taps=None, local_epochs=2).server.state
        for methods in ([], [Reads()])
    )
    assert_same_bits(plain, reads)


def test_a_stream_gives_the_clients_examples_in_orders_that_its_name_decides(tmp_path):
    def order(batches):
        return torch.cat([x for x, _ in batches])

    class Asks(Method):
        def on_client_start(self, client):
            once, again, other = ([*client.batches(name)] for name in ("a", "a", "b"))
            assert torch.equal(order(once), order(again))
            twice = [*client.batches("a", passes=2)]
            assert torch.equal(order(twice[: len(once)]), order(once)) and len(twice) == 2 * len(once)
            rest = order(twice[len(once) :])
            if len(once) > 1:
                assert not torch.equal(order(once), order(other)) and not torch.equal(order(once), rest)
            for one in (order(other), rest):
                assert torch.equal(one.sort(0).values, order(once).sort(0).values)
            part = [*client.batches("a", fraction=0.5)]
            assert len(part) == math.ceil(0.5 * len(once)) and torch.equal(order(part), order(once[: len(part)]))
            assert not [*client.batches("a", passes=0)]
            seen.append((client.visit.fit_progress.round, client.info.id, order(once)))

    seen = []
    fit(tmp_path, [Asks()], model=TinyModule)
    first, second = ({k: x for r, k, x in seen if r == round_} for round_ in (0, 1))
    assert all(not torch.equal(first[k], second[k]) for k in first if SIZES[k] > 8)


def test_batches_are_those_of_training_in_type_transform_and_number(tmp_path):
    Doubling = variant(TinyModule, on_after_batch_transfer=lambda self, batch, dataloader_idx: [2 * batch[0], batch[1]])

    class Asks(Method):
        def on_client_start(self, client):
            batches = [*client.batches("asks", 3)]
            client.scratch(self).total = sum(x.sum() for x, _ in batches) / 3
            assert batches[0][0].dtype == torch.float64

        def penalty(self, client, step):
            client.scratch(self).total = client.scratch(self).total - step.batch[0].sum()

        def on_client_end(self, client):
            assert client.scratch(self).total.abs() < 1e-9

    fit(tmp_path, [Asks()], model=Doubling, precision="64-true", local_epochs=1)


# ---------------------------------------------------------------------- refused
class Hooked(TinyModule):
    def on_after_backward(self):
        """Does nothing."""


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["trainer.accumulate_grad_batches=2", "Ahead"], {"accumulate_grad_batches": 2}),
        (["model=Hooked", "on_after_backward", "Ahead"], {"model": Hooked}),
        (["method", "Ahead", "LBFGS"], {"model": partial(TinyModule, partial(LBFGS, lr=0.1))}),
        (["method", "Ahead", "InStep"], {"methods": [Ahead(), InStep()]}),
    ],
    ids=["accumulation", "hooks of the backward pass", "LBFGS", "two that replace gradients"],
)
def test_what_a_second_gradient_would_miss_is_refused_before_round_0(tmp_path, words, how):
    with refused(*words):
        fit(tmp_path, **{"methods": [Ahead()], "model": TinyModule, **how})
    assert not [*tmp_path.iterdir()]


def failing(call, **attributes):
    """A method that makes a call at the start of a visit."""
    return type("Asks", (Method,), {"on_client_start": lambda self, client: call(client), **attributes})()


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (["client.gradients", "needs_gradients = True"], lambda client: client.gradients()),
        (["client.gradients: at", "heat.bias"], lambda client: client.gradients({"heat.bias": torch.zeros(3)})),
        (["loss='mine'", "own"], lambda client: client.gradients(batch=1, loss="mine")),
        (["client.batches: fraction=0"], lambda client: client.batches("a", 1, 0)),
        (["client.batches: passes=-1"], lambda client: client.batches("a", -1)),
    ],
)
def test_a_wrong_call_is_refused_by_name(tmp_path, words, call):
    with refused(*words):
        fit(tmp_path, [failing(call)], model=TinyModule)


def test_outside_of_steps_the_full_loss_is_refused_where_methods_add_to_it(tmp_path):
    asks = failing(lambda client: client.gradients(batch=next(client.batches("a"))))
    fit(tmp_path / "alone", [asks], model=TinyModule, max_rounds=1)
    with refused("loss='full'", "own"):
        fit(tmp_path / "beside", [asks, FedDecorr()], model=TinyModule)


def test_a_step_that_writes_to_its_batch_cannot_be_computed_again(tmp_path):
    class Writes(TinyModule):
        def training_step(self, batch, batch_idx):
            batch[0].mul_(0.5)
            return super().training_step(batch, batch_idx)

    with refused("Writes.training_step changes its batch", kind=ClientError):
        fit(tmp_path, [Repeats()], model=Writes)


class Skips(TinyModule):
    """Skips incomplete batches before their forward pass."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if len(batch[0]) == 8 else None


def test_the_gradient_of_a_skipped_batch_is_0_for_a_function_of_taps_too(tmp_path):
    found = []

    class ReadsTaps(Method):
        requires = ("representation",)

        def on_client_start(self, client):
            for batch in client.batches("taps"):
                gradients = client.gradients(batch=batch, loss=lambda step: step.taps["representation"].square().sum())
                found.append((len(batch[0]), any(map(torch.any, gradients.values())), bool(gradients.loss)))

    with warned("model=Skips", "None", "batches/skipped"):
        train(tmp_path, [ReadsTaps()], model=Skips(), data=rows([8, 13]), taps=TAPS, max_rounds=1)
    assert set(found) == {(5, False, False), (8, True, True)}
