"""The entry point of the program: help and errors of all commands, without the imports that only some need."""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from fl_lightning import __version__
from fl_lightning.utilities.errors import UsageError, printable, texts_of

# in the order in which the help lists them
COMMANDS = {
    "fit": "Train a model over the clients of a data module.",
    "validate": "Evaluate a trained model on the validation data.",
    "test": "Evaluate a trained model on the test data.",
    "predict": "Write the outputs of a trained model into a file.",
    "partition": "Deal the data out to the clients and print who holds what, without training.",
    "doctor": "Check a fit and estimate its cost, without running it.",
    "replay": "Repeat the visit of one client, as where a run has failed.",
    "federate": "Write a run as an app for Flower, for real sites.",
    "site": "Be the worker of a site, the one process there that reads its data.",
    "bench": "Run the cells of a suite, each a fit with several --config, and print its tables.",
    "tune": "Tune the arguments under the key `tune` of a suite, on a validation split.",
    "report": "Make one HTML page of runs and studies, and their tables in Markdown, LaTeX and CSV.",
    "completion": "Print a script by which bash, zsh or tcsh completes commands, options and names of classes.",
}
# Commands with their own module; the others are methods of the trainer. `bench` talks to a database from
# several threads and starts processes that train, so it never imports torch; nor does `report`.
APART = {"bench": "bench", "tune": "bench", "report": "report", "completion": "completion"}


def main(args: list[str] | None = None) -> None:
    """Run a command. Bad input ends it with one line and exit status 2, a client that failed with status 1.

    A signal that stops a fit ends it with the command that resumes it, and status 128 + its number. An exception from a
    user's code keeps its traceback, after a line with its place; one in a step on the first batch is bad input.
    """
    words = sys.argv[1:] if args is None else args
    asks = words[:1] in (["-h"], ["--help"], ["--version"])
    # options of configs may stand before the command
    commands = not asks and COMMANDS.keys() & set(words if words and words[0].startswith("-") else words[:1])
    try:
        if not commands:
            end_with_status(lambda: without_command(words))
        elif words[0] in APART:
            import_module(f"fl_lightning.cli.{APART[words[0]]}").main(words)
        else:
            end_with_status(lambda: check_before_torch(words))
            end_with_status(lambda: import_module("fl_lightning.cli.cli").main(args))
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def check_before_torch(words: list[str]) -> None:
    """Refuse what is wrong without knowing the classes of a config: importing torch and Lightning takes seconds."""
    from fl_lightning.cli.config_files import check_command  # which imports PyYAML

    if words[0] in COMMANDS:
        check_command(words)


def without_command(words: list[str]) -> int | None:
    """Print the commands or the version; refuse another word. An empty command line has the status of bad input."""
    if words[:1] in ([], ["-h"], ["--help"]):
        about = "Federated learning on heterogeneous clients, on PyTorch Lightning and Fabric."
        end = "COMMAND --help lists the arguments of a command, such as fit --help."
        parser = argparse.ArgumentParser(prog=program(), description=about, epilog=end, usage="%(prog)s COMMAND ...")
        parser.add_argument("--version", action="store_true", help="print the version of fl_lightning")
        commands = parser.add_subparsers(title="commands", metavar="")
        for name, does in COMMANDS.items():
            commands.add_parser(name, help=does.replace("%", "%%"))
        parser.print_help(None if words else sys.stderr)
        return 0 if words else 2
    if words[:1] == ["--version"]:
        return print(__version__)
    word = words[0] if words and not words[0].startswith("-") else ""
    if not word or word.endswith((".yaml", ".yml")):
        fit = ["fit", "--config", *words] if word else ["fit", *words]
        raise UsageError(f"the command is missing; add one, such as {program()} {shlex.join(fit)}, or --help")
    near = get_close_matches(word.lower(), COMMANDS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"{word}: no such command; pass one of {', '.join(COMMANDS)}{hint}")


# messages of argparse, and the key, value and remedy that replace them
PARSER_ERRORS = {
    r"the following arguments are required: (.+)": r"\1: a required argument is missing; add it",
    r"unrecognized arguments: (.+)": r"\1: unknown argument; remove it",
    r"argument (\S+): invalid choice: (.+) \(choose from (.+)\)": r"\1=\2: pass one of \3",
    r"argument (\S+): invalid (\w+) value: (.+)": r"\1=\3: pass a value of type \2",
    r"argument (\S+): expected (.+) arguments?": r"\1: pass \2 value after it",
}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a remedy, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        for pattern, line in PARSER_ERRORS.items():
            message = re.sub(f"^{pattern}$", line, message)
        raise UsageError(f"{message} (--help lists the arguments)")


def end_with_status(command: Callable[[], int | None]) -> None:
    """Run a command that returns the exit status, None for 0; end the program with it unless it is 0.

    Bad input gives one line and status 2. A closed pipe ends the program silently. Characters that the encoding of the
    output lacks are escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            status = command() or 0
        finally:
            sys.stdout.flush()
    except UsageError as error:
        print_usage_error(error)
        status = 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails, too
        status = 128 + signal.SIGPIPE
    if status:
        sys.exit(status)


def print_usage_error(error: UsageError) -> None:
    """Print a line for each thing that an error refuses."""
    for text in texts_of(error):
        # names at its end stay on lines of their own
        head, *names = re.split(r"\n  (?=\S+(?:\n  \S+)*\Z)", text)
        print("\n  ".join(map(printable, [f"error: {head}", *names])), file=sys.stderr)


def find_own_classes() -> None:
    """Let imports find a user's own classes in the working folder, where the installed program does not look."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def program() -> str:
    """The beginning of the command line, ``python cli.py`` or ``fl-lightning``, without the folders of programs."""
    # a program may have put other arguments into sys.argv
    interpreter, *words = sys.orig_argv[: max(1, len(sys.orig_argv) - len(sys.argv[1:]))]
    installed = bool(words) and Path(words[-1]).stem == "fl-lightning"
    return "fl-lightning" if installed else shlex.join([Path(interpreter).name, *words])
