"""The command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fl_lightning.cli.entry_point import main

if TYPE_CHECKING:
    from fl_lightning.cli.cli import FederatedCLI

__all__ = ["FederatedCLI", "main"]


def __getattr__(name: str) -> Any:
    """Import the class when it is first used: it needs torch, and some commands do not."""
    if name == "FederatedCLI":
        from fl_lightning.cli.cli import FederatedCLI

        return FederatedCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
