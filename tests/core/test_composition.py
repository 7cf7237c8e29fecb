"""Methods in a list: each alone and in company trains and stays finite, and what cannot go together is refused."""

from functools import partial

import pytest
from helpers.errors import refused
from helpers.quadratics import Quadratic, quadratic_data
from helpers.runs import assert_finite, plain_sgd_model, small_data
from torch.optim import Adam

from fl_lightning import Method, methods
from fl_lightning.methods import (
    APFL,
    MOON,
    SCAFFOLD,
    DeCov,
    Ditto,
    FedALA,
    FedAS,
    FedASAM,
    FedBABU,
    FedBN,
    FedCKA,
    FedDecorr,
    FedDisco,
    FedDyn,
    FedLC,
    FedNova,
    FedNTD,
    FedPer,
    FedProto,
    FedProx,
    FedRoD,
    FedRS,
    FedSAM,
    FedUV,
    Freeze,
    LGFedAvg,
    Local,
    PerFedAvg,
    PFedMe,
    StructuredDeCov,
)
from fl_lightning.models import MLP, ImageClassifier

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
    "FedSAM with FedProx and FedDecorr": lambda: [FedProx(0.01), FedSAM(), FedDecorr(0.1)],
    "PerFedAvg with FedBN and FedLC": lambda: [PerFedAvg(hessian=True), FedBN(), FedLC()],
    "FedALA with FedProx and MOON": lambda: [FedALA(), FedProx(0.01), MOON()],
    "FedAS with FedBN and FedDecorr": lambda: [FedAS(), FedBN(), FedDecorr(0.1)],
    "FedPer with SCAFFOLD and FedBN": lambda: [FedPer(2), SCAFFOLD(), FedBN()],
    "FedRoD with FedDyn and FedBN": lambda: [FedRoD(), FedDyn(0.1), FedBN()],
    "Ditto with SCAFFOLD and MOON": lambda: [Ditto(), SCAFFOLD(), MOON()],
    "APFL with FedLC and FedBN": lambda: [APFL(adaptive=True), FedLC(), FedBN()],
    "PFedMe with FedDecorr": lambda: [PFedMe(5.0), FedDecorr(0.1)],
    "LGFedAvg with FedDyn": lambda: [LGFedAvg(2), FedDyn(0.1)],
    "FedProto with weights and FedNova": lambda: [FedProto(aggregate_weights=True), FedNova()],
    "all penalties": lambda: [MOON(), FedCKA(), FedUV(), FedDecorr(), DeCov(), StructuredDeCov()],
}


@pytest.fixture
def run(run):
    """Trains a model for SGD without momentum on fewer digits."""

    def train(methods, model=None, **options):
        given = {"data": small_data(train_size=120, test_size=50), "checkpoint_every_n_rounds": 2, **options}
        return run(methods, model=model or plain_sgd_model(), **given)

    return train


# house methods, with all that each may remember
SINGLE = [(getattr(methods, name), {}) for name in methods.__all__] + [(FedDyn, {"reported": "all"})]


@pytest.mark.filterwarnings("ignore:FedRep.body_epochs")  # a run of one epoch
@pytest.mark.parametrize(("kind", "options"), SINGLE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_method_trains_alone_and_remembers_what_it_declares(run, kind, options):
    method = kind(**options)
    state, trainer = run([method])
    assert_finite(state, trainer)
    used = {key for memory in trainer.client.memories().values() for key in memory.get(method.name, {})}
    unused = {"latest"} if kind is FedDyn and not options else set()
    assert used == set(kind.memory_keys) - unused
    assert all(isinstance(meaning, str) and meaning for meaning in kind.memory_keys.values())


@pytest.mark.parametrize("name", TOGETHER)
def test_methods_together(run, name):
    assert_finite(*run(TOGETHER[name](), participation=0.75))


# ---------------------------------------------------------------- refusals
class Weighs(Method):
    def __init__(self, weight, name):
        self.weight, self._name = weight, name

    @property
    def name(self):
        return self._name

    def client_weight(self, client):
        return self.weight


ADAM = partial(ImageClassifier, MLP(64, [16]), optimizer=partial(Adam, lr=0.01))
REFUSED = {
    "same method twice": (lambda: [FedProx(), FedProx()], {}, ("fedprox",)),
    "two client weights": (lambda: [Weighs(1.0, "even"), Weighs(2.0, "odd")], {}, ("{'even': 1.0, 'odd': 2.0}",)),
    "SCAFFOLD with momentum": (lambda: [SCAFFOLD()], {"momentum": 0.9}, ("SCAFFOLD", "momentum=0.9")),
    "FedNova with Nesterov": (lambda: [FedNova()], {"momentum": 0.9, "nesterov": True}, ("FedNova", "nesterov=True")),
    "SCAFFOLD with Adam": (lambda: [SCAFFOLD()], ADAM, ("SCAFFOLD", "optimizer='Adam'")),
    "FedNova with Adam": (lambda: [FedNova()], ADAM, ("FedNova", "optimizer='Adam'")),
    "two personal models": (lambda: [FedBABU(), Local()], {}, ("method=['FedBABU', 'Local']",)),
    "two conflicts": (
        lambda: [FedDyn(0.1), FedDisco(), FedBABU(), FedPer()],
        {},
        ("FedDisco", "method='FedDyn'", "method=['FedBABU', 'FedPer']"),
    ),
    "two replacements of a gradient": (lambda: [FedSAM(), FedASAM()], {}, ("method=['FedSAM', 'FedASAM']",)),
    "two models of a client": (lambda: [FedALA(), PerFedAvg()], {}, ("method=['FedALA', 'PerFedAvg']",)),
    "FedALA with SCAFFOLD": (lambda: [FedALA(), SCAFFOLD()], {}, ("FedALA", "SCAFFOLD")),
    "FedAS with FedNova": (lambda: [FedAS(), FedNova()], {}, ("FedAS", "FedNova")),
    "SCAFFOLD sends nothing": (lambda: [SCAFFOLD(), Local()], {}, ("SCAFFOLD", "Local")),
    "FedDyn sends nothing": (lambda: [FedProto(), FedDyn()], {}, ("FedDyn", "FedProto")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_together_is_refused_before_round_0(run, tmp_path, name):
    build, options, words = REFUSED[name]
    with refused(*words):
        run(build(), ADAM() if options is ADAM else plain_sgd_model(**options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "method", [MOON, FedProto, FedNTD, FedUV, FedDecorr, DeCov, StructuredDeCov, FedRS, FedBABU, Freeze]
)
def test_a_missing_tap_is_named_with_the_modules_that_there_are(run, method):
    with refused(f"{method.__name__}"):
        run([method()], model=Quadratic(), data=quadratic_data([1.0, 2.0]))
