"""The client: its module, taps, reference models and logged values, and its memory between visits."""

from fl_lightning.client.client import Client, targets_of
from fl_lightning.client.client_state import ClientStateStore
from fl_lightning.client.lightning.metric_log import count_examples

__all__ = ["Client", "ClientStateStore", "count_examples", "targets_of"]
