"""The beginning of the program: which command it is, before anything is imported that this command does not need."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from fl_lightning import __version__
from fl_lightning.cli.arguments import COMMANDS, end_with_status, program
from fl_lightning.errors import UsageError

# The commands that have a module of their own; the others are methods of the trainer. That of a suite talks to a
# database from several threads, and starts processes that train: it never imports torch, nor does that of a report.
APART = {"bench": "bench", "tune": "bench", "report": "report", "completion": "completion"}


def main(args: list[str] | None = None) -> None:
    """Run a command. Bad input ends it with one line and exit status 2, a client that failed with status 1.

    A signal that stops a fit ends it with the command that goes on, and status 128 + its number.

    An exception from a user's code keeps its traceback.
    """
    words = sys.argv[1:] if args is None else args
    asks = words[:1] in (["-h"], ["--help"], ["--version"])
    # options of configs may stand before the command
    known = not asks and COMMANDS.keys() & set(words if words and words[0].startswith("-") else words[:1])
    try:
        if not known:
            end_with_status(lambda: without_command(words))
        elif words[0] in APART:
            imported(f"fl_lightning.cli.{APART[words[0]]}").main(words)
        else:
            imported("fl_lightning.cli.program").main(args)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def without_command(words: list[str]) -> int | None:
    """Print the commands or the version where a command line asks for that; an empty one has the status of bad input.

    Raises:
        UsageError: it has other words, and none is a command.
    """
    if words[:1] in ([], ["-h"], ["--help"]):
        about = "Federated learning on heterogeneous clients, on PyTorch Lightning and Fabric."
        more = "COMMAND --help lists the arguments of a command, such as fit --help."
        parser = argparse.ArgumentParser(prog=program(), description=about, epilog=more, usage="%(prog)s COMMAND ...")
        parser.add_argument("--version", action="store_true", help="print the version of fl_lightning")
        commands = parser.add_subparsers(title="commands", metavar="")
        for name, does in COMMANDS.items():
            commands.add_parser(name, help=does.replace("%", "%%"))
        parser.print_help(None if words else sys.stderr)
        return 0 if words else 2
    if words[:1] == ["--version"]:
        return print(__version__)
    given = words[0] if words and not words[0].startswith("-") else ""
    if not given or given.endswith((".yaml", ".yml")):
        fit = ["fit", *(["--config"] if given else []), *words]
        raise UsageError(f"no command is given; give one, such as {program()} {shlex.join(fit)}, or --help")
    near = get_close_matches(given.lower(), COMMANDS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"{given}: no such command; give one of {', '.join(COMMANDS)}{hint}")


def imported(name: str) -> ModuleType:
    """Import a module, which may take seconds.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile, whatever a library has made of it: an extension module may turn
            it into an ImportError, and an optional import may pass over it.
    """
    caught: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        caught.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    # other threads cannot set a handler, and who ignores the signal, as nohup does, goes on doing so
    watched = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
    if watched:
        signal.signal(signal.SIGINT, interrupt)
    try:
        module = import_module(name)
    except BaseException as error:
        if caught:
            raise KeyboardInterrupt from error
        raise
    finally:
        if watched:
            signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt
    return module
