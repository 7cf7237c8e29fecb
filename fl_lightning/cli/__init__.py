"""The command line."""

from fl_lightning.cli.program import FederatedCLI, main

__all__ = ["FederatedCLI", "main"]
