"""What a client is: a visit of the resident module, with taps, reference models, logged values and a memory."""

from fl_lightning.client.client import Client, count_examples, has_batch_norm, targets_of
from fl_lightning.client.memory import Memories

__all__ = ["Client", "Memories", "count_examples", "has_batch_norm", "targets_of"]
