"""Messages between server and sites: tensors and plain values, and the checks of both sides.

The codec is the one of workers on several machines, with bounds on the messages of a stranger.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.engine.fingerprint import FREE_OF_TRAINER, differing
from fl_lightning.engine.sent import LONGEST_NAME, MOST_LOGGED, Entry, entries_of
from fl_lightning.errors import located
from fl_lightning.federation.wire import LARGEST, BadMessageError, check_size
from fl_lightning.foreach import norms
from fl_lightning.records.plain import packed, unpacked, with_tensors

# containers within each other, and values in all of them together
DEEPEST, MOST_VALUES = 24, 2**20
PLAIN = (str, bytes, int, float, complex, type(None), torch.Size, np.generic, np.ndarray)
# arguments of the trainer that may differ by machine
OF_THE_MACHINE = {*FREE_OF_TRAINER, "accelerator", "threads_per_worker", "compile"} - {"max_rounds"}
PARTS = {"parameters", "change", "buffers", "frozen", "payload", "weight", "drift", "num_bytes", "logged"}
SECTIONS = ("seed_everything", "model", "method", "trainer")


def encoded(value: Any) -> bytes:
    """Nested dictionaries, lists and tuples of tensors and plain values as a message.

    Raises:
        BadMessageError: there is something else in them; names it.
    """

    def alone(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        # torch saves with a part of a tensor the whole
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone()

    value = with_tensors(value, alone)
    check_contents(value, LARGEST)
    return packed(value).numpy().tobytes()


def decoded(message: bytes, limit: int = LARGEST) -> Any:
    """The value that :func:`encoded` was given; also reads the JSON of a relay, which has no torch.

    Raises:
        BadMessageError: the message is too large, too deep or holds anything but tensors and plain values.
    """
    check_size(len(message), limit)
    try:
        if message[:1] == b"{":
            value = json.loads(message)
        else:
            with zipfile.ZipFile(io.BytesIO(message)) as archive:  # torch.save compresses nothing
                check_size(sum(record.file_size for record in archive.infolist()), len(message))
            value = unpacked(message)
    except BadMessageError:
        raise
    except Exception as error:  # zipfile and torch raise errors of many types
        raise BadMessageError("a message is not of tensors and plain values") from error
    check_contents(value, len(message))
    return value


def check_contents(value: Any, room: int) -> None:
    """Refuse all but dense tensors and plain values, tensors of over ``room`` bytes in all, and deep or many values.

    A message may name one tensor or list many times, or expand a number to a huge tensor.
    """
    number, todo = 0, [(value, 0)]
    while todo:
        part, depth = todo.pop()
        number += 1
        if isinstance(part, Tensor) and part.layout == torch.strided and part.device.type == "cpu":
            room -= part.numel() * part.element_size()
        elif isinstance(part, dict):
            todo += [(inner, depth + 1) for pair in part.items() for inner in pair]
        elif isinstance(part, (list, tuple, set)):
            todo += [(inner, depth + 1) for inner in part]
        elif not isinstance(part, PLAIN):
            raise BadMessageError(f"a message of tensors and plain values cannot hold a {type(part).__name__}")
        if depth > DEEPEST or number > MOST_VALUES or room < 0:
            hint = f"more than {MOST_VALUES:,} values, more than {DEEPEST} deep, or larger tensors than its bytes"
            raise BadMessageError(f"a message holds {hint}")


def agreed_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select the part of a resolved config that server and sites must have the same."""
    part = {key: config.get(key) for key in SECTIONS}
    trainer = part["trainer"] or {}
    return {**part, "trainer": {key: value for key, value in trainer.items() if key not in OF_THE_MACHINE}}


def digest_of_part(part: Mapping[str, Any]) -> str:
    """SHA-256 of an agreed part."""
    return hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()


def different_keys(theirs: Any, ours: Mapping[str, Any]) -> str:
    """Keys in which two agreed parts differ, with both values; empty where none does."""
    # as JSON has them: without the difference of lists and tuples
    there, here = (json.loads(json.dumps(part, default=str)) for part in (theirs, ours))
    changes = differing(there, here, "config").items()
    return "; ".join(f"{key.removeprefix('config.')}: there {there!r}, here {here!r}" for key, (there, here) in changes)


def check_state(what: str, state: Any, expected: Mapping[str, Tensor], largest: float, names: Collection[str]) -> None:
    """Refuse a state unless it has these names, the expected types and shapes, and numbers up to ``largest``."""
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
    """Refuse floating numbers that are nan, infinite or above ``largest``."""
    floats = {name: value for name, value in values.items() if value.is_floating_point() and value.numel()}
    for name, size in zip(floats, norms(list(floats.values()), math.inf), strict=True):
        if not float(size) <= largest:
            raise BadMessageError(f"{what}: {name} holds {float(size):g}; at most {largest:g} is taken")


def check_update(contents: Any, declared: Collection[Entry], frozen: Collection[str]) -> None:
    """Refuse undeclared entries; declared ones may be missing, and changed frozen parameters may be added."""
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
            was = f"and was declared as {wide.shape} {wide.dtype}"
            raise BadMessageError(f"{entry.name} is {entry.shape} {entry.dtype}, {was}")
    logged = contents.get("logged")
    fits = isinstance(logged, dict) and len(logged) <= MOST_LOGGED
    if not fits or any(not isinstance(name, str) or len(name) > LONGEST_NAME for name in logged):
        raise BadMessageError(f"over {MOST_LOGGED} logged values, or a name of over {LONGEST_NAME} letters among them")
    if extra := contents.keys() - PARTS:
        raise BadMessageError(f"the update has the undeclared part {sorted(extra)[0]!r}")


def digest_of_state(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and numbers of a state."""
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        array = value.detach().cpu().contiguous().reshape(-1)
        digest.update(array.view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return digest.hexdigest()


def scrubbed(error: BaseException) -> str:
    """Describe an error at a site: its place, and the text of this package's own errors.

    The text of another exception may hold what the data hold. It stays in the log of the site.
    """
    while type(error).__module__.startswith("fl_lightning."):
        if error.__cause__ is None:
            return " ".join(str(error).split())[:500]
        error = error.__cause__
    where = located(error)
    head = where.split("): ")[0] + ")" if "): " in where else type(error).__name__
    return f"{head[:200]}; the log of the site has its text"
