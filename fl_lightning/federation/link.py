"""How the server reaches its sites: nodes that it sends messages to, and that answer."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from fl_lightning.errors import UsageError, clipped
from fl_lightning.federation.wire import LARGEST, BadMessageError, Packet, as_records, of_records

# what a node answers: a message, or a text that says why there is none
Answer = Packet | str


class Link(Protocol):
    """What carries messages between the server and the nodes of its sites."""

    def nodes(self) -> list[int]:
        """The nodes that are there now."""

    def send(self, node: int, packet: Packet) -> str:
        """Send a message to a node; gives the number of the message, also of one that is lost at once."""

    def receive(self, messages: Collection[str]) -> dict[str, Answer]:
        """The answers to some of these messages that have come by now."""


_link: ContextVar[Link | None] = ContextVar("link", default=None)


@contextmanager
def reached_by(link: Link) -> Iterator[None]:
    """In this block a run whose data are ``Sites`` reaches them by this link."""
    token = _link.set(link)
    try:
        yield
    finally:
        _link.reset(token)


def present_link() -> Link:
    """The link of the present run.

    Raises:
        UsageError: there is none.
    """
    link = _link.get()
    if link is None:
        hint = "sites are reached by Flower alone; start the run by: flwr run APP CONNECTION"
        raise UsageError(f"data='Sites': {hint}")
    return link


class FlowerLink:
    """Flower's grid as a link.

    Args:
        grid: what a ``ServerApp`` is given.
        limit: bytes of the largest answer.
    """

    def __init__(self, grid: Any, limit: int = LARGEST) -> None:
        self.grid, self.limit = grid, limit
        # answers to messages that Flower did not take, by a number that is not one of its own
        self.unsent: dict[str, Answer] = {}

    def nodes(self) -> list[int]:
        return sorted(self.grid.get_node_ids())

    def send(self, node: int, packet: Packet) -> str:
        from flwr.app import Message

        # without a time to live: past a deadline Flower would call the site lost, which is at work all the same
        message = Message(as_records(packet), dst_node_id=node, message_type="train")
        try:
            number = next(iter(self.grid.push_messages([message])), None)
            why = "its SuperLink refuses it"
        except Exception as error:  # its own, of no public class; one that all messages meet comes again from nodes()
            number, why = None, f"{type(error).__name__}: {error}"
        if number is None:
            number = f"unsent-{uuid.uuid4().hex}"
            self.unsent[number] = f"lost: Flower could not send the message; {clipped(why, 300)}"
        return number

    def receive(self, messages: Collection[str]) -> dict[str, Answer]:
        answers = {number: self.unsent.pop(number) for number in messages if number in self.unsent}
        sent = [number for number in messages if number not in answers]
        for message in self.grid.pull_messages(sent) if sent else ():
            number = message.metadata.reply_to_message_id
            if message.has_error():
                answers[number] = f"lost: {message.error.reason or f'error {message.error.code}'}"
                continue
            try:
                answers[number] = of_records(message.content, self.limit)
            except BadMessageError as error:
                answers[number] = str(error)
        return answers
