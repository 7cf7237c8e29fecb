"""What both sides of a federation check: that they run the same config, and that a message holds what it may."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.engine.fingerprint import FREE_OF_TRAINER, differing
from fl_lightning.engine.sent import LONGEST_NAME, MOST_LOGGED, Entry, entries_of
from fl_lightning.errors import located
from fl_lightning.federation.wire import BadMessageError
from fl_lightning.foreach import norms

# of the trainer, what each machine may have of its own
OF_THE_MACHINE = {*FREE_OF_TRAINER, "accelerator", "threads_per_worker", "compile"} - {"max_rounds"}
SECTIONS = ("seed_everything", "model", "method", "trainer")
# bytes of a message beside its arrays
TEXT_ROOM = 2**24


def agreed_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved config that server and sites must have the same."""
    part = {key: config.get(key) for key in SECTIONS}
    trainer = part["trainer"] or {}
    return {**part, "trainer": {key: value for key, value in trainer.items() if key not in OF_THE_MACHINE}}


def digest_of_part(part: Mapping[str, Any]) -> str:
    """What tells one agreed part from another."""
    return hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()


def different_keys(theirs: Any, ours: Mapping[str, Any]) -> str:
    """The keys in which two agreed parts differ, with both values; empty where they are the same."""
    # as JSON has them: without the difference of lists and tuples
    there, here = (json.loads(json.dumps(part, default=str)) for part in (theirs, ours))
    changes = differing(there, here, "config")
    shown = [f"{key.removeprefix('config.')}: there {there!r}, here {here!r}" for key, (there, here) in changes.items()]
    return "; ".join(shown)


def check_state(what: str, state: Any, expected: Mapping[str, Tensor], largest: float, names: Collection[str]) -> None:
    """Refuse a state that is not what a message may hold.

    Args:
        what: what it is, for the error.
        state: the state.
        expected: tensors of the same names, types and shapes.
        largest: the largest number that it may hold.
        names: the names that it must have.

    Raises:
        BadMessageError: it has other names, types or shapes, or a number that is nan or too large.
    """
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BadMessageError(f"{what} is no dictionary of tensors")
    for name in (*names, *state):
        if name not in state:
            raise BadMessageError(f"{what} lacks {name}")
        if name not in names:
            raise BadMessageError(f"{what} has the undeclared entry {name}")
        value, model = state[name], expected[name]
        if value.shape != model.shape or value.dtype != model.dtype:
            theirs, ours = (f"{tuple(part.shape)} {part.dtype}" for part in (value, model))
            raise BadMessageError(f"{what}: {name} is {theirs}, and {ours} here")
    # a buffer may hold infinity from the start, as a mask does
    changed = {n: value for n, value in state.items() if not torch.equal(value, expected[n].to(value.device))}
    check_numbers(what, changed, largest)


def check_numbers(what: str, values: Mapping[str, Tensor], largest: float) -> None:
    """Refuse floating numbers that are nan, infinite or too large.

    Raises:
        BadMessageError: there is one; names it.
    """
    floats = {name: value for name, value in values.items() if value.is_floating_point() and value.numel()}
    for name, size in zip(floats, norms(list(floats.values()), math.inf), strict=True):
        if not float(size) <= largest:
            raise BadMessageError(f"{what}: {name} holds {float(size):g}; at most {largest:g} is taken")


def check_update(contents: Any, declared: Collection[Entry], frozen: Collection[str]) -> None:
    """Refuse an update with something that was not declared.

    A part that was declared may be missing, as that of a method that has nothing to send. Frozen parameters that have
    changed are there in any number.

    Raises:
        BadMessageError: an entry is not declared, or has another shape; or there are too many logged values.
    """
    known = {entry.name: entry for entry in declared}
    for entry in entries_of(contents):
        part, _, name = entry.name.partition("/")
        if part == "frozen" and name in frozen:
            continue
        if entry.name not in known:
            raise BadMessageError(f"the update has the undeclared entry {entry.name} {entry.shape}")
        wide = known[entry.name]
        types = {entry.dtype, wide.dtype}
        if entry.shape != wide.shape or not (len(types) == 1 or types == {"float32", "float64"}):
            raise BadMessageError(
                f"{entry.name} is {entry.shape} {entry.dtype}, and was declared as {wide.shape} {wide.dtype}"
            )
    logged = contents.get("logged")
    fits = isinstance(logged, dict) and len(logged) <= MOST_LOGGED
    if not fits or any(not isinstance(name, str) or len(name) > LONGEST_NAME for name in logged):
        raise BadMessageError(
            f"more than {MOST_LOGGED} logged values, or one with a name of over {LONGEST_NAME} letters"
        )
    if extra := contents.keys() - PARTS:
        raise BadMessageError(f"the update has the undeclared part {sorted(extra)[0]!r}")


PARTS = {"parameters", "change", "buffers", "frozen", "payload", "weight", "drift", "num_bytes", "logged"}


def room(declared: Collection[Entry]) -> int:
    """Bytes of the largest message with such an update."""
    return TEXT_ROOM + sum(torch.Size(entry.shape).numel() * 8 for entry in declared)


def digest_of_state(state: Mapping[str, Tensor]) -> str:
    """What tells one state from another: names, types, shapes and numbers."""
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        array = value.detach().cpu().contiguous().reshape(-1)
        digest.update(array.view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return digest.hexdigest()


def scrubbed(error: BaseException) -> str:
    """What may be told of an error at a site: where it happened, and the text of this package's own errors.

    The text of another exception may hold what the data hold. It stays in the log of the site.
    """
    cause: BaseException | None = error
    while cause is not None and type(cause).__module__.startswith("fl_lightning."):
        cause, last = cause.__cause__, cause
        if cause is None:
            return " ".join(str(last).split())[:500]
    if cause is None:
        return type(error).__name__
    where = located(cause)
    head = where.split("): ")[0] + ")" if "): " in where else type(cause).__name__
    return f"{head[:200]}; the log of the site has its text"
