"""Observers of a run."""

from fl_lightning.callbacks.alignment import LayerAlignment
from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.batch_norm_gap import BatchNormGap
from fl_lightning.callbacks.ccvr import CCVR
from fl_lightning.callbacks.collapse import NeuralCollapse
from fl_lightning.callbacks.cost import CostLedger
from fl_lightning.callbacks.deviation import DeviationBound
from fl_lightning.callbacks.domain_metrics import DomainMetrics
from fl_lightning.callbacks.drift import Drift
from fl_lightning.callbacks.early_stopping import BestCheckpoint, EarlyStopping
from fl_lightning.callbacks.embedding import Embedding
from fl_lightning.callbacks.local_losses import LocalLosses
from fl_lightning.callbacks.measurement import Measurement
from fl_lightning.callbacks.per_class import PerClassAccuracy
from fl_lightning.callbacks.personalized_accuracy import PersonalAccuracy
from fl_lightning.callbacks.progress import ProgressBar
from fl_lightning.callbacks.record import RunRecord
from fl_lightning.callbacks.scores import Scores
from fl_lightning.callbacks.similarity import LayerSimilarity
from fl_lightning.callbacks.spectrum import SpectrumMonitor

__all__ = [
    "CCVR",
    "BatchNormGap",
    "BestCheckpoint",
    "Callback",
    "CostLedger",
    "DeviationBound",
    "DomainMetrics",
    "Drift",
    "EarlyStopping",
    "Embedding",
    "LayerAlignment",
    "LayerSimilarity",
    "LocalLosses",
    "Measurement",
    "NeuralCollapse",
    "PerClassAccuracy",
    "PersonalAccuracy",
    "ProgressBar",
    "RunRecord",
    "Scores",
    "SpectrumMonitor",
]
