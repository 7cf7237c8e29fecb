"""The beginning of the program: which command it is, before anything is imported that this command does not need."""

from __future__ import annotations

import sys
from importlib import import_module

# their process talks to a database from several threads, and starts others that train: it never imports torch
OF_SUITES = ("bench", "tune")
# it reads what runs have left, for which it needs no torch
REPORT = "report"


def main(args: list[str] | None = None) -> None:
    """Run a command. Bad input ends it with one line and exit status 2, a client that failed with status 1.

    A signal that stops a fit ends it with the command that goes on, and status 128 + its number.

    An exception from a user's code keeps its traceback.
    """
    given = sys.argv[1:] if args is None else args
    if given and given[0] in OF_SUITES:
        import_module("fl_lightning.cli.bench").main(given)
    elif given and given[0] == REPORT:
        import_module("fl_lightning.cli.report").main(given)
    else:
        import_module("fl_lightning.cli.program").main(args)
