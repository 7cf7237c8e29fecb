"""Messages on their way: through the socket of a site, in Flower's records, and from these to the socket.

Nothing here imports torch or the engine, or reads data: the app that is submitted to a site needs the socket alone.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from fl_lightning.errors import UsageError

# bytes of a message, before it
SIZE = struct.Struct("<Q")
# bytes of a message whose receiver sets no limit
LARGEST = 2**34
# seconds in which a worker that is being started again must listen
PATIENCE = 60.0
# names of the record of a message and of its one array
RECORD, BYTES = "message", "bytes"


class BadMessageError(UsageError):
    """A message is not of the agreed form; it is refused as a whole."""


def check_size(size: int, limit: int) -> None:
    """Refuse a message of more than ``limit`` bytes."""
    if size > limit:
        raise BadMessageError(f"a message of {size:,} bytes; at most {limit:,} are taken")


def joined(shared: bytes, own: bytes) -> bytes:
    """Join the message to all sites, which is encoded once, with the message to one."""
    return SIZE.pack(len(shared)) + shared + own


def parted(message: bytes) -> tuple[bytes, bytes]:
    """Part the two messages that :func:`joined` was given."""
    end = SIZE.size + int.from_bytes(message[: SIZE.size], "little")
    return message[SIZE.size : end], message[end:]


def send(connection: socket.socket, message: bytes) -> None:
    """Write a message."""
    connection.sendall(SIZE.pack(len(message)))
    connection.sendall(message)


def receive(connection: socket.socket, limit: int = LARGEST) -> bytes:
    """Read a message; memory is reserved only for bytes that have come.

    Raises:
        BadMessageError: it is too large.
        ConnectionError: the other side has closed the connection.
    """

    def take(size: int) -> bytes:
        parts, left = [], size
        while left:
            part = connection.recv(min(left, 2**20))
            if not part:
                raise ConnectionError("the other side has closed the connection within a message")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    (size,) = SIZE.unpack(take(SIZE.size))
    check_size(size, limit)
    return take(size)


def as_records(message: bytes) -> Any:
    """A message as Flower's ``RecordDict``.

    It is one array, as Flower stores and asks for each array separately, on every way of the message.
    """
    from flwr.app import Array as FlowerArray
    from flwr.app import ArrayRecord, RecordDict

    array = FlowerArray(dtype="uint8", shape=(len(message),), stype="raw", data=message)
    return RecordDict({RECORD: ArrayRecord({BYTES: array})})


def of_records(records: Any, limit: int = LARGEST) -> bytes:
    """The message that :func:`as_records` was given.

    Raises:
        BadMessageError: the records hold something else, or the message is too large.
    """
    try:
        message = records.array_records[RECORD][BYTES].data
        plain = isinstance(message, bytes) and {*records} == {RECORD} and {*records.array_records[RECORD]} == {BYTES}
    except (KeyError, TypeError, AttributeError):
        plain = False
    if not plain:
        raise BadMessageError("the records are not those of a message")
    check_size(len(message), limit)
    return message


def relayed(path: str, message: bytes, patience: float = PATIENCE) -> bytes:
    """Return the answer of the worker that listens at ``path``, or an error message where none does."""
    end = time.monotonic() + patience
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                with suppress(ConnectionError):  # a worker that refuses a message by its size does not read to its end
                    send(connection, message)
                return receive(connection)
        except OSError as error:
            # a worker that ends in a visit has not kept it: the message may be given to the next one
            if time.monotonic() >= end:
                return told("failed", f"no worker of the site answers: {type(error).__name__}")
            time.sleep(0.5)


def told(kind: str, text: str) -> bytes:
    """Encode an error message of a site."""
    return json.dumps({kind: text}).encode()


def client_app() -> Any:
    """The ``ClientApp`` of a federation: its node's config says where the worker of the site listens."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        path = context.node_config.get("socket")
        try:
            hint = "start its node with --node-config 'socket=\"/path/to/worker.sock\"'"
            asked = of_records(message.content)
            answer = relayed(str(path), asked) if path else told("refused", f"no socket of a worker is given; {hint}")
        except BadMessageError as error:
            answer = told("refused", str(error))
        return Message(as_records(answer), reply_to=message)

    return app
