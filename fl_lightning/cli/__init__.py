"""The command line."""

from fl_lightning.cli.entry_point import main

__all__ = ["main"]
