"""Observers of a run."""

from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.best_checkpoint import BestCheckpoint
from fl_lightning.callbacks.ccvr import CCVR
from fl_lightning.callbacks.early_stopping import EarlyStopping
from fl_lightning.callbacks.measurement import Measurement
from fl_lightning.callbacks.progress import ProgressBar
from fl_lightning.callbacks.record import RunRecord
from fl_lightning.callbacks.spectrum import SpectrumMonitor

__all__ = [
    "CCVR",
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "Measurement",
    "ProgressBar",
    "RunRecord",
    "SpectrumMonitor",
]
