"""The interface of collectives on which sums and memories depend."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

Shared = TypeVar("Shared")


class Collectives(Protocol):
    """Collectives over the workers of a group, which may be a single one."""

    @property
    def rank(self) -> int:
        """Return the number of this worker, from 0."""

    @property
    def size(self) -> int:
        """Return the number of workers."""

    def gather(self, value: Shared, label: str) -> list[Shared]:
        """Return the small value of each worker, by rank; all workers must call this with the same label."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up the tensors of all workers in place; all workers must call this."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the CPU tensor of each worker, all of one shape and type, by rank; all workers must call this."""

    def send(self, contents: Tensor, rank: int) -> None:
        """Send bytes ``(n,)`` to the worker ``rank``, which receives them."""

    def receive(self, rank: int) -> Tensor:
        """Receive bytes ``(n,)`` from the worker ``rank``."""
