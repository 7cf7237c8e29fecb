"""The versions of the global state from which the clients of an asynchronous run train."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from fl_lightning.client.worker_module import WorkerModule
from fl_lightning.core.clock import ServerStep
from fl_lightning.core.method import MethodList
from fl_lightning.core.server import Server
from fl_lightning.core.state import State, clone, select
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import require


class Version(NamedTuple):
    """What a client received: the entries that travel, and the server values of the methods that travel, in order."""

    state: State
    values: list[Any]


class Versions:
    """The steps of an asynchronous server, and the versions of the global state that its clients have received.

    Version v is what a client receives at the start of round v. It is kept while a client trains from it. In a
    synchronous run all clients of a round receive the present version, and none is kept.

    Args:
        server: the server.
        methods: the methods of the run.
        worker_module: the user's module in this process, from whose progress each visit begins.

    Attributes:
        schedule: gives the server steps; None in a synchronous run.
    """

    def __init__(self, server: Server, methods: MethodList, worker_module: WorkerModule) -> None:
        self.server, self.methods, self._worker_module = server, methods, worker_module
        self.kept: dict[int, Version] = {}
        self.schedule: Iterator[ServerStep] | None = None
        self._steps: list[ServerStep] = []
        # of the present cohort, by client
        self._received: dict[int, int] = {}

    def step(self, round_: int) -> ServerStep:
        """Return the server step of a round."""
        assert self.schedule is not None
        while len(self._steps) <= round_:
            self._steps.append(next(self.schedule))
        return self._steps[round_]

    def needed(self, round_: int) -> set[int]:
        """Return the versions that visits need in a round, unless only its own visits need its version."""
        step = self.step(round_)
        older = (visit.version for visit in step.visits if visit.version < round_)
        return {*step.in_flight, *older}

    def most_kept(self, rounds: Iterable[int]) -> int:
        """Return the largest number of versions that are kept in one of these rounds."""
        if self.schedule is None:
            return 0
        return max((len(self.needed(round_)) for round_ in rounds), default=0)

    def begin_round(self, round_: int, names: Iterable[str]) -> None:
        """Drop versions that no visit needs any more, and keep the entries of the present one that a later round needs.

        Raises:
            UsageError: a version is missing, since the run had another schedule before it was resumed.
        """
        if self.schedule is None:
            return
        step, required_versions = self.step(round_), self.needed(round_)
        older = required_versions - {round_}
        self._received = {visit.client: visit.version for visit in step.visits}
        missing, hint = sorted(older - self.kept.keys()), "the checkpoint has another schedule; begin a new run"
        require(not missing, "trainer.asynchronous: versions", missing, hint)
        self.kept = {version: self.kept[version] for version in sorted(older)}
        if round_ in required_versions:
            values = copy.deepcopy(self.methods.sent_values())
            self.kept[round_] = Version(clone(select(self.server.state, names)), values)

    def received_by(self, k: int) -> int:
        """Return the version that a client of the present round has received."""
        return self._received.get(k, self.server.round)

    @contextmanager
    def receiving(self, k: int) -> Iterator[State]:
        """In this block client hooks have the server values that client ``k`` has received; gives the global state."""
        version = self.received_by(k)
        if version == self.server.round:
            yield self.server.state
            return
        state, values = self.kept[version]
        staleness = self.server.round - version
        with patched(self._worker_module.fit_progress, staleness=staleness), self.methods.with_sent_values(values):
            yield {**self.server.state, **state}

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """The kept versions."""
        return {number: version._asdict() for number, version in self.kept.items()}

    def load_state_dict(self, state: dict[int, dict[str, Any]], device: torch.device) -> None:
        """Restore what :meth:`state_dict` gave, on the device of the run."""
        on_device = move_data_to_device(state, device)
        self.kept = {number: Version(**parts) for number, parts in on_device.items()}
