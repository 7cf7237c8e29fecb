"""Lightning's private functions and classes that the package uses, as of lightning 2.6, under public names."""

from lightning.fabric.strategies.launchers.launcher import _Launcher as Launcher
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.pytorch.core.optimizer import _configure_optimizers as configure_optimizers
from lightning.pytorch.core.optimizer import _configure_schedulers_automatic_opt as configure_schedulers
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator as LogValidator
from lightning.pytorch.utilities.data import _extract_batch_size as extract_batch_sizes

__all__ = [
    "IS_INTERACTIVE",
    "Launcher",
    "LogValidator",
    "configure_optimizers",
    "configure_schedulers",
    "extract_batch_sizes",
]
