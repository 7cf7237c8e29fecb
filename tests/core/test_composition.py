"""Methods in a list: each alone and in company trains and stays finite, and what cannot go together is refused."""

from functools import partial

import pytest
import torch
from helpers.errors import refused
from helpers.lora import lora_model
from helpers.quadratics import Quadratic, quadratic_data
from helpers.runs import assert_finite, plain_sgd_model, small_data
from helpers.tiny import TinyData, TinyModule, clients, variant
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import Method, methods
from fl_lightning.callbacks import SpectrumMonitor
from fl_lightning.methods import (
    APFL,
    IFCA,
    IPM,
    MOON,
    NNM,
    SCAFFOLD,
    CenteredClipping,
    CoordinateMedian,
    DeCov,
    Ditto,
    DPFedAvg,
    FedALA,
    FedAMP,
    FedAS,
    FedASAM,
    FedAsync,
    FedBABU,
    FedBN,
    FedBuff,
    FedCKA,
    FedDecorr,
    FedDisco,
    FedDyn,
    FedExLoRA,
    FedExP,
    FedIT,
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
    FedVLS,
    FFALoRA,
    FixBN,
    Freeze,
    GeometricMedian,
    HetLoRA,
    LabelFlip,
    LGFedAvg,
    Local,
    LogitAdjustment,
    LoRAProduct,
    MultiKrum,
    PerFedAvg,
    PFedMe,
    SignFlip,
    StructuredDeCov,
    TrimmedMean,
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
    "FedExP with FedBN": lambda: [FedBN(), FedExP(eps=0)],
    "FedVLS with FedNTD": lambda: [FedVLS(), FedNTD()],
    "post hoc adjustment with FedLC and FedBN": lambda: [FedLC(), LogitAdjustment(when="post_hoc"), FedBN()],
    "SCAFFOLD by examples with FedDisco": lambda: [SCAFFOLD(weighting="examples"), FedDisco()],
    "FedAS by examples with a user's weights": lambda: [FedAS(weighting="examples"), Weighs(1.0, "even")],
    "IFCA with FedProx, MOON and FedBN": lambda: [IFCA(2, 0.5), FedProx(0.1), MOON(), FedBN()],
    "IFCA with FedDisco and FedLC": lambda: [IFCA(2, 0.5), FedDisco(), FedLC()],
    "FedAMP with FedBN, FedSAM and FedDecorr": lambda: [FedAMP(), FedBN(), FedSAM(), FedDecorr()],
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


def classified(classifier):
    model = plain_sgd_model()
    model.classifier = classifier
    return {"model": model}


class Unlike(TinyModule):
    """Its logits are not one for each class."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def loss(self, batch):
        return self(batch[0]).square().mean()


class Rates(TinyModule):
    def configure_optimizers(self):
        return SGD([{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 0.2}], lr=0.1)


class Decays(TinyModule):
    def configure_optimizers(self):
        groups = [{"params": part.parameters(), "weight_decay": d} for part, d in ((self.body, 0.1), (self.head, 0.0))]
        return SGD(groups, lr=0.01)


def tiny(model):
    return {"model": model, "data": clients(TinyData()), "taps": {"logits": "head", "representation": "body"}}


def unlabelled():
    data, model = quadratic_data([1.0, 2.0]), Quadratic()
    model.head = nn.Identity()
    data.datamodule.train_dataloader = lambda: DataLoader(TensorDataset(torch.ones(4)))
    return {"model": model, "data": data, "taps": {"logits": "head"}}


class KeepsBias(Method):
    def exchanges(self, key):
        return key != "classifier.bias"


def adapted(**options):
    return {"model": lora_model(**options)}


PLAIN, SEQUENTIAL = {"model": ImageClassifier(MLP(64, [16]))}, classified(nn.Sequential(nn.Linear(16, 10)))


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
    ([PFedMe()], adam(), ("PFedMe", "optimizer", "Adam")),
    ([PFedMe()], sgd(momentum=0.9), ("PFedMe", "momentum")),
    *(
        ([method], tiny(Rates()), (type(method).__name__, "lr", "0.1", "0.2"))
        for method in (Ditto(), APFL(), SCAFFOLD("gradients", "post_step"))
    ),
    # labels, logits and classifiers
    *(([kind()], unlabelled(), (f"method='{kind.__name__}'",)) for kind in (FedLC, FedNTD)),
    *(
        ([kind()], tiny(Unlike(nn.Linear(6, 1))), (f"method={kind.__name__}", "logits=(4, 1)", "3"))
        for kind in (FedLC, FedRS)
    ),
    ([FedNTD()], tiny(Unlike(nn.Sequential(nn.Linear(6, 10), nn.Unflatten(1, (5, 2))))), ("logits",)),
    ([FedRS(use_bias=False)], SEQUENTIAL, ("FedRS.use_bias=False", "logits", "'classifier'")),
    ([FedUV(spectral=0.5)], SEQUENTIAL, ("FedUV.spectral=0.5", "'classifier'")),
    ([StructuredDeCov(groups=17)], {}, ("StructuredDeCov.groups=17",)),
    ([FedRoD()], {"taps": {"logits": "encoder"}}, ("FedRoD", "logits", "encoder")),
    ([FedRoD()], {**PLAIN, "taps": {"representation": "encoder.layers.0"}}, ("FedRoD", "representation")),
    *(
        ([LogitAdjustment(when="post_hoc"), other()], {}, ("LogitAdjustment.when='post_hoc'",))
        for other in (KeepsBias, IFCA, Ditto)
    ),
    (
        [LogitAdjustment(when="post_hoc")],
        classified(nn.Linear(16, 10, bias=False)),
        ("LogitAdjustment.when='post_hoc'", "classifier"),
    ),
    # running statistics
    *(([kind()], PLAIN, (kind.__name__, "model='ImageClassifier'", "BatchNorm")) for kind in (FedBN, FixBN)),
    *(([FixBN()], {"buffers": buffers}, ("FixBN", "statistics")) for buffers in ("local", "keep")),
    ([FixBN(), FedBN()], {}, ("FixBN", "statistics")),
    ([DPFedAvg()], {}, ("DPFedAvg", "buffers", "projector.layers.1.running_mean")),
    # adapters
    ([FedIT()], {}, ("FedIT", "model='ImageClassifier'")),
    ([FedIT()], adapted(train_a=False), ("FedIT", "model='ImageClassifier'")),
    ([LoRAProduct(5)], adapted(), ("LoRAProduct.rank=5", "4")),
    ([LoRAProduct(), Local()], adapted(), ("LoRAProduct", "Local")),
    ([HetLoRA([2, 8])], adapted(), ("HetLoRA.ranks=[2, 8]", "rank 4")),
    ([HetLoRA([2])], adapted(sgd={"weight_decay": 0.1}), ("HetLoRA", "weight_decay=0.1")),
    *(([HetLoRA([2], "examples"), other()], adapted(), ("HetLoRA", other.__name__)) for other in (SCAFFOLD, FedNova)),
    ([HetLoRA([2]), FedDisco()], adapted(), ("HetLoRA with method='FedDisco'",)),
    ([HetLoRA([2]), FedIT()], adapted(), ("method=['HetLoRA', 'FedIT']",)),
    ([FedExLoRA()], {**adapted(), "buffers": "local"}, ("FedExLoRA", "trainer.buffers=average")),
    ([], {"callbacks": [SpectrumMonitor(lora=True)]}, ("SpectrumMonitor.lora=True", "ImageClassifier")),
    # clients that may lie, of which there are four
    ([TrimmedMean(2)], {}, ("TrimmedMean", "f=2", "5", "trainer.cohort_size")),
    ([MultiKrum(1)], {}, ("MultiKrum", "f=1", "5")),
    ([MultiKrum(0, chosen=5)], {}, ("MultiKrum.chosen=5", "4")),
    ([FedNova(), FedAsync()], {"cohort_size": 1}, ("FedAsync", "FedNova")),
    ([NNM(2)], {}, ("NNM", "f=2", "5")),
    *(([NNM(1), other()], {}, ("NNM", other.__name__)) for other in (IFCA, FedAMP)),
    ([TrimmedMean()], {}, ("TrimmedMean", "share=0.1", "1/4")),
    ([TrimmedMean(share=0.25)], {"cohort_size": 3}, ("TrimmedMean", "share=0.25", "1/3")),
    ([SCAFFOLD(), TrimmedMean()], {}, ("TrimmedMean", "SCAFFOLD")),
    ([variant(FedNova)(), TrimmedMean()], {}, ("TrimmedMean", "FedNovaVariant")),
    ([MultiKrum(), FedNova()], {}, ("MultiKrum", "FedNova")),
    ([GeometricMedian(), FedDyn()], {}, ("GeometricMedian", "FedDyn")),
    ([FedExP(), CenteredClipping()], {}, ("FedExP", "CenteredClipping")),
    ([CoordinateMedian(), FedDisco()], {}, ("CoordinateMedian", "FedDisco")),
    ([DPFedAvg(noise=0), TrimmedMean()], {"buffers": "keep"}, ("DPFedAvg", "TrimmedMean")),
    *(([NNM(1), attack()], {}, (f"{attack.__name__} after method", "NNM")) for attack in (IPM, LabelFlip)),
    ([SignFlip([9])], {}, ("SignFlip.clients=[9]", "4")),
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
    ([FedVLS(), FedLC()], {}, ("method=['FedVLS', 'FedLC']",)),
    ([FedALA(), FedPer()], {}, ("method", "FedALA", "FedPer")),
    ([FedIT(), FFALoRA()], adapted(), ("method=['FedIT', 'FFALoRA']",)),
    ([CoordinateMedian(), MultiKrum()], {}, ("method=['CoordinateMedian', 'MultiKrum']",)),
    ([IFCA(), FedAMP()], {}, ("method=['IFCA', 'FedAMP']",)),
    # each client receives a model of its own
    *(
        ([kind(), other], {}, (kind.__name__, type(other).__name__))
        for kind in (IFCA, FedAMP)
        for other in (SCAFFOLD(), FedDyn(0.1), FedNova(), FedExP(), FedPer(), Local(), TrimmedMean(1))
    ),
    *(([kind(), DPFedAvg(noise=0)], {"buffers": "keep"}, ("DPFedAvg", kind.__name__)) for kind in (IFCA, FedAMP)),
    ([IFCA(shared=["nothing"])], {}, ("IFCA.shared='nothing'",)),
    ([FedAMP(0.5)], {}, ("FedAMP", "a=0.5")),
    ([FedAMP(), FedDisco()], {}, ("FedAMP with method='FedDisco'",)),
    ([FedAMP(weight=3.0)], {}, ("FedAMP with the client optimizer's lr=0.1", "weight / a=30")),
    # the server weighs by age
    ([FedAsync()], {}, ("FedAsync", "4", "trainer.asynchronous.size=1")),
    ([FedBuff(), FedAsync()], {"cohort_size": 1}, ("FedAsync", "FedBuff")),
    ([FedAsync(), TrimmedMean(0)], {"cohort_size": 1}, ("FedAsync", "TrimmedMean")),
    *(
        ([kind(), DPFedAvg(noise=0)], {"cohort_size": 1, "buffers": "keep"}, ("DPFedAvg", kind.__name__))
        for kind in (FedBuff, FedAsync)
    ),
    # changes, gradients or weights that the other needs as they are
    *(([PFedMe(), other], {}, ("method", "PFedMe", type(other).__name__)) for other in (FedProx(), SCAFFOLD())),
    ([PFedMe()], tiny(Decays()), ("PFedMe", "weight_decay=[0.0, 0.1]", "PFedMe.inner_steps")),
    *(([FedALA(), kind()], {}, ("FedALA", kind.__name__)) for kind in (SCAFFOLD, variant(SCAFFOLD))),
    *(([FedALA(), other()], {}, ("FedALA", other.__name__)) for other in (FedDyn, FedNova)),
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


@pytest.mark.filterwarnings("ignore:.*the sums of what its clients send pass by")
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
