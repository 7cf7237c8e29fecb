"""The worker processes of a run: their collectives, and which of them trains which client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor, distributed

from fl_lightning.engine.launch import ForkedWorkers

Value = TypeVar("Value")


class Workers:
    """The workers of a run, as one of them sees them. Every worker must call each collective.

    Args:
        fabric: knows the rank of this worker and their number.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._rank, self._size = fabric.global_rank, fabric.world_size
        self._launcher = fabric.strategy.launcher
        self._alone = False

    @property
    def rank(self) -> int:
        """Rank of this worker, from 0; 0 within :meth:`alone`."""
        return 0 if self._alone else self._rank

    @property
    def size(self) -> int:
        """Number of workers; 1 within :meth:`alone`."""
        return 1 if self._alone else self._size

    @contextmanager
    def alone(self, alone: bool = True) -> Iterator[None]:
        """In this block collectives concern this worker alone, and wait for no other; without effect if False."""
        before, self._alone = self._alone, self._alone or alone
        try:
            yield
        finally:
            self._alone = before

    def begin(self, round_: int) -> None:
        """Begin a round, which the error about a lost worker then names."""
        if isinstance(self._launcher, ForkedWorkers):
            self._launcher.begin(f"round {round_}: ")

    def check(self) -> None:
        """Raise a LostWorkerError where a worker that was forked on this machine has ended."""
        if isinstance(self._launcher, ForkedWorkers):
            self._launcher.check()

    def gather(self, value: Value) -> list[Value]:
        """The value of each worker, by rank; meant for small values."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up a CPU tensor over the workers, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor)

    def send(self, packed: Tensor, rank: int) -> None:
        """Send bytes ``(n,)`` to another worker, which calls :meth:`receive`."""
        distributed.send(torch.tensor([len(packed)]), rank)
        if len(packed):
            distributed.send(packed, rank)

    def receive(self, rank: int) -> Tensor:
        """Bytes ``(n,)`` from another worker."""
        size = torch.zeros(1, dtype=torch.int64)
        distributed.recv(size, rank)
        packed = torch.empty(int(size), dtype=torch.uint8)
        if len(packed):
            distributed.recv(packed, rank)
        return packed


def place(steps: Mapping[int, int], size: int, owners: Mapping[int, int]) -> list[list[int]]:
    """Place clients on workers: the clients of each, by rank. Those with the most steps are placed first.

    A client goes to the owner of its memory, as long as that worker has no more than its share of the steps; else to
    the worker with the fewest steps so far.

    Args:
        steps: expected local steps of each client.
        size: number of workers.
        owners: owner rank of each client that has a memory.
    """
    placed: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    share = -(-sum(steps.values()) // size)
    for k in sorted(steps, key=lambda k: (-steps[k], k)):
        owner = owners.get(k, size)
        fits = owner < size and loads[owner] + steps[k] <= share
        worker = owner if fits else min(range(size), key=loads.__getitem__)
        placed[worker].append(k)
        loads[worker] += steps[k]
    return placed
