"""Messages as bytes: through the socket of a site, and in Flower's records. Nothing here imports torch."""

from __future__ import annotations

import socket
import struct
from typing import Any, NamedTuple

from fl_lightning.errors import UsageError

# bytes of the text, and of the data, before both
HEAD = struct.Struct("<QQ")
# bytes of a message whose receiver sets no limit
LARGEST = 2**34
# names of the record of a message and of its one array
RECORD, BYTES = "message", "bytes"


class Packet(NamedTuple):
    """A message.

    Args:
        text: JSON.
        data: the numbers of the tensors in the text, in order, the lowest byte first.
    """

    text: str
    data: bytes = b""

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode()) + len(self.data)


class BadMessageError(UsageError):
    """A message that is not what the two sides have agreed on; it is refused as a whole."""


def check_size(size: int, limit: int) -> None:
    """Refuse a message of more than ``limit`` bytes."""
    if size > limit:
        raise BadMessageError(f"a message of {size:,} bytes; at most {limit:,} are taken")


def unpack(text: bytes, data: bytes) -> Packet:
    """A message from its two parts."""
    try:
        return Packet(text.decode(), data)
    except UnicodeDecodeError as error:
        raise BadMessageError("the text of a message is not UTF-8") from error


# ---------------------------------------------------------------------- the socket of a site
def send(connection: socket.socket, packet: Packet) -> None:
    """Write a message."""
    text = packet.text.encode()
    connection.sendall(HEAD.pack(len(text), len(packet.data)) + text)
    connection.sendall(packet.data)


def receive(connection: socket.socket, limit: int = LARGEST) -> Packet:
    """Read a message; memory is reserved only for bytes that have come.

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

    sizes = HEAD.unpack(take(HEAD.size))
    check_size(sum(sizes), limit)
    return unpack(*map(take, sizes))


# ---------------------------------------------------------------------- Flower's records
def as_records(packet: Packet) -> Any:
    """A message as Flower's ``RecordDict``.

    It is one array, as Flower stores and asks for each array separately, on every way of the message.
    """
    from flwr.app import Array as FlowerArray
    from flwr.app import ArrayRecord, RecordDict

    text = packet.text.encode()
    data = b"".join((HEAD.pack(len(text), len(packet.data)), text, packet.data))
    array = FlowerArray(dtype="uint8", shape=(len(data),), stype="raw", data=data)
    return RecordDict({RECORD: ArrayRecord({BYTES: array})})


def of_records(records: Any, limit: int = LARGEST) -> Packet:
    """The message that :func:`as_records` was given.

    Raises:
        BadMessageError: the records hold something else.
    """
    try:
        data = records.array_records[RECORD][BYTES].data
        plain = isinstance(data, bytes) and {*records} == {RECORD} and {*records.array_records[RECORD]} == {BYTES}
    except (KeyError, TypeError, AttributeError):
        plain = False
    if not plain or len(data) < HEAD.size:
        raise BadMessageError("the records are not those of a message")
    length, rest = HEAD.unpack_from(data)
    check_size(len(data) - HEAD.size, limit)
    if length + rest != len(data) - HEAD.size:
        raise BadMessageError("a message does not end at its end")
    return unpack(data[HEAD.size : HEAD.size + length], data[HEAD.size + length :])
