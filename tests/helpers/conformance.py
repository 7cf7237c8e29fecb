"""One client, trained by Lightning's own Trainer and by a run of rounds."""

import logging
import tempfile
import warnings
from contextlib import ExitStack
from inspect import signature
from typing import NamedTuple
from unittest.mock import patch

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from fl_lightning import FederatedTrainer, callbacks
from helpers.notes import note, noted
from helpers.tiny import TinyData, clients

TOLERANCE = {"64-true": 1e-10, "32-true": 1e-5, "bf16-mixed": 1e-5, "bf16-true": 1e-5}
PRECISIONS = ("64-true", "32-true")

_NAMES = """
accumulate_grad_batches barebones check_val_every_n_epoch current_epoch estimated_stepping_batches evaluating
fast_dev_run global_rank global_step gradient_clip_algorithm gradient_clip_val interrupted is_global_zero local_rank
log_dir logger loggers lr_scheduler_configs max_epochs max_steps node_rank num_devices num_nodes num_training_batches
precision predicting progress_bar_callback sanity_checking should_stop testing training validating world_size
"""
SAME = _NAMES.split()  # attributes of ``self.trainer`` with the values of Lightning's Trainer

# functions that take half of the time of a short run and are tested elsewhere, with their replacements
LEFT_OUT = {
    "fl_lightning.trainer.code_of_run": lambda *args: {},
    "fl_lightning.engine.fingerprint.code_of_run": lambda *args: {},
    "fl_lightning.callbacks.record.git_revision": lambda: None,
}
FIRST_BATCH = {"fl_lightning.engine.commands.fit.run_sanity_check": lambda run: None}


def notes_of(train):
    """Return the result of ``train()``, and the notes taken meanwhile."""
    noted.clear()
    result = train()
    return result, list(noted)


def resetting(namespace, epochs):
    """A callback of Lightning's that resets the optimizer at the start of each visit."""

    class Resets(namespace.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch % epochs == 0:
                for optimizer in trainer.optimizers:
                    optimizer.state.clear()

    return Resets()


class StopAfter(callbacks.Callback):
    """Ends the run after some rounds, as if it had been stopped by hand."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_round_end(self, trainer):
        trainer.should_stop = trainer.server.round + 1 >= self.rounds


def by_lightning(model, data, rounds=2, epochs=2, precision="64-true", namespace=lightning.pytorch, **options):
    """Train by Lightning of a namespace, with an optimizer reset at each visit, and return the trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    where = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "precision": precision}
    if not getattr(data, "val", True):
        where["limit_val_batches"] = 0
    given = {**quiet, **where, "max_epochs": rounds * epochs, **options}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        trainer = namespace.Trainer(callbacks=[resetting(namespace, epochs)], default_root_dir=folder, **given)
        trainer.fit(model, datamodule=data)
    return trainer


def by_rounds(model, data, rounds=2, epochs=2, methods=(), folder=None, ckpt_path=None, tried=False, **options):
    """Train by rounds, and return the trainer; ``tried`` keeps the trial of the first batch before the run."""
    given = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "precision": "64-true"}
    length = {"max_rounds": rounds, "local_epochs": epochs, "checkpoint_every_n_rounds": rounds}
    with ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory())
        for name, instead in (LEFT_OUT | ({} if tried else FIRST_BATCH)).items():
            stack.enter_context(patch(name, instead))
        trainer = FederatedTrainer(**{**given, **length, "default_root_dir": folder or own, **options})
        trainer.fit(model, data, list(methods), ckpt_path=ckpt_path)
    return trainer


class Pair(NamedTuple):
    """A module that Lightning trained, one that was trained by rounds, the trainers, and the notes of the second."""

    expected: LightningModule
    model: LightningModule
    lightning: Trainer
    trainer: FederatedTrainer
    notes: list


def conform(
    make, precision="64-true", rounds=2, epochs=2, data=TinyData, ours=None, theirs=None, compared=list, **both
):
    """Train ``make()`` by Lightning and by rounds of one client; assert that states and notes agree.

    Args:
        make: makes a module; it is called twice, and the second module takes the weights of the first.
        precision: of both.
        rounds: number of rounds.
        epochs: local epochs of a round.
        data: makes the data module.
        ours: more arguments of :func:`by_rounds`.
        theirs: more arguments of :func:`by_lightning`.
        compared: what to compare of the notes.
        both: more arguments of both trainers.
    """
    expected, model = make(), make()
    model.load_state_dict(expected.state_dict())
    length = {"rounds": rounds, "epochs": epochs, "precision": precision, **both}
    lightning, expected_notes = notes_of(lambda: by_lightning(expected, data(), **{**length, **(theirs or {})}))
    trainer, notes = notes_of(lambda: by_rounds(model, clients(data()), **{**length, **(ours or {})}))
    tolerance = TOLERANCE[precision]
    assert_close(model.state_dict(), expected.state_dict(), tolerance)
    assert compared(notes) == same(compared(expected_notes), tolerance)
    return Pair(expected, model, lightning, trainer, notes)


def same(value, tolerance):
    """``value`` with numbers that compare approximately, whichever containers hold them."""
    if isinstance(value, (list, tuple)):
        return type(value)(same(part, tolerance) for part in value)
    if isinstance(value, dict):
        return {key: same(part, tolerance) for key, part in value.items()}
    return pytest.approx(value, rel=tolerance, abs=tolerance) if isinstance(value, float) else value


def assert_close(states, expected, tolerance):
    """Assert that two states agree, up to an absolute and relative ``tolerance``."""
    torch.testing.assert_close(dict(states), dict(expected), rtol=tolerance, atol=tolerance)


def kind(value):
    """Return the kind of an argument, without its value."""
    if hasattr(value, "param_groups"):
        return "optimizer"
    if isinstance(value, str):
        return "str"
    if isinstance(value, dict):
        return sorted(value)
    return "closure" if callable(value) and not isinstance(value, torch.nn.Module) else type(value).__name__


def recording(base, names):
    """A subclass of ``base`` that notes each call of the hooks ``names``, and does what ``base`` does."""
    subclass = type(f"Recording{base.__name__}", (base,), {})

    def hook(name):
        def call(self, *args, **kwargs):
            given = signature(getattr(base, name)).bind(self, *args, **kwargs)
            given.apply_defaults()
            note(name, tuple((key, kind(value)) for key, value in given.arguments.items() if key != "self"))
            return getattr(super(subclass, self), name)(*args, **kwargs)

        call.__signature__ = signature(getattr(base, name))
        return call

    for name in names:
        setattr(subclass, name, hook(name))
    return subclass
