"""What runs at a site for each message of Flower's: it passes the message to the site's worker, and the answer back.

It imports neither torch nor this package's engine, and reads no data: the submitted app needs nothing but the socket.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from fl_lightning.federation.wire import Packet, as_records, of_records, receive, send

# seconds in which a worker that is being started again must listen
PATIENCE = 60.0


def relayed(path: str, packet: Packet, patience: float = PATIENCE) -> Packet:
    """The answer of the worker that listens at ``path``; where none does, a message that says so."""
    end = time.monotonic() + patience
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                send(connection, packet)
                return receive(connection)
        except OSError as error:
            # a worker that ends in a visit has not kept it: the message may be given to the next one
            if time.monotonic() >= end:
                text = f"no worker of the site answers: {type(error).__name__}"
                return Packet(json.dumps({"dict": [["failed", text]]}), {})
            time.sleep(0.5)


def client_app() -> Any:
    """The ``ClientApp`` of a federation: its node's config says where the worker of the site listens."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        answer = relayed(str(context.node_config["socket"]), of_records(message.content))
        return Message(as_records(answer), reply_to=message)

    return app
