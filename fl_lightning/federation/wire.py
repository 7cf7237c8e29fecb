"""Messages as bytes: through the socket of a site, and in Flower's records. Nothing here imports torch."""

from __future__ import annotations

import io
import json
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fl_lightning.errors import UsageError

LENGTH = struct.Struct("<Q")
# bytes of the index of a message, which names its arrays
LARGEST_INDEX = 2**24
# of a message whose receiver sets no limit
LARGEST = 2**34
# the types of arrays, as NumPy names them, with the bytes of a number
SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
# what the record of a message is called, and its one array
RECORD, BYTES = "message", "bytes"


class Array(NamedTuple):
    """An array as bytes.

    Args:
        dtype: its type, one of :data:`SIZES`.
        shape: its shape.
        data: its numbers, row by row, the lowest byte first.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Packet(NamedTuple):
    """A message: a JSON text, and the arrays that it refers to by name."""

    text: str
    arrays: dict[str, Array]

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode()) + sum(len(array.data) for array in self.arrays.values())


class BadMessageError(UsageError):
    """A message that is not what the two sides have agreed on; it is refused as a whole."""


def checked(packet: Packet, limit: int = LARGEST) -> Packet:
    """The message, if its arrays are what they claim to be and it keeps to the limit.

    Raises:
        BadMessageError: it is too large, or an array is of another kind or length than it says.
    """
    if packet.num_bytes > limit:
        raise BadMessageError(f"a message of {packet.num_bytes:,} bytes; at most {limit:,} are taken")
    for name, array in packet.arrays.items():
        numbers = 1
        for size in array.shape:
            if size < 0:
                raise BadMessageError(f"the array {name!r} has the shape {array.shape}")
            numbers *= size
        if array.dtype not in SIZES or len(array.data) != numbers * SIZES[array.dtype]:
            raise BadMessageError(f"the array {name!r} is no {array.dtype} of the shape {array.shape}")
    return packet


# ---------------------------------------------------------------------- bytes
def pieces(packet: Packet) -> Iterator[bytes]:
    """A message as bytes: the length of its index, the index, its text, and its arrays one after another."""
    text = packet.text.encode()
    index = [[name, array.dtype, list(array.shape), len(array.data)] for name, array in packet.arrays.items()]
    head = json.dumps({"text": len(text), "arrays": index}, separators=(",", ":")).encode()
    yield LENGTH.pack(len(head)) + head + text
    for array in packet.arrays.values():
        yield array.data


def read(take: Callable[[int], bytes], limit: int = LARGEST) -> Packet:
    """Read a message; nothing is reserved that is not there.

    Args:
        take: gives the next so many bytes.
        limit: bytes of the largest message.

    Raises:
        BadMessageError: it is too large, or none.
    """
    (size,) = LENGTH.unpack(take(LENGTH.size))
    if size > LARGEST_INDEX:
        raise BadMessageError(f"an index of {size:,} bytes; at most {LARGEST_INDEX:,} are taken")
    try:
        head = json.loads(take(size))
        length, index = (
            int(head["text"]),
            [(str(n), str(d), tuple(map(int, s)), int(b)) for n, d, s, b in head["arrays"]],
        )
        claimed = length + sum(number for *_, number in index)
        fits = length >= 0 and all(number >= 0 for *_, number in index)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadMessageError("what came is no message") from error
    if not fits or claimed > limit:
        raise BadMessageError(f"a message of {claimed:,} bytes; at most {limit:,} are taken")
    try:
        text = take(length).decode()
    except UnicodeDecodeError as error:
        raise BadMessageError("the text of a message is not UTF-8") from error
    return checked(Packet(text, {n: Array(d, s, take(number)) for n, d, s, number in index}), limit)


# ---------------------------------------------------------------------- the socket of a site
def send(connection: socket.socket, packet: Packet) -> None:
    """Write a message."""
    for piece in pieces(packet):
        connection.sendall(piece)


def receive(connection: socket.socket, limit: int = LARGEST) -> Packet:
    """Read a message.

    Raises:
        BadMessageError: it is too large, or none.
        ConnectionError: the other side has gone.
    """

    def take(size: int) -> bytes:
        parts, left = [], size
        while left:
            part = connection.recv(min(left, 2**20))
            if not part:
                raise ConnectionError("the other side has gone in the middle of a message")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    return read(take, limit)


# ---------------------------------------------------------------------- Flower's records
def as_records(packet: Packet) -> Any:
    """A message as Flower's ``RecordDict``.

    It is one array, as Flower stores and asks for each array separately, on every way of the message.
    """
    from flwr.app import Array as FlowerArray
    from flwr.app import ArrayRecord, RecordDict

    data = b"".join(pieces(packet))
    array = FlowerArray(dtype="uint8", shape=(len(data),), stype="raw", data=data)
    return RecordDict({RECORD: ArrayRecord({BYTES: array})})


def of_records(records: Any, limit: int = LARGEST) -> Packet:
    """What :func:`as_records` was given.

    Raises:
        BadMessageError: the records hold something else.
    """
    try:
        data = records.array_records[RECORD][BYTES].data
        plain = isinstance(data, bytes) and {*records} == {RECORD} and {*records.array_records[RECORD]} == {BYTES}
    except (KeyError, TypeError, AttributeError):
        plain = False
    if not plain:
        raise BadMessageError("the records are not those of a message")
    stream = io.BytesIO(data)

    def take(size: int) -> bytes:
        part = stream.read(size)
        if len(part) < size:
            raise BadMessageError("a message ends before its end")
        return part

    packet = read(take, limit)
    if stream.read(1):
        raise BadMessageError("a message goes on after its end")
    return packet
