"""Methods in a list: each alone and in company trains and stays finite, and what cannot go together is refused."""

from functools import partial

import pytest
from helpers.errors import refused
from helpers.quadratics import Quadratic, quadratic_data
from helpers.runs import assert_finite, plain_sgd_model, small_data
from torch.optim import SGD, Adam

from fl_lightning import Method, methods
from fl_lightning.methods import (
    APFL,
    MOON,
    SCAFFOLD,
    DeCov,
    Ditto,
    DPFedAvg,
    FedALA,
    FedAS,
    FedASAM,
    FedBABU,
    FedBN,
    FedCKA,
    FedDecorr,
    FedDisco,
    FedDyn,
    FedExP,
    FedLC,
    FedNova,
    FedNTD,
    FedPer,
    FedProto,
    FedProx,
    FedRep,
    FedRoD,
    FedRS,
    FedSAM,
    FedUV,
    Freeze,
    LGFedAvg,
    Local,
    LogitAdjustment,
    PerFedAvg,
    PFedMe,
    StructuredDeCov,
)
from fl_lightning.models import MLP, ImageClassifier, Logistic
from fl_lightning.optim import FedAvgM

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
    unused = {"FedDyn": {"latest"}, "FedAMP": {"model"}}.get(kind.__name__, set()) if not options else set()
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


class FrozenHead(ImageClassifier):
    def __init__(self):
        super().__init__(MLP(64, [16]))
        self.classifier.requires_grad_(False)


def adam():
    return {"model": ImageClassifier(MLP(64, [16]), optimizer=partial(Adam, lr=0.01))}


def sgd(**options):
    return {"model": plain_sgd_model(**options)}


