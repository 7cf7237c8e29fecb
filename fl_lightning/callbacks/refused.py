"""What to use here in place of the callbacks of Lightning's own trainer, whose hooks mean something else there."""

from __future__ import annotations

# by class name; their subclasses have the same replacement
REPLACEMENTS = {
    "EarlyStopping": "give fl_lightning.callbacks.EarlyStopping",
    "ModelCheckpoint": "checkpoints are written every trainer.checkpoint_every_n_rounds rounds, and "
    "fl_lightning.callbacks.BestCheckpoint keeps the best",
    "OnExceptionCheckpoint": "checkpoints are written every trainer.checkpoint_every_n_rounds rounds; take it out",
    "LearningRateMonitor": "the clients' learning rate is logged as lr; take it out",
    "ProgressBar": "trainer.enable_progress_bar shows a bar over the rounds; take it out",
    "Timer": "seconds are logged as time/...; take it out",
    "BasePredictionWriter": "the command predict writes what it returns; take it out",
}
OWN_INSTEAD = "write a fl_lightning.callbacks.Callback, see docs/own_callback.md"


def replacement(kind: type) -> str:
    """What to do in place of a callback of this class."""
    return next((REPLACEMENTS[base.__name__] for base in kind.__mro__ if base.__name__ in REPLACEMENTS), OWN_INSTEAD)
