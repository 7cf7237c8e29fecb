"""Messages between server and sites: encodes tensors and plain values, and validates them on both sides.

The codec is shared with workers on several machines, plus bounds on messages from untrusted parties.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.foreach import norms
from fl_lightning.core.lazy_copies import readable
from fl_lightning.engine.fingerprint import FREE_OF_TRAINER, modules_of
from fl_lightning.engine.update_codec import LONGEST_NAME, MOST_LOGGED, PARTS, TensorSpec, list_tensors
from fl_lightning.federation.framing import LARGEST, BadMessageError, check_size
from fl_lightning.storage.serializable import packed, unpacked, with_tensors
from fl_lightning.utilities.code_fingerprint import code_of
from fl_lightning.utilities.errors import with_location
from fl_lightning.utilities.version import __version__

# limits on the nesting depth of a message and on its number of values
DEEPEST, MOST_VALUES = 24, 2**20
PLAIN = (str, bytes, int, float, complex, type(None), torch.Size, np.generic, np.ndarray)
# trainer arguments that may differ between machines
OF_THE_MACHINE = {*FREE_OF_TRAINER, "accelerator", "threads_per_worker", "deterministic", "compile"} - {"max_rounds"}
SECTIONS = ("seed_everything", "model", "method")


def encoded(value: Any) -> bytes:
    """Encode nested dictionaries, lists and tuples of tensors and plain values as a message.

    Raises:
        BadMessageError: they contain another type; names it.
    """

    def compact(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        # torch.save writes the whole storage of a view
        fills_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if fills_storage else tensor.clone()

    value = with_tensors(value, compact)
    check_contents(value, LARGEST)
    return packed(value).numpy().tobytes()


def decoded(message: bytes, limit: int = LARGEST) -> Any:
    """Decode a message of :func:`encoded`, or the JSON of a relay, which has no torch.

    Raises:
        BadMessageError: the message is too large, too deep or contains other types than tensors and plain values.
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
        raise BadMessageError("a message does not consist of tensors and plain values") from error
    check_contents(value, len(message))
    return value


def check_contents(value: Any, room: int) -> None:
    """Accept only dense tensors, of at most ``room`` bytes in total, and plain values, limited in depth and number.

    A message may refer to one tensor or list many times, or expand a number to a huge tensor.
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


def agreement(config: Mapping[str, Any], model: Any, methods: Sequence[Any]) -> str:
    """Return as JSON the source code and the part of a config that must be equal on the server and all sites."""
    code = code_of(modules_of([model, methods]))
    trainer = config.get("trainer") or {}
    trainer = {key: trainer[key] for key in trainer if key not in OF_THE_MACHINE}
    agreed = {**{key: config.get(key) for key in SECTIONS}, "trainer": trainer}
    return json.dumps(agreed | {"code": code, "fl_lightning": __version__}, sort_keys=True, default=str)


def check_tensors(
    source: str, state: Any, expected: Mapping[str, Tensor], largest: float, names: Collection[str]
) -> None:
    """Refuse a state with other names, types or shapes than expected, or with numbers above ``largest``."""
    values = state.values() if isinstance(state, dict) else [None]
    if not all(isinstance(value, Tensor) for value in values):
        raise BadMessageError(f"{source} must be a dictionary of tensors")
    for name in (*names, *state):
        if name not in state:
            raise BadMessageError(f"{source} lacks {name}")
        if name not in names:
            raise BadMessageError(f"{source} has the undeclared entry {name}")
        value, reference = state[name], expected[name]
        if value.shape != reference.shape or value.dtype != reference.dtype:
            kind = f"{tuple(value.shape)} {value.dtype}"
            hint = f"expected {tuple(reference.shape)} {reference.dtype}"
            raise BadMessageError(f"{source}: {name} is {kind}; {hint}")
    # an unchanged buffer may hold infinity, for example a mask
    changed = {}
    for name, value in state.items():
        if not torch.equal(value, expected[name].to(value.device)):
            changed[name] = value
    check_numbers(source, changed, largest)


def check_numbers(source: str, values: Mapping[str, Tensor], largest: float) -> None:
    """Refuse tensors with values that are nan, infinite or above ``largest``."""
    floats = {name: value for name, value in values.items() if value.is_floating_point()}
    floats = {name: value for name, value in floats.items() if value.numel()}
    for name, size in zip(floats, norms(list(floats.values()), math.inf), strict=True):
        if not float(size) <= largest:
            raise BadMessageError(f"{source}: {name} holds {float(size):g}; at most {largest:g} is accepted")


def check_update(contents: Any, declared: Collection[TensorSpec], frozen: Collection[str]) -> None:
    """Refuse undeclared entries; declared ones may be missing, and changed frozen parameters are accepted."""
    specs = {entry.name: entry for entry in declared}
    for entry in list_tensors(contents):
        part, _, name = entry.name.partition("/")
        if part == "frozen" and name in frozen:
            continue
        if entry.name not in specs:
            raise BadMessageError(f"the update has the undeclared entry {entry.name} {entry.shape}")
        spec = specs[entry.name]
        types = {entry.dtype, spec.dtype}
        if entry.shape != spec.shape or not (len(types) == 1 or types == {"float32", "float64"}):
            was = f"but was declared as {spec.shape} {spec.dtype}"
            raise BadMessageError(f"{entry.name} is {entry.shape} {entry.dtype}, {was}")
    logged = contents.get("logged")
    fits = isinstance(logged, dict) and len(logged) <= MOST_LOGGED
    if not fits or not all(isinstance(name, str) and len(name) <= LONGEST_NAME for name in logged):
        raise BadMessageError(f"more than {MOST_LOGGED} logged values, or a name of more than {LONGEST_NAME} letters")
    if extra := contents.keys() - PARTS:
        raise BadMessageError(f"the update has the undeclared part {sorted(extra)[0]!r}")


def digest_of_state(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, types, shapes and values of a state."""
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        array = readable(value.detach(), {}).cpu().contiguous().reshape(-1)
        digest.update(array.view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return digest.hexdigest()


def scrubbed(error: BaseException) -> str:
    """Describe an error at a site by its location, and by its text if it is an error of this package.

    The text of any other exception may quote the data, so it stays in the log of the site.
    """
    while type(error).__module__.startswith("fl_lightning."):
        if error.__cause__ is None:
            return " ".join(str(error).split())[:500]
        error = error.__cause__
    where = with_location(error)
    head = where.split("): ")[0] + ")" if "): " in where else type(error).__name__
    return f"{head[:200]}; see the log of the site for its text"