# methods, the model and arguments of the trainer beside them, and the words of the line
REFUSED = [
    ([FedProx(), FedProx()], {}, ("fedprox",)),
    ([Weighs(1.0, "even"), Weighs(2.0, "odd")], {}, ("{'even': 1.0, 'odd': 2.0}",)),
    # optimizers
    ([SCAFFOLD()], sgd(momentum=0.9), ("SCAFFOLD", "momentum=0.9")),
    ([FedNova()], sgd(momentum=0.9, nesterov=True), ("FedNova", "nesterov=True")),
    ([SCAFFOLD()], adam(), ("SCAFFOLD", "optimizer='Adam'")),
    ([FedNova()], adam(), ("FedNova", "optimizer='Adam'")),
    ([FedExP()], {"server_optimizer": partial(SGD, lr=1.0, momentum=0.9)}, ("trainer.server_optimizer", "SGD")),
    ([FedExP()], {"server_optimizer": partial(SGD, lr=0.5)}, ("FedExP",)),
    ([FedExP()], {"server_optimizer": FedAvgM}, ("trainer.server_optimizer", "FedAvgM")),
    ([PFedMe()], {"gradient_clip_val": 1.0}, ("PFedMe", "clipping")),
    ([Ditto()], {"accumulate_grad_batches": 2}, ("trainer.accumulate_grad_batches=2", "Ditto")),
    ([Ditto(20.0)], {}, ("Ditto", "lr", "lambda_=20")),
    ([PFedMe(20.0)], {}, ("PFedMe", "learning rate times lambda_")),
    # two models of a client, two replacements of a gradient, two calibrations
    ([FedBABU(), Local()], {}, ("method=['FedBABU', 'Local']",)),
    ([FedDyn(), FedDisco(), FedBABU(), FedPer()], {}, ("FedDisco", "method='FedDyn'", "method=['FedBABU', 'FedPer']")),
    ([FedSAM(), FedASAM()], {}, ("method=['FedSAM', 'FedASAM']", "keep one")),
    ([FedSAM(), PerFedAvg()], {}, ("method", "FedSAM", "PerFedAvg", "keep one")),
    ([FedPer(), PerFedAvg()], {}, ("method", "FedPer", "PerFedAvg", "keep one")),
    ([FedALA(), PerFedAvg()], {}, ("method=['FedALA', 'PerFedAvg']",)),
    ([Ditto(), APFL()], {}, ("method", "Ditto", "APFL")),
    ([Ditto(), FedPer()], {}, ("method", "Ditto", "FedPer")),
    ([FedRoD(), FedPer()], {}, ("method", "FedRoD", "FedPer")),
    ([FedRoD(), FedLC()], {}, ("method", "FedRoD", "FedLC")),
    ([FedLC(), LogitAdjustment()], {}, ("method", "FedLC", "LogitAdjustment")),
    ([FedRS(), FedLC()], {}, ("method", "FedRS", "FedLC")),
    # changes, gradients or weights that the other needs as they are
    *(([PFedMe(), other], {}, ("method", "PFedMe", type(other).__name__)) for other in (FedProx(), SCAFFOLD())),
    ([FedALA(), SCAFFOLD()], {}, ("FedALA", "SCAFFOLD")),
    *(([FedAS(), other()], {}, ("FedAS", other.__name__)) for other in (SCAFFOLD, FedDyn, FedNova, FedBABU)),
    ([FedAS(), Weighs(1.0, "even")], {}, ("FedAS", "Weighs")),
    ([FedDisco(), FedDyn()], {}, ("FedDisco", "FedDyn")),
    ([SCAFFOLD(), FedDisco()], {}, ("FedDisco", "SCAFFOLD")),
    ([FedDisco(), DPFedAvg(noise=0)], {}, ("FedDisco",)),
    ([FedNova(), FedExP()], {}, ("FedExP", "FedNova")),
    ([FedExP(), FedDyn()], {}, ("FedExP", "FedDyn")),
    ([FedExP(), DPFedAvg(noise=0)], {}, ("DPFedAvg", "FedExP")),
    *(([DPFedAvg(noise=0), other()], {}, ("DPFedAvg", other.__name__)) for other in (SCAFFOLD, FedNova)),
    # nothing travels
    ([SCAFFOLD(), Local()], {}, ("SCAFFOLD", "Local")),
    ([FedProto(), FedDyn()], {}, ("FedDyn", "FedProto")),
    ([FedDisco(), Local()], {}, ("FedDisco", "Local")),
    ([FedExP(), Local()], {}, ("FedExP", "Local")),
    ([LogitAdjustment(when="post_hoc"), Local()], {}, ("LogitAdjustment", "Local")),
    # layers that stay with the clients
    ([FedPer(6)], {}, ("FedPer.layers=6", "5")),
    ([LGFedAvg(6)], {}, ("LGFedAvg.layers=6", "5")),
    ([FedRep(3)], {"local_epochs": 2}, ("FedRep.body_epochs=3", "trainer.local_epochs")),
    ([FedRep()], {"local_steps": 4}, ("trainer.local_steps=4", "FedRep")),
    ([FedPer()], {"model": ImageClassifier(Logistic(64))}, ("FedPer", "logits='classifier'")),
    ([FedRep()], {"model": FrozenHead()}, ("FedRep", "logits='classifier'")),
    *(
        ([kind(), other()], {"local_epochs": 2}, (kind.__name__, other.__name__))
        for kind in (FedPer, FedRep, LGFedAvg)
        for other in (FedBABU, Freeze, Local, FedPer, FedRep, LGFedAvg)
        if other is not kind
    ),
]


def name_of(case):
    methods, options, words = case
    return " ".join([*(type(method).__name__ for method in methods), *options, *words[-1:]])


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_what_cannot_go_together_is_refused_before_round_0(run, tmp_path, case):
    methods, options, words = case
    with refused(*words):
        run(methods, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "method", [MOON, FedProto, FedNTD, FedUV, FedDecorr, DeCov, StructuredDeCov, FedRS, FedBABU, Freeze]
)
def test_a_missing_tap_is_named_with_the_modules_that_there_are(run, method):
    with refused(f"{method.__name__}"):
        run([method()], model=Quadratic(), data=quadratic_data([1.0, 2.0]))
