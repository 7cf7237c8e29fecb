"""What the commands have in common that import no torch."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import NoReturn

from fl_lightning.errors import UsageError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def program() -> str:
    """The beginning of the command line, such as ``python cli.py``."""
    return shlex.join(sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])])
