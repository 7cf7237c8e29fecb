"""Federated learning on heterogeneous clients, on PyTorch Lightning and Fabric."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fl_lightning.utilities.version import __version__ as __version__

if TYPE_CHECKING:
    from fl_lightning.client import Client as Client
    from fl_lightning.core.client_context import ClientContext as ClientContext
    from fl_lightning.core.method import Method as Method
    from fl_lightning.core.method import ServerValue as ServerValue
    from fl_lightning.core.method import Step as Step
    from fl_lightning.core.server import Server as Server
    from fl_lightning.core.weighted import Weighted as Weighted
    from fl_lightning.data import FederatedDataModule as FederatedDataModule
    from fl_lightning.data import Partitioned as Partitioned
    from fl_lightning.report.runs import load_run as load_run
    from fl_lightning.report.runs import load_runs as load_runs
    from fl_lightning.storage.results import FitResult as FitResult
    from fl_lightning.trainer import FederatedTrainer as FederatedTrainer

_MODULES = {
    "Client": "client",
    "ClientContext": "core.client_context",
    "FederatedDataModule": "data",
    "FederatedTrainer": "trainer",
    "FitResult": "storage.results",
    "Method": "core.method",
    "Partitioned": "data",
    "Server": "core.server",
    "ServerValue": "core.method",
    "Step": "core.method",
    "Weighted": "core.weighted",
    "load_run": "report.runs",
    "load_runs": "report.runs",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import a name, or a part of the package, when it is first used: torch takes seconds, and not all need it."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    module = f"{__name__}.{name}"
    try:
        if not name.startswith("_"):
            return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
