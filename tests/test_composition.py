"""Methods in a list: each alone and in company trains and stays finite, and what cannot go together is refused."""

from functools import partial

import pytest
import torch
from conftest import assert_same_bits, differs, small_data, small_model
from torch import nn
from torch.optim import SGD, Adam

from fl_lightning import Method, methods
from fl_lightning.data import Digits, Pooled
from fl_lightning.errors import UsageError
from fl_lightning.methods import (
    MOON,
    SCAFFOLD,
    DeCov,
    FedBABU,
    FedBN,
    FedCKA,
    FedDecorr,
    FedDyn,
    FedLC,
    FedNova,
    FedProto,
    FedProx,
    FedRS,
    FedUV,
    Freeze,
    Local,
    StructuredDeCov,
)
from fl_lightning.models import MLP, ImageClassifier, Projector
from fl_lightning.optim import FedAdagrad, FedAdam, FedAvgM, FedYogi

SINGLE = [getattr(methods, name) for name in methods.__all__]
TOGETHER = {
    "FedDecorr on FedProx": lambda: [FedProx(0.01), FedDecorr(0.1)],
    "FedDecorr on MOON": lambda: [MOON(1.0), FedDecorr(0.1)],
    "FedLC with SCAFFOLD": lambda: [SCAFFOLD(), FedLC()],
    "FedLC with FedProx": lambda: [FedProx(0.01), FedLC()],
    "FedUV with FedProx and FedLC": lambda: [FedUV(), FedProx(0.01), FedLC()],
    "MOON and FedCKA share their references": lambda: [MOON(), FedCKA()],
    "FedNova with FedProx": lambda: [FedProx(0.1), FedNova()],
    "SCAFFOLD with FedBN": lambda: [SCAFFOLD(), FedBN()],
    "FedDyn with FedDecorr and FedRS": lambda: [FedDyn(0.1), FedDecorr(0.1), FedRS()],
    "FedBABU with FedUV": lambda: [FedBABU(), FedUV()],
    "frozen head with SCAFFOLD and DeCov": lambda: [Freeze(orthogonal=True), SCAFFOLD(), DeCov()],
    "FedProto with weights and FedNova": lambda: [FedProto(aggregate_weights=True), FedNova()],
    "all penalties": lambda: [MOON(), FedCKA(), FedUV(), FedDecorr(), DeCov(), StructuredDeCov()],
}


def plain_sgd_model(**kwargs):
    """A classifier with BatchNorm, for methods that are defined for SGD without momentum."""
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, [32, 24]), Projector(16), optimizer=partial(SGD, **{"lr": 0.1, **kwargs}))


def assert_finite(state, trainer):
    assert all(torch.isfinite(value).all() for value in state.values())
    assert all(value == value for value in trainer.metrics.values())
    assert trainer.metrics["test/accuracy"] > 0


@pytest.mark.parametrize("method", SINGLE, ids=lambda kind: kind.__name__)
def test_every_method_alone(run, method):
    state, trainer = run([method()], model=plain_sgd_model())
    assert_finite(state, trainer)


@pytest.mark.parametrize("name", TOGETHER)
def test_methods_together(run, name):
    state, trainer = run(TOGETHER[name](), model=plain_sgd_model(), participation=0.75, max_rounds=3)
    assert_finite(state, trainer)


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedAvgM, FedYogi])
def test_server_optimizers_with_a_method(run, kind):
    state, trainer = run([FedDecorr()], server_optimizer=partial(kind, lr=0.01))
    assert_finite(state, trainer)


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedAvgM, FedYogi])
def test_the_server_optimizer_can_take_the_buffers_too_as_some_codes_do(run, kind):
    usual, _ = run(server_optimizer=partial(kind, lr=0.01))
    wide, _ = run(server_optimizer=partial(kind, lr=0.01), server_optimizer_scope="all_float")
    name = "projector.layers.1.running_var"
    assert differs({name: usual[name]}, {name: wide[name]})
    counter = "projector.layers.1.num_batches_tracked"
    assert torch.equal(usual[counter], wide[counter])


