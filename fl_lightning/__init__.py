"""Federated learning on heterogeneous clients, on PyTorch Lightning and Fabric."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fl_lightning.version import __version__ as __version__

if TYPE_CHECKING:
    from fl_lightning.client import Client
    from fl_lightning.data import FederatedDataModule, Partitioned
    from fl_lightning.method import Method, ServerValue, Step
    from fl_lightning.report.runs import load_run, load_runs
    from fl_lightning.results import FitResult
    from fl_lightning.server import Server
    from fl_lightning.state import Weighted
    from fl_lightning.trainer import FederatedTrainer

__all__ = [
    "Client",
    "FederatedDataModule",
    "FederatedTrainer",
    "FitResult",
    "Method",
    "Partitioned",
    "Server",
    "ServerValue",
    "Step",
    "Weighted",
    "load_run",
    "load_runs",
]

_MODULES = {
    "Client": "client",
    "FederatedDataModule": "data",
    "FederatedTrainer": "trainer",
    "FitResult": "results",
    "Method": "method",
    "Partitioned": "data",
    "Server": "server",
    "ServerValue": "method",
    "Step": "method",
    "Weighted": "state",
    "load_run": "report.runs",
    "load_runs": "report.runs",
}


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
