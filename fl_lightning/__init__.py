"""Federated learning on heterogeneous clients, on PyTorch Lightning and Fabric."""

from fl_lightning.client import Client
from fl_lightning.data import FederatedDataModule, Partitioned
from fl_lightning.method import Method, ServerValue, Step
from fl_lightning.server import Server
from fl_lightning.state import Weighted
from fl_lightning.trainer import FederatedTrainer

__all__ = [
    "Client",
    "FederatedDataModule",
    "FederatedTrainer",
    "Method",
    "Partitioned",
    "Server",
    "ServerValue",
    "Step",
    "Weighted",
]
__version__ = "0.1.0"
