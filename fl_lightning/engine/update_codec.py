"""The messages between server and clients, as tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.core.reduced import KINDS, Reduced
from fl_lightning.core.state import State, clone, num_bytes, select, tensors_by_path
from fl_lightning.core.update import Update
from fl_lightning.core.weighted import LazyDifference, Weighted
from fl_lightning.data.client_loaders import leaves_of
from fl_lightning.utilities.errors import ClientError

if TYPE_CHECKING:
    from fl_lightning.client import Client
    from fl_lightning.engine.run import Run

# most values that a visit may log, and most letters of their names, where the clients are sites
MOST_LOGGED, LONGEST_NAME = 1000, 200
# the keys of the message of an update
PARTS = {"parameters", "change", "buffers", "frozen", "payload", "weight", "drift", "num_bytes", "logged"}


class TensorSpec(NamedTuple):
    """A tensor that leaves a client, named by the part of the update and its name there."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its numbers."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


def broadcast_bytes(run: Run, clients: Sequence[int]) -> dict[int, int]:
    """Bytes that each of these clients is sent in a round: entries of the state, server values, and its extras."""
    server, methods = run.server, run.methods
    size = num_bytes(select(server.state, run.client.travelling)) + bytes_of_values(run, methods.sent_values())
    if not (methods.overriding("sent_extras") or methods.overriding("sent_numbers")):
        return dict.fromkeys(clients, size)
    sizes = {}
    for k in clients:
        with run.client.lifecycle.attributes_restored():
            extras = bytes_of_values(run, methods.sent_extras(server, k))
        sizes[k] = size + extras - methods.unsent_bytes(server.state, k)
    return sizes


def bytes_of_values(run: Run, values: Any) -> int:
    """Bytes of nested tensors and numbers, of which those with a fraction travel in the type of the parameters."""
    size = 0
    for value in leaves_of(values):
        floats = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.is_floating_point())
        size += torch.as_tensor(value).numel() * run.client.bytes_of_number if floats else num_bytes(value)
    return size


def encode_update(client: Client, update: Update) -> dict[str, Any]:
    """A client's update as a message of tensors and plain values.

    It contains the parameters in their own type, from which the server subtracts the state that it sent, in float64 as
    the client does; or the change itself, if a method has transformed it or chosen the start.
    """
    # the server does not know with which state a client has begun that chooses it
    if client.methods.overriding("transform_client_update") or client.methods.overriding("start_state"):
        narrow = {name: to_float32_if_exact(value) for name, value in update.delta.items()}
        # all in one type, so that a site can say beforehand how much it sends
        fits = all(value.dtype != torch.float64 for value in narrow.values())
        values = {"change": narrow if fits else clone(update.delta)}
    else:
        values = {"parameters": clone(select(client.live, update.delta))}
    logged = {name: (part.kind, float(part.total), float(part.weight)) for name, part in update.logged.items()}
    frozen_changes = update.frozen_changes.items()
    frozen = {name: to_float32_if_exact(value) for name, value in frozen_changes}
    return {
        **values,
        "buffers": update.others,
        "frozen": frozen,
        "payload": {name: encode_weighted(part) for name, part in update.payload.items()},
        "weight": float(update.weight),
        "drift": update.drift,
        "num_bytes": update.num_bytes,
        "logged": logged,
    }


def decode_update(contents: Mapping[str, Any], received: State) -> Update:
    """The update of a client that began with the state ``received``; the inverse of :func:`encode_update`."""
    try:
        logged = {}
        for name, (kind, total, weight) in contents["logged"].items():
            if kind not in KINDS:
                raise ValueError("a logged value has no reduction")
            logged[str(name)] = Reduced(kind, float(total), float(weight))
        sent = contents.get("parameters")
        delta = to_float64(contents["change"]) if sent is None else dict(LazyDifference(sent, received, sent))
        buffers, frozen = dict(contents["buffers"]), to_float64(contents["frozen"])
        payload = {name: decode_weighted(part) for name, part in contents["payload"].items()}
        weight, drift, size = float(contents["weight"]), float(contents["drift"]), int(contents["num_bytes"])
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ClientError(f"its update is of another form: {type(error).__name__}: {error}") from None
    return Update(delta, buffers, weight, payload, logged, drift, frozen, size)


def list_tensors(contents: Mapping[str, Any]) -> list[TensorSpec]:
    """Return the tensors of a message, in order."""
    return [
        TensorSpec(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in tensors_by_path(contents)
    ]


def encode_weighted(value: Any) -> Any:
    """``Weighted`` values in nested dictionaries as dictionaries of a total and a weight."""
    if isinstance(value, Weighted):
        return {"total": to_float32_if_exact(value.total), "weight": to_float32_if_exact(value.weight)}
    return {"values": {name: encode_weighted(part) for name, part in value.items()}}


def decode_weighted(value: Any) -> Any:
    """The inverse of :func:`encode_weighted`."""
    if "values" in value:
        return {name: decode_weighted(part) for name, part in value["values"].items()}
    return Weighted(value["total"].double(), value["weight"].double())


def to_float32_if_exact(value: Tensor) -> Tensor:
    """Return a float64 tensor in float32 if that is exact, as for values that were computed in float32."""
    value = value.detach()
    if value.dtype != torch.float64:
        return value.clone()
    narrow = value.float()
    return narrow if torch.equal(narrow.double(), value) else value.clone()


def to_float64(values: Mapping[str, Tensor]) -> State:
    """Tensors in float64, as a client adds them."""
    return {name: value.double() for name, value in values.items()}
