"""Several workers as one: who trains which client, and what the workers tell each other."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor, distributed

from fl_lightning.errors import ClientError, UsageError
from fl_lightning.launch import ForkedWorkers
from fl_lightning.memory import Memories
from fl_lightning.state import Layout, Sums, merged

Found = TypeVar("Found")


class Team:
    """The workers of a run, as one of them sees them. Each method that exchanges something is called by all.

    Args:
        fabric: rank and number.

    Attributes:
        rank: of this worker, from 0.
        size: number of workers.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.rank, self.size = fabric.global_rank, fabric.world_size
        self._launcher = fabric.strategy.launcher

    def begin(self, round_: int) -> None:
        """Name this round where a worker is lost in it."""
        if isinstance(self._launcher, ForkedWorkers):
            self._launcher.where = f"round {round_}: "

    def check(self) -> None:
        """Raise a ClientError where a worker of this machine is lost."""
        if isinstance(self._launcher, ForkedWorkers):
            self._launcher.check()

    def gather(self, found: Found) -> list[Found]:
        """What each worker gives, by rank: for small things."""
        if self.size == 1:
            return [found]
        gathered: list[Any] = [None] * self.size
        distributed.all_gather_object(gathered, found)
        return gathered

    def add_up(self, sums: Sums) -> None:
        """Make ``sums`` those of all workers together, in one collective over one flat buffer."""
        if self.size == 1:
            return
        layout: Layout = {}
        exponents: set[int] = set()
        for theirs, used in self.gather((sums.layout, sorted(sums.exact.bins))):
            layout, exponents = merged(layout, theirs), exponents | set(used)
        sums.arrange(layout)
        order = sorted(exponents)
        buffer = sums.exact.buffer(order).cpu()
        distributed.all_reduce(buffer)
        sums.load(order, buffer)

    def move(self, memories: Memories, moves: list[tuple[int, int, int]]) -> None:
        """Hand clients' memories over: each move is (client, from, to), in the same order for all workers."""
        for k, giver, taker in moves:
            if self.rank == giver:
                packed = memories.pack(k)
                distributed.send(torch.tensor([len(packed)]), taker)
                if len(packed):
                    distributed.send(packed, taker)
            elif self.rank == taker:
                memories.unpack(k, receive(giver))


def receive(giver: int) -> Tensor:
    """Bytes ``(n,)`` from another worker."""
    size = torch.zeros(1, dtype=torch.int64)
    distributed.recv(size, giver)
    packed = torch.empty(int(size), dtype=torch.uint8)
    if len(packed):
        distributed.recv(packed, giver)
    return packed


def place(steps: Mapping[int, int], size: int, holders: Mapping[int, int]) -> list[list[int]]:
    """The clients of each worker, longest first.

    Each goes to the worker that has the fewest steps so far, or, as long as that has no more than its share, to the one
    that holds its memory.

    Args:
        steps: expected local steps of each client.
        size: number of workers.
        holders: worker that holds a client's memory.
    """
    placed: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    share = -(-sum(steps.values()) // size)
    for k in sorted(steps, key=lambda k: (-steps[k], k)):
        holder = holders.get(k, size)
        fits = holder < size and loads[holder] + steps[k] <= share
        worker = holder if fits else min(range(size), key=loads.__getitem__)
        placed[worker].append(k)
        loads[worker] += steps[k]
    return placed


class Stopwatch:
    """Seconds by phase: each lap is the time since the last one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


class Failures:
    """The clients that failed in a round, on any worker."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[bool, str]] = {}
        self._errors: dict[int, Exception] = {}

    def add(self, k: int, error: Exception) -> None:
        self.found[k] = (isinstance(error, UsageError), str(error))
        self._errors[k] = error

    def take(self, theirs: dict[int, tuple[bool, str]]) -> None:
        """Take in what another worker found."""
        self.found = dict(sorted((self.found | theirs).items()))

    def texts(self) -> list[str]:
        return [text for _, text in self.found.values()]

    def throw(self) -> NoReturn:
        """Raise the error of the first client of all: with its cause where it failed here."""
        k, (usage, text) = next(iter(self.found.items()))
        raise self._errors.get(k) or (UsageError(text) if usage else ClientError(text))
