"""Recomputed running statistics equal the statistics of the pooled data."""

import copy
import warnings
from functools import partial

import pytest
import torch
from helpers.errors import assert_names, refused, warned
from helpers.runs import assert_same_bits, differs, fitted, small_data
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from fl_lightning.callbacks import BatchNormGap, Callback
from fl_lightning.client.batch_norm import statistics_of
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.data import IID, Dirichlet
from fl_lightning.data.augmentation import RandomCrop
from fl_lightning.methods import FedBN, FedDyn, Local
from fl_lightning.models import MLP, ImageClassifier

POLICIES = ["recalibrate", "recalibrate_once"]


@pytest.fixture(autouse=True)
def _quick(undrawn):
    pass


class Deep(LightningModule):
    """Convolutions and a linear layer, each with its BatchNorm, two of them in parallel branches, and dropout."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.left, self.norm_left = nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, momentum=None)
        self.right, self.norm_right = nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)
        self.drop, self.head, self.norm_head = nn.Dropout(0.5), nn.Linear(48, 10), nn.BatchNorm1d(10)
        self.lr = lr

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = (self.norm_left(self.left(x)) + self.norm_right(self.right(x)).tanh()).relu()
        return self.norm_head(self.head(self.drop(x.flatten(1))))

    def training_step(self, batch):
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return SGD(self.parameters(), self.lr)


def deep(lr=0.1):
    torch.manual_seed(0)
    return Deep(lr)


def data(**kwargs):
    return small_data(**{"partitioner": Dirichlet(0.1), "num_clients": 5, "train_size": 250, "test_size": 50, **kwargs})


fit = partial(fitted, model=deep, data=data, buffers="recalibrate", enable_progress_bar=False)


def statistics(trainer):
    names = [name for path in trainer.client.batch_norms for name in statistics_of(path)]
    return {name: trainer.server.state[name].clone() for name in names}


def pooled(model, given, state, clients):
    """Mean and population variance of each layer's input in training mode, where all data are one batch."""
    model = copy.deepcopy(model).double().train()
    model.load_state_dict(state)
    model.drop.eval()
    found = {}

    def note(path, layer, args):
        dims = [dim for dim in range(args[0].ndim) if dim != 1]
        mean, variance = args[0].mean(dims), args[0].var(dims, correction=0)
        found.update(zip(statistics_of(path), (mean, variance), strict=True))

    for path, layer in model.named_modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.register_forward_pre_hook(partial(note, path))
    images = torch.cat([x for k in clients for x, _ in given.train_dataloader(k).as_stored()])
    with torch.no_grad():
        logits = model(images.double())
        return found, images.double(), logits


def assert_pooled(trainer, given, clients=range(5), state=None):
    """Check the statistics against one batch of the pooled data; return the images and their logits."""
    state = {name: value.double() for name, value in (state or trainer.server.state).items()}
    expected, images, logits = pooled(deep(), given, state, clients)
    found = statistics(trainer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)
    return state, images, logits


def test_layer_by_layer_they_are_those_of_one_batch_of_the_pooled_data(tmp_path):
    """Then the outputs in eval mode equal the outputs in training mode on these data."""
    given = data()
    trainer = fit(tmp_path, data=given, precision="64-true", max_rounds=1, local_epochs=2)
    state, images, logits = assert_pooled(trainer, given)
    model = deep().double().eval()
    model.load_state_dict(state)
    torch.testing.assert_close(model(images), logits, rtol=1e-8, atol=1e-8)


def test_one_pass_is_exact_for_the_first_layer_and_an_approximation_for_the_others(tmp_path):
    given = data()
    once = fit(tmp_path, data=given, precision="64-true", max_rounds=1, buffers="recalibrate_once")
    averaged = fit(tmp_path, data=data(), precision="64-true", max_rounds=1, buffers="average")
    state = {name: value.double() for name, value in once.server.state.items()}
    expected, *_ = pooled(deep(), given, state, range(5))
    found, before = statistics(once), statistics(averaged)
    for name in statistics_of("norm"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10)
    far = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    assert max(far.values()) > 1e-3
    # and nearer than the averages
    name = "norm.running_var"
    assert far[name] < float((before[name] - expected[name]).norm() / expected[name].norm())


@pytest.mark.parametrize("policy", POLICIES)
def test_two_workers_find_the_same_bits(tmp_path, policy):
    one, two = (fit(tmp_path, buffers=policy, participation=0.6, devices=workers) for workers in (1, 2))
    assert_same_bits(one.server.state, two.server.state)


def test_only_clients_whose_updates_arrive_are_asked_and_the_next_round_begins_from_the_result(tmp_path):
    class Notes(Callback):
        def __init__(self):
            self.received = []

        def on_client_end(self, trainer, client):
            self.received.append({name: client.received[name].clone() for name in statistics(trainer)})

        def on_round_end(self, trainer):
            self.dropped, self.after = trainer.metrics.get("clients/dropped"), statistics(trainer)

    given, notes = data(), Notes()
    systems = SystemsHeterogeneity(dropout_after=0.5)
    trainer = fit(tmp_path, data=given, systems=systems, max_rounds=1, precision="64-true", callbacks=[notes])
    outcomes = systems.outcomes(trainer.seed, 0, trainer.server.cohort, 1)
    arrived = [k for k, one in outcomes.items() if one.lost is None]
    assert 0 < len(arrived) < 5 and notes.dropped == 5 - len(arrived)
    assert_pooled(trainer, given, arrived)
    notes, first = Notes(), Notes()
    fit(tmp_path, max_rounds=1, callbacks=[first])
    fit(tmp_path, max_rounds=2, callbacks=[notes])
    assert_same_bits(notes.received[-1], first.after)