def test_central_training_is_one_client_with_all_data(run):
    data = Digits(num_clients=1, partitioner=Pooled(), batch_size=32, train_size=400)
    _, trainer = run(data=data, max_rounds=5)
    assert data.info(0).num_examples == 400
    assert trainer.metrics["test/accuracy"] > 0.6


# ---------------------------------------------------------------- refusals
class Weighs(Method):
    def __init__(self, weight, name):
        self.weight, self._name = weight, name

    @property
    def name(self):
        return self._name

    def client_weight(self, client):
        return self.weight


class NoLogits(nn.Module):
    """Not the house module: it declares no taps."""


REFUSED = {
    "same method twice": (lambda: [FedProx(), FedProx()], {}, "fedprox stands twice in the list; keep one"),
    "two client weights": (
        lambda: [Weighs(1.0, "even"), Weighs(2.0, "odd")],
        {},
        "they ask for different client weights {'even': 1.0, 'odd': 2.0}; keep one",
    ),
    "SCAFFOLD with momentum": (
        lambda: [SCAFFOLD()],
        {"momentum": 0.9},
        "SCAFFOLD with the client optimizer's momentum=0.9: its variates hold for SGD without momentum",
    ),
    "FedNova with Nesterov": (
        lambda: [FedNova()],
        {"momentum": 0.9, "nesterov": True},
        "FedNova with the client optimizer's nesterov=True: its normalisation holds for SGD",
    ),
    "SCAFFOLD sends nothing": (lambda: [SCAFFOLD(), Local()], {}, "SCAFFOLD acts on the weights .* Local sends none"),
    "FedDyn sends nothing": (lambda: [FedProto(), FedDyn()], {}, "FedDyn acts on the weights .* FedProto sends none"),
    "FedNova sends nothing": (lambda: [Local(), FedNova()], {}, "FedNova acts on the weights .* Local sends none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_together_is_refused_before_round_0(run, tmp_path, name):
    build, options, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        run(build(), model=plain_sgd_model(**options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", [SCAFFOLD, FedNova])
def test_variates_and_normalisation_are_refused_for_adam(run, method):
    model = ImageClassifier(MLP(64, [16]), optimizer=partial(Adam, lr=0.01))
    with pytest.raises(UsageError, match=f"{method.__name__} with the optimizer='Adam'"):
        run([method()], model=model)


def test_scaffold_by_gradients_takes_any_optimizer(run):
    model = ImageClassifier(MLP(64, [16]), optimizer=partial(Adam, lr=0.01))
    assert_finite(*run([SCAFFOLD(variate="gradients")], model=model))


def test_fedbn_without_batchnorm_is_refused(run):
    with pytest.raises(UsageError, match=r"FedBN with the model='ImageClassifier': it has no BatchNorm layer"):
        run([FedBN()], model=ImageClassifier(MLP(64, [16])))


def test_more_groups_than_dimensions_are_refused(run, tmp_path):
    with pytest.raises(UsageError, match=r"StructuredDeCov.groups=17: the representation has 16 dimensions"):
        run([StructuredDeCov(groups=17)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", [MOON, FedProto, FedUV, FedDecorr, DeCov, StructuredDeCov, FedRS, FedBABU, Freeze])
def test_a_missing_tap_is_named_with_the_modules_that_there_are(run, method):
    from test_trainer import Quadratic, quadratic_data

    with pytest.raises(UsageError, match=rf"{method.__name__} needs the tap '(representation|logits)'"):
        run([method()], model=Quadratic(), data=quadratic_data([1.0, 2.0]))


def test_cached_references_need_examples_that_stay_the_same(run):
    from fl_lightning.data import RandomFlip

    with pytest.raises(UsageError, match=r"trainer.cache_references=True: the training examples are augmented"):
        run([MOON()], data=small_data(augment=[RandomFlip()]), cache_references=True)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_gradient_corrections_commute_with_penalties(run, kind):
    one, _ = run([FedProx(0.1), FedDecorr(0.1)], kind)
    other, _ = run([FedDecorr(0.1), FedProx(0.1)], kind)
    assert_same_bits(one, other)
    assert differs(one, run([FedProx(0.1)], kind, model=small_model(kind))[0])
