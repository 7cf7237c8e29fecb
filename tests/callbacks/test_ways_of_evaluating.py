"""Every callback works with every way of evaluating a run, or is refused before round 0."""

import inspect

import pytest
from helpers.runs import plain_sgd_model, small_data, small_trainer
from helpers.tiers import sample
from lightning.pytorch import LightningModule

from fl_lightning import callbacks
from fl_lightning.methods import FedBN, Local
from fl_lightning.utilities.errors import UsageError

ARGUMENTS = {
    "BestCheckpoint": {"monitor": "train/loss"},
    "CCVR": {"samples_per_class": 2, "epochs": 1},
    "EarlyStopping": {"monitor": "train/loss"},
    "Embedding": {"examples": 8, "clients": [0]},
    "LayerSimilarity": {"examples": 8},
    "PersonalAccuracy": {"fine_tune": "always", "fine_tune_steps": 1},
    "Scores": {"local_steps": 1},
    "SpectrumMonitor": {"local_models": True, "local_every_n_rounds": 1, "examples": 8},
}
CALLBACKS = [name for name in callbacks.__all__ if name not in ("Callback", "Measurement")]
# steps of the module, phases with data, methods, and arguments of the trainer
WAYS = {
    "test only": (["test_step"], ["test"], [], {}),
    "validation only": (["validation_step"], ["val"], [], {}),
    "validation step for test": (["validation_step"], ["val", "test"], [], {}),
    "no step": ([], ["val", "test"], [], {}),
    "no data": (["validation_step", "test_step"], [], [], {}),
    "nothing": ([], [], [], {}),
    "personal models": (["test_step"], ["test"], [Local], {}),
    "personal layers": (["test_step"], ["test"], [FedBN], {}),
    "personal models, no step": ([], ["test"], [Local], {}),
    "every second round": (["test_step"], ["test"], [], {"eval_every_n_rounds": 2}),
}
CASES = [(name, way) for name in CALLBACKS for way in WAYS]


def classifier(steps):
    """A classifier with BatchNorm, which evaluates by these steps alone."""
    model = plain_sgd_model()
    missing = {step: getattr(LightningModule, step) for step in {"validation_step", "test_step"} - {*steps}}
    model.__class__ = type("Evaluated", (type(model),), missing)
    return model


def digits(phases):
    """The digits, with data for these phases alone."""
    data = small_data(train_size=60, num_clients=2, test_size=30, val_fraction=0.2)
    missing = {f"{phase}_dataloader": lambda self, *args: [] for phase in {"val", "test"} - {*phases}}
    data.__class__ = type("Divided", (type(data),), missing)
    return data


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "case", sample(CASES, ("NeuralCollapse", "no step"), ("SpectrumMonitor", "nothing"), ("Scores", "no step"))
)
def test_a_callback_works_or_is_refused_before_round_0(tmp_path, case):
    name, way = case
    steps, phases, methods, how = WAYS[way]
    kind, refusal = getattr(callbacks, name), ""
    often = {"every_n_rounds": 1} if "every_n_rounds" in inspect.signature(kind).parameters else {}
    trainer = small_trainer(tmp_path, callbacks=[kind(**often, **ARGUMENTS.get(name, {}))], **how)
    try:
        trainer.fit(classifier(steps), digits(phases), [method() for method in methods])
    except UsageError as error:
        refusal = str(error)
    if refusal:
        assert name in refusal and "\n" not in refusal
        assert not trainer.history and not list(tmp_path.iterdir())
    else:
        assert len(trainer.history) == 2