def test_the_bytes_of_a_round_are_those_of_the_statistics_that_travel(tmp_path):
    rows = {rule: fit(tmp_path, buffers=rule, max_rounds=1).metrics for rule in ("average", *POLICIES)}
    channels, layers, clients = 4 + 3 + 3 + 10, 4, 5
    state = sum(value.nbytes for value in deep().state_dict().values())
    sums = 8 * (2 * channels + layers)
    assert rows["average"]["bytes/up"] == clients * state
    assert rows["recalibrate_once"]["bytes/up"] == clients * (state + sums)
    assert rows["recalibrate"]["bytes/up"] == clients * (state + sums - 4 * 2 * channels)
    assert rows["average"]["bytes/down"] == clients * state
    assert rows["recalibrate"]["bytes/down"] == rows["recalibrate_once"]["bytes/down"] == 2 * clients * state


def test_augmentation_is_left_out_and_each_last_batch_counts(tmp_path):
    given = (data(partitioner=IID()), data(partitioner=IID(), augment=[RandomCrop(2)], drop_last=True))
    plain, other = (fit(tmp_path, max_rounds=1, model=deep(lr=0.0), data=one) for one in given)
    assert_same_bits(statistics(other), statistics(plain))


def test_it_is_of_the_model_that_is_evaluated(tmp_path):
    given = data()
    trainer = fit(tmp_path, data=given, methods=[FedDyn(0.1)], precision="64-true", max_rounds=2)
    shown = trainer.methods.evaluated_state(trainer.server)
    assert differs(shown, trainer.server.state)
    assert_pooled(trainer, given, state=shown)


def test_layers_in_evaluation_mode_keep_their_statistics(tmp_path):
    model = deep()
    model.norm.eval()
    before = {name: model.state_dict()[name].clone() for name in statistics_of("norm")}
    with warned("model"):
        trainer = fit(tmp_path, model=model)
    assert "norm" not in trainer.client.batch_norms
    assert_same_bits({name: trainer.server.state[name] for name in before}, before)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_cannot_be_recomputed_is_refused(tmp_path, policy):
    with refused(f"trainer.buffers='{policy}'", "average"):
        fit(tmp_path, model=ImageClassifier(MLP(64, [8])), buffers=policy)
    for method in (FedBN(), Local()):
        with refused(f"trainer.buffers='{policy}'", type(method).__name__, "average"):
            fit(tmp_path, methods=[method], buffers=policy)
    with refused("trainer.server_optimizer_scope='all_float'", f"trainer.buffers={policy}", "parameters"):
        fit(tmp_path, buffers=policy, server_optimizer_scope="all_float")
    assert not list(tmp_path.iterdir())


def test_averaged_statistics_are_warned_of_under_strong_skew_alone(tmp_path, recwarn):
    for buffers, partitioner, warns in (
        ("average", Dirichlet(0.01), True),
        ("average", IID(), False),
        ("recalibrate", Dirichlet(0.01), False),
    ):
        recwarn.clear()
        fit(tmp_path, buffers=buffers, data=data(partitioner=partitioner), max_rounds=0)
        lines = [str(one.message) for one in recwarn if "trainer.buffers" in str(one.message)]
        assert len(lines) == warns
        for line in lines:
            assert_names(line, "trainer.buffers=average", "recalibrate")


def test_the_gap_is_0_for_recomputed_statistics_and_less_after_one_pass(tmp_path):
    exact = fit(tmp_path, callbacks=[BatchNormGap(2)], max_rounds=3)
    assert [("bn_gap/mean" in row) for row in exact.history] == [True, False, True]
    assert exact.metrics["bn_gap/mean"] == exact.metrics["bn_gap/variance"] == 0
    once = fit(tmp_path, buffers="recalibrate_once", callbacks=[BatchNormGap(1)], max_rounds=1).metrics
    averaged = fit(tmp_path, buffers="average", callbacks=[BatchNormGap(1)], max_rounds=1).metrics
    assert averaged["bn_gap/variance"] > 0.01
    assert 0 < once["bn_gap/mean"] < averaged["bn_gap/mean"] > 0.01


def test_statistics_that_nobody_updates_are_warned_of(tmp_path):
    with warned("trainer.buffers=keep", "BatchNorm", "recalibrate"):
        fit(tmp_path, buffers="keep", max_rounds=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="trainer.buffers=keep")
        fit(tmp_path, methods=[FedBN()], buffers="keep", max_rounds=0)
        fit(tmp_path, model=ImageClassifier(MLP(64, [8])), buffers="keep", max_rounds=0)
