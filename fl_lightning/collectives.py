"""What the workers of a run do together, as far as sums and memories need it."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

Shared = TypeVar("Shared")


class Collectives(Protocol):
    """Workers that talk to each other; one worker alone is a group, too."""

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""

    @property
    def size(self) -> int:
        """Number of workers."""

    def gather(self, value: Shared) -> list[Shared]:
        """The value of each worker, by rank; all workers call this, with small values."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up the tensors of all workers, in place; all workers call this."""

    def send(self, contents: Tensor, rank: int) -> None:
        """Send bytes ``(n,)`` to the worker ``rank``, which receives them."""

    def receive(self, rank: int) -> Tensor:
        """Bytes ``(n,)`` from the worker ``rank``."""
