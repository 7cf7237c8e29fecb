"""The beginning of the program: which command it is, before anything is imported that this command does not need."""

from __future__ import annotations

import signal
import sys
import threading
from importlib import import_module
from types import ModuleType

# The commands that need no torch. That of a suite talks to a database from several threads, and starts processes that
# train: it never imports it. A report reads what runs have left.
WITHOUT_TORCH = {"bench": "bench", "tune": "bench", "report": "report"}


def main(args: list[str] | None = None) -> None:
    """Run a command. Bad input ends it with one line and exit status 2, a client that failed with status 1.

    A signal that stops a fit ends it with the command that goes on, and status 128 + its number.

    An exception from a user's code keeps its traceback.
    """
    words = sys.argv[1:] if args is None else args
    try:
        if words and words[0] in WITHOUT_TORCH:
            imported(f"fl_lightning.cli.{WITHOUT_TORCH[words[0]]}").main(words)
        else:
            imported("fl_lightning.cli.program").main(args)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


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
