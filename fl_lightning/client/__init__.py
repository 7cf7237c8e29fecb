"""The resident module, with taps, reference models and logged values, and what clients remember between visits."""

from fl_lightning.client.batch import count_examples, targets_of
from fl_lightning.client.client import Client
from fl_lightning.client.memory import Memories

__all__ = ["Client", "Memories", "count_examples", "targets_of"]
