"""Transport of messages: through the socket of a site, and in Flower's records.

Nothing here imports torch or the engine, or reads data: an app that is submitted to a site needs only the socket.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from fl_lightning.utilities.errors import UsageError

# header of a message: its size in bytes
SIZE = struct.Struct("<Q")
# default limit on the bytes of a message
LARGEST = 2**34
# seconds in which a restarted worker must listen
PATIENCE = 60.0
# names of the record of a message and of its one array
RECORD, BYTES = "message", "bytes"


class BadMessageError(UsageError):
    """A message is malformed; it is refused as a whole."""


def check_size(size: int, limit: int) -> None:
    """Refuse a message of more than ``limit`` bytes."""
    if size > limit:
        raise BadMessageError(f"a message of {size:,} bytes; at most {limit:,} are accepted")


def joined(shared: bytes, site_message: bytes) -> bytes:
    """Join the message to all sites, which is encoded once, with the message to one."""
    return SIZE.pack(len(shared)) + shared + site_message


def parted(message: bytes) -> tuple[bytes, bytes]:
    """Split a message into the two that :func:`joined` received."""
    end = SIZE.size + int.from_bytes(message[: SIZE.size], "little")
    return message[SIZE.size : end], message[end:]


def send(connection: socket.socket, message: bytes) -> None:
    """Write a message."""
    connection.sendall(SIZE.pack(len(message)))
    connection.sendall(message)


def receive(connection: socket.socket, limit: int = LARGEST) -> bytes:
    """Read a message, reserving memory only for bytes that have arrived.

    Raises:
        BadMessageError: the message is larger than ``limit``.
        ConnectionError: the peer has closed the connection.
    """

    def take(size: int) -> bytes:
        parts, missing = [], size
        while missing:
            part = connection.recv(min(missing, 2**20))
            if not part:
                raise ConnectionError("the peer has closed the connection within a message")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    (size,) = SIZE.unpack(take(SIZE.size))
    check_size(size, limit)
    return take(size)


def as_records(message: bytes) -> Any:
    """Return a message as Flower's ``RecordDict`` with one array: Flower stores and requests arrays separately."""
    from flwr.app import Array as FlowerArray
    from flwr.app import ArrayRecord, RecordDict

    array = FlowerArray(dtype="uint8", shape=(len(message),), stype="raw", data=message)
    return RecordDict({RECORD: ArrayRecord({BYTES: array})})


def of_records(records: Any, limit: int = LARGEST) -> bytes:
    """Return the message in the records of :func:`as_records`.

    Raises:
        BadMessageError: the records have other contents, or the message is larger than ``limit``.
    """
    try:
        message = records.array_records[RECORD][BYTES].data
        single_message = (
            isinstance(message, bytes) and {*records} == {RECORD} and {*records.array_records[RECORD]} == {BYTES}
        )
    except (KeyError, TypeError, AttributeError):
        single_message = False
    if not single_message:
        raise BadMessageError("the records do not hold exactly one message")
    check_size(len(message), limit)
    return message


def relayed(path: str, message: bytes, patience: float = PATIENCE) -> bytes:
    """Return the answer of the worker that listens at ``path``, or an error message if none answers."""
    end = math.inf
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                with suppress(ConnectionError):  # a worker that refuses a message for its size stops reading
                    send(connection, message)
                return receive(connection)
        except OSError as error:
            # a worker that ends during a visit has stored nothing: the next one may receive the same message
            end = min(end, time.monotonic() + patience)
            if time.monotonic() >= end:
                return encoded_error("failed", f"no worker of the site answers: {type(error).__name__}")
            time.sleep(0.5)


def encoded_error(kind: str, text: str) -> bytes:
    """Encode an error message of a site."""
    return json.dumps({kind: text}).encode()


def client_app() -> Any:
    """Return the ``ClientApp`` of a federation, which relays messages to the socket named in its node's config."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        path = context.node_config.get("socket")
        try:
            hint = "start its node with --node-config 'socket=\"/path/to/worker.sock\"'"
            request = of_records(message.content)
            if path:
                answer = relayed(str(path), request)
            else:
                answer = encoded_error("refused", f"its config names no socket; {hint}")
        except BadMessageError as error:
            answer = encoded_error("refused", str(error))
        return Message(as_records(answer), reply_to=message)

    return app
