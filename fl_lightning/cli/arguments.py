"""What the commands have in common that import no torch."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from fl_lightning.errors import UsageError, printable_lines

# the commands and what each does, in the order in which the help lists them
COMMANDS = {
    "fit": "Train a model over the clients of a data module.",
    "validate": "Evaluate a trained model on the validation data.",
    "test": "Evaluate a trained model on the test data.",
    "predict": "Write the outputs of a trained model into a file.",
    "partition": "Deal the data out to the clients and print who holds what, without training.",
    "doctor": "Check a fit and estimate what it takes, without running it.",
    "replay": "Repeat the visit of one client, as where a run has failed.",
    "federate": "Write a run as an app for Flower, for real sites.",
    "site": "Be the worker of a site, the one process there that reads its data.",
    "bench": "Run the cells of a suite, each a fit with several --config, and print its tables.",
    "tune": "Tune what a suite says under its key `tune`, on a validation split.",
    "report": "Make one HTML page of runs and studies, and their tables in Markdown, LaTeX and CSV.",
    "completion": "Print a script by which bash, zsh or tcsh completes commands, options and names of classes.",
}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def end_with_status(command: Callable[[], int | None]) -> None:
    """Run a command, which returns the exit status, None for 0, and end the program with it unless it is 0.

    Bad input ends it with one line and status 2. It ends without a word where nobody reads its output any more. What
    the encoding of the output lacks is escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = command() or 0
        sys.stdout.flush()
    except UsageError as error:
        print(f"error: {printable_lines(str(error))}", file=sys.stderr)
        status = 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails, too
        status = 128 + signal.SIGPIPE
    if status:
        sys.exit(status)


@contextmanager
def writing_into(key: str, place: Path, hint: str = "give another one, that can be written to") -> Iterator[None]:
    """Refuse the file or folder that an argument names if the block cannot write there, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{key}={str(place)!r}: cannot be written: {error.strerror or error}; {hint}") from error


def find_own_classes() -> None:
    """Let imports find a user's own classes in the working folder, where the installed program does not look."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def program() -> str:
    """The beginning of the command line, ``python cli.py`` or ``fl-lightning``, without the folders of programs."""
    interpreter, *rest = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    installed = bool(rest) and Path(rest[-1]).stem == "fl-lightning"
    return "fl-lightning" if installed else shlex.join([Path(interpreter).name, *rest])
