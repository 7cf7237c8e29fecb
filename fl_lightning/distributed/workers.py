"""The worker processes of a run: their collectives, and which of them trains which client."""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.distributed.launcher import ForkLauncher, refuse_default_group
from fl_lightning.distributed.rendezvous import NEVER, checked
from fl_lightning.distributed.signals import Signals
from fl_lightning.errors import LostWorkerError, UsageError, require
from fl_lightning.records.plain import packed, unpacked
from fl_lightning.storage.atomic_io import UNSAFE

Gathered = TypeVar("Gathered")
# bytes of the first message of a gather; most values fit into it, and need no second one
ROOM = 4096
# seconds between two looks around while a worker waits
LOOK = 1.0
# seconds between the end of a connection and the reason: a signal to this worker, or another worker's status. A forked
# worker waits longer, for the process that has forked it, which knows more
REASON, REASON_OF_FORKED = 2.0, 60.0


class Workers:
    """The workers of a run, as one of them sees them. Every worker must call each collective.

    ``rank`` and ``size`` are 0 and 1 within :meth:`local_only`. A collective waits for the others ``timeout`` seconds,
    as long as it takes for None. Workers of several machines exchange tensors, arrays, plain values and ``messages``.
    """

    def __init__(self, fabric: Fabric, timeout: float | None = None, messages: tuple[type, ...] = ()) -> None:
        self.rank, self.size, self.local_rank = fabric.global_rank, fabric.world_size, fabric.local_rank
        self._size, self._timeout = self.size, NEVER.total_seconds() if timeout is None else timeout
        self._messages: tuple[type, ...] = (type(Path()), signal.Signals, *messages)
        self._strategy = cast(Any, fabric.strategy)
        # asked once, since the answer is in the environment, which takes longer to read than a gather
        self._is_private = self._size > 1 and bool(self._strategy.is_private)
        launcher = fabric.strategy.launcher
        self._launcher = launcher if isinstance(launcher, ForkLauncher) else None
        self._calls, self._waits, self._where = 0, False, ""
        self.signals = Signals(speaks=self.rank == 0)

    @contextmanager
    def local_only(self, local: bool = True) -> Iterator[None]:
        """In this block collectives concern this worker alone, and wait for no other; without effect if False."""
        before = self.rank, self.size
        if local:
            self.rank, self.size = 0, 1
        try:
            yield
        finally:
            self.rank, self.size = before

    def begin(self, round_: int) -> None:
        """Begin a round, which the error about a lost worker then names."""
        refuse_default_group(self._size)
        self._where = f"round {round_}: "

    def check(self) -> None:
        """Raise Stopped where a signal gives the round up, and a LostWorkerError where a forked worker has ended."""
        self.signals.check()
        if self._launcher is not None:
            try:
                self._launcher.check()
            except LostWorkerError as error:
                self.signals.adopt(error.status)
                raise LostWorkerError(f"{self._where}{error}", error.worker, error.status) from None

    def barrier(self) -> None:
        """Wait until all workers are here."""
        if self.size > 1:
            self._finish(self._group.barrier())

    def gather(self, value: Gathered) -> list[Gathered]:
        """The value of each worker, by rank, all called from the same functions; meant for small values."""
        if self.size == 1:
            return [value]
        # one that a worker alone calls would receive the values of the others' next one
        place, messages = callers(), list[Any]()
        if self._is_private:
            messages += map(pickle.loads, self._gather_bytes(pickle.dumps((place, value))))
        else:
            for rank, contents in enumerate(self._gather_bytes(packed((place, value)).numpy().tobytes())):
                try:
                    messages.append(unpacked(contents, self._messages))
                except Exception as error:  # whatever torch raises for what it cannot read
                    unsafe = UNSAFE.search(str(error))
                    hint = "workers of several machines exchange tensors, arrays and plain values alone"
                    what = f"a {unsafe[1] if unsafe else 'value of another kind'} of worker {rank}"
                    raise UsageError(f"{place}: {what}: {hint}") from error
        places, values = zip(*messages, strict=True)
        if len(set(places)) > 1:
            where = "; ".join(f"worker {rank} in {place}" for rank, place in enumerate(places))
            hint = "all workers call gather, all_reduce, evaluate and representations, in the same order"
            raise UsageError(f"the workers wait for each other in different places: {where}; {hint}")
        return list(values)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up a CPU tensor over the workers, in place."""
        if self.size > 1:
            self._finish(self._group.allreduce([tensor]))

    def send(self, contents: Tensor, rank: int) -> None:
        """Send bytes ``(n,)`` to another worker, which calls :meth:`receive`."""
        for tensor in (torch.tensor([len(contents)]), contents):
            if len(tensor):
                self._pass(self._group.send([tensor], rank, 0))

    def receive(self, rank: int) -> Tensor:
        """Bytes ``(n,)`` from another worker."""
        size = torch.zeros(1, dtype=torch.int64)
        self._pass(self._group.recv([size], rank, 0))
        contents = torch.empty(int(size), dtype=torch.uint8)
        if len(contents):
            self._pass(self._group.recv([contents], rank, 0))
        return contents

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Part from the other workers; after an error without waiting for them, who may never come."""
        try:
            if self._size > 1:
                # a connection that is closed at once can lose what the others have not read yet
                with suppress(RuntimeError):
                    if kind is None:
                        self.barrier()
                self._strategy.leave(self._waits)
        finally:
            self.signals.restore()

    @property
    def _group(self) -> Any:
        hint = "the run has ended, and the other workers with it; ask during the run"
        require(self._strategy.group is not None, "trainer.world_size", self._size, hint)
        return self._strategy.group

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of each worker, by rank."""
        parts = self._all_gather(padded(len(mine).to_bytes(8, "little") + mine[: ROOM - 8], ROOM))
        sizes = [int.from_bytes(part[:8].numpy().tobytes(), "little") for part in parts]
        longest = max(sizes)
        parts = [part[8:] for part in parts] if longest <= ROOM - 8 else self._all_gather(padded(mine, longest))
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of one shape, of each worker, by rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._finish(self._group.allgather([parts], [tensor]))
        return parts

    def _finish(self, work: Any) -> None:
        """Wait until a collective is done, and look around meanwhile: torch's own wait lets no signal through."""
        self._calls, looks = self._calls + 1, 0
        try:
            while not ended(work, LOOK):
                self._waits, looks = True, looks + 1
                if looks == 1:
                    self._mark()
                self.check()
                # counted in looks: this process may have been stopped. The first one is for the others to leave a mark
                if (looks - 1) * LOOK >= self._timeout:
                    hint = f"missing after trainer.timeout={self._timeout:g} seconds"
                    raise LostWorkerError(f"{self._where}{self._list_missing()} {hint}")
            self._waits = False
        except LostWorkerError:
            raise
        except RuntimeError as error:
            self._fail(error)

    def _pass(self, work: Any) -> None:
        """Wait until a tensor is sent to, or received from, another worker, which is at the same place."""
        try:
            # one that is not done in time cannot be waited for again
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: RuntimeError) -> NoReturn:
        """Say why a connection broke: by Stopped where a signal came to all, else by a LostWorkerError."""
        self.signals.keeps_round = self._waits = False
        forked = self._launcher is not None and self._launcher.forked
        end = time.monotonic() + (REASON_OF_FORKED if forked else REASON)
        self._mark()
        while time.monotonic() < end:
            self.check()
            time.sleep(0.02)
        text = f"lost; it has ended, or has called another collective: {str(error).splitlines()[0]}"
        raise LostWorkerError(f"{self._where}{self._list_missing()} {text}") from None

    def _mark(self) -> None:
        """Leave a mark in the store: this worker waits in its present collective."""
        with suppress(RuntimeError):
            self._strategy.store.set(f"waits/{self.rank}", str(self._calls))

    def _list_missing(self) -> str:
        """The workers that have left no mark in this collective; worker 0 where it does not even answer."""
        store, calls = self._strategy.store, self._calls

        def read() -> list[int]:
            marks = {rank: f"waits/{rank}" for rank in range(self._size)}
            return [r for r, key in marks.items() if not store.check([key]) or int(store.get(key)) < calls]

        try:
            # a store whose process is stopped lets its clients wait for ever
            missing = checked(read, lambda: None, REASON)
        except RuntimeError:
            missing = [0]
        return ", ".join(f"worker {rank}" for rank in missing) or "a connection"


def ended(work: Any, seconds: float) -> bool:
    """Whether a collective ends within some seconds; raises a RuntimeError where it fails."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has ended meanwhile; raises what failed
    return True


def padded(contents: bytes, size: int) -> Tensor:
    """The bytes and zeros after them, ``(size,)``."""
    return torch.frombuffer(bytearray(contents.ljust(size, b"\0")), dtype=torch.uint8)


def callers() -> str:
    """Names of the functions that have called the caller of this one, innermost first, up to the work of a worker."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_work":
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return " < ".join(names)


def schedule(steps: Mapping[int, float], size: int, owners: Mapping[int, int]) -> list[list[int]]:
    """Place clients with these expected steps on workers: the clients of each, by rank; the longest first.

    A client goes to the owner of its memory, as long as that worker has no more than its share of the steps; else to
    the worker with the fewest steps so far.
    """
    placed: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    share = -(-sum(steps.values()) // size)
    for k in sorted(steps, key=lambda k: (-steps[k], k)):
        owner = owners.get(k, size)
        fits = owner < size and loads[owner] + steps[k] <= share
        worker = owner if fits else min(range(size), key=loads.__getitem__)
        placed[worker].append(k)
        loads[worker] += steps[k]
    return placed
