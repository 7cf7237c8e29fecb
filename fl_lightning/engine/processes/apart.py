"""A trial in a forked process, of which nothing is left, not even what user code keeps outside of its objects."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from fl_lightning.distributed.launcher import can_fork, gc_disabled, init_forked_process
from fl_lightning.errors import UsageError

# of patience with the forked process
SECONDS = 60


def can_try_apart(device: torch.device) -> bool:
    """Whether a trial can run in a forked process."""
    return can_fork() and device.type == "cpu"


def is_ours(part: object) -> bool:
    """Whether an object is of a class of this package, which changes nothing that is not put back."""
    return type(part).__module__.startswith("fl_lightning.")


def said_by_fork(work: Callable[[], None]) -> str:
    """The text of the UsageError that ``work`` raises in a forked process; empty if it raises none."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    child = context.Process(target=say_error, args=(work, sender))
    with gc_disabled():
        child.start()
    sender.close()
    try:
        # it ends without a word where user code ends it
        return receiver.recv() if receiver.poll(SECONDS) else ""
    except EOFError:
        return ""
    finally:
        receiver.close()
        child.kill()
        child.join()


def say_error(work: Callable[[], None], sender: Any) -> None:
    """In a forked process: send the text of the UsageError that ``work`` raises, and end."""
    init_forked_process()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    text = ""
    try:
        work()
    except UsageError as error:
        text = str(error)
    finally:
        # without the exit functions of the parent, such as those of its loggers
        sender.send(text)
        os._exit(0)
