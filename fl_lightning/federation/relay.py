"""What runs at a site for each message of Flower's: it passes the message to the site's worker, and the answer back.

It imports neither torch nor this package's engine, and reads no data: the submitted app needs nothing but the socket.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

from fl_lightning.federation.wire import BadMessageError, as_records, of_records, receive, send

# seconds in which a worker that is being started again must listen
PATIENCE = 60.0


def relayed(path: str, message: bytes, patience: float = PATIENCE) -> bytes:
    """The answer of the worker that listens at ``path``; where none does, a message that says so."""
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
    """A message of the site's that says what went wrong."""
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
