"""The collectives of the worker processes, and the schedule that assigns clients to them."""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.distributed.launcher import ForkLauncher, refuse_default_group
from fl_lightning.distributed.rendezvous import NEVER, checked
from fl_lightning.distributed.signals import Signals
from fl_lightning.storage.atomic_io import UNSAFE
from fl_lightning.storage.serializable import packed, unpacked
from fl_lightning.utilities.errors import LostWorkerError, UsageError, require

Gathered = TypeVar("Gathered")
# bytes of the first message of a gather; larger values need a second one
ROOM = 4096
# seconds between two checks while a worker waits
LOOK = 1.0
# seconds to wait for the reason after a connection breaks: a signal, or another worker's status. A forked worker waits
# longer, since the process that has forked it knows more
REASON, REASON_OF_FORKED = 2.0, 60.0


class Workers:
    """Collectives over the workers of a run; every worker must call each of them.

    ``rank`` and ``size`` are 0 and 1 within :meth:`local_only`. A collective waits for the others up to ``timeout``
    seconds; None sets no limit. Workers of several machines exchange tensors, arrays, plain values and the types
    ``messages``.
    """

    def __init__(self, fabric: Fabric, timeout: float | None = None, messages: tuple[type, ...] = ()) -> None:
        self.rank, self.size, self.local_rank = fabric.global_rank, fabric.world_size, fabric.local_rank
        self._size, self._timeout = self.size, NEVER.total_seconds() if timeout is None else timeout
        self._messages: tuple[type, ...] = (type(Path()), signal.Signals, *messages)
        self._strategy = cast(Any, fabric.strategy)
        # cached, since reading the environment takes longer than a gather
        self._is_private = self._size > 1 and bool(self._strategy.is_private)
        launcher = fabric.strategy.launcher
        self._launcher = launcher if isinstance(launcher, ForkLauncher) else None
        self._calls, self._waits, self._where, self._hook = 0, False, "", ""
        self.signals = Signals(speaks=self.rank == 0)

    @contextmanager
    def local_only(self, local: bool = True) -> Iterator[None]:
        """Restrict collectives in this block to this worker, so that they do not wait; no effect if False."""
        before = self.rank, self.size
        if local:
            self.rank, self.size = 0, 1
        try:
            yield
        finally:
            self.rank, self.size = before

    def begin(self, round_: int) -> None:
        """Begin a round, which errors about lost workers then name."""
        refuse_default_group(self._size)
        self._where = f"round {round_}: "

    def check(self) -> None:
        """Raise Stopped if a signal abandons the round, and a LostWorkerError if a forked worker has ended."""
        if self.signals.caught is not None and not self.signals.keeps_round:
            raise self.signals.stopped()
        if self._launcher is not None:
            try:
                self._launcher.check()
            except LostWorkerError as error:
                self.signals.adopt(error.status)
                raise LostWorkerError(f"{self._where}{error}", error.worker, error.status) from None

    def barrier(self) -> None:
        """Wait until all workers have called this."""
        if self.size > 1:
            self._finish(self._group.barrier())

    @contextmanager
    def within(self, hook: str) -> Iterator[None]:
        """In this block errors of :meth:`gather` name the ``hook`` of a callback."""
        outer, self._hook = self._hook, f" in {hook}"
        try:
            yield
        finally:
            self._hook = outer

    def gather(self, value: Gathered, label: str) -> list[Gathered]:
        """Return the small value of each worker, by rank; all workers must call this with the same label.

        Otherwise a gather on one worker only would receive the values of the others' next gather.
        """
        if self.size == 1:
            return [value]
        place, messages = f"{label}{self._hook}", list[Any]()
        if self._is_private:
            messages += map(pickle.loads, self._gather_bytes(pickle.dumps((place, value))))
        else:
            for rank, contents in enumerate(self._gather_bytes(packed((place, value)).numpy().tobytes())):
                try:
                    messages.append(unpacked(contents, self._messages))
                except Exception as error:  # torch raises errors of many types
                    unsafe = UNSAFE.search(str(error))
                    hint = "workers of several machines exchange only tensors, arrays and plain values"
                    kind = unsafe[1] if unsafe else "value of another kind"
                    raise UsageError(f"{place}: a {kind} of worker {rank}: {hint}") from error
        places, values = zip(*messages, strict=True)
        if len(set(places)) > 1:
            where = "; ".join(f"worker {rank} in {place}" for rank, place in enumerate(places))
            hint = "all workers must call gather, all_reduce, evaluate and representations in the same order"
            raise UsageError(f"the workers wait for each other in different collectives: {where}; {hint}")
        return list(values)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up a CPU tensor over the workers, in place."""
        if self.size > 1:
            self._finish(self._group.allreduce([tensor]))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the CPU tensor of each worker, all of one shape and type, by rank."""
        if self.size == 1 or not tensor.numel():
            return [tensor] * self.size
        parts = self._all_gather(tensor.contiguous().view(-1).view(torch.uint8))
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

    def send(self, contents: Tensor, rank: int) -> None:
        """Send bytes ``(n,)`` to another worker, which calls :meth:`receive`."""
        for tensor in (torch.tensor([len(contents)]), contents):
            if len(tensor):
                self._pass(self._group.send([tensor], rank, 0))

    def receive(self, rank: int) -> Tensor:
        """Receive bytes ``(n,)`` from another worker."""
        size = torch.zeros(1, dtype=torch.int64)
        self._pass(self._group.recv([size], rank, 0))
        contents = torch.empty(int(size), dtype=torch.uint8)
        if len(contents):
            self._pass(self._group.recv([contents], rank, 0))
        return contents

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Disconnect from the other workers, and wait for them unless an error occurred."""
        try:
            if self._size > 1:
                # closing a connection at once can lose data that others have not read yet
                with suppress(RuntimeError):
                    if kind is None:
                        self.barrier()
                self._strategy.leave(self._waits)
        finally:
            self.signals.restore()

    @property
    def _group(self) -> Any:
        hint = "the run and its other workers have ended; call this during the run"
        require(self._strategy.group is not None, "trainer.world_size", self._size, hint)
        return self._strategy.group

    def _gather_bytes(self, contents: bytes) -> list[bytes]:
        """Gather the bytes of each worker, by rank."""
        parts = self._all_gather(padded(len(contents).to_bytes(8, "little") + contents[: ROOM - 8], ROOM))
        sizes = [int.from_bytes(part[:8].numpy().tobytes(), "little") for part in parts]
        if max(sizes) <= ROOM - 8:
            parts = [part[8:] for part in parts]
        else:
            parts = self._all_gather(padded(contents, max(sizes)))
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather tensors of one shape, by rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._finish(self._group.allgather([parts], [tensor]))
        return parts

    def _finish(self, work: Any) -> None:
        """Wait until a collective is done, with checks meanwhile: torch's own wait blocks signals."""
        self._calls, looks = self._calls + 1, 0
        try:
            while not completes_within(work, LOOK):
                self._waits, looks = True, looks + 1
                if looks == 1:
                    self._mark()
                self.check()
                # counts checks, not seconds, since this process may have been stopped; before the first one, the others
                # leave their marks
                if (looks - 1) * LOOK >= self._timeout:
                    hint = f"missing after trainer.timeout={self._timeout:g} seconds"
                    raise LostWorkerError(f"{self._where}{self._list_missing()} {hint}")
            self._waits = False
        except LostWorkerError:
            raise
        except RuntimeError as error:
            self._fail(error)

    def _pass(self, work: Any) -> None:
        """Wait until a tensor is sent to, or received from, another worker."""
        try:
            # after a timeout, torch cannot wait again
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: RuntimeError) -> NoReturn:
        """Raise the reason for a broken connection: Stopped if all workers got a signal, else a LostWorkerError."""
        self.signals.keeps_round = self._waits = False
        forked = self._launcher is not None and self._launcher.forked
        end = time.monotonic() + (REASON_OF_FORKED if forked else REASON)
        self._mark()
        while time.monotonic() < end:
            self.check()
            time.sleep(0.02)
        text = f"lost; it has ended or has called another collective: {str(error).splitlines()[0]}"
        raise LostWorkerError(f"{self._where}{self._list_missing()} {text}") from None

    def _mark(self) -> None:
        """Mark in the store that this worker waits in its current collective."""
        with suppress(RuntimeError):
            self._strategy.store.set(f"waits/{self.rank}", str(self._calls))

    def _list_missing(self) -> str:
        """List the workers without a mark in this collective; worker 0 if the store does not answer."""
        store, calls = self._strategy.store, self._calls

        def read() -> list[int]:
            missing = []
            for rank in range(self._size):
                mark = f"waits/{rank}"
                if not store.check([mark]) or int(store.get(mark)) < calls:
                    missing.append(rank)
            return missing

        try:
            # a store whose process is stopped never answers
            missing = checked(read, lambda: None, REASON)
        except RuntimeError:
            missing = [0]
        return ", ".join(f"worker {rank}" for rank in missing) or "a connection"


def completes_within(work: Any, seconds: float) -> bool:
    """Return whether a collective ends within some seconds; raise a RuntimeError if it fails."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # has ended meanwhile; raises its error
    return True


def padded(contents: bytes, size: int) -> Tensor:
    """Return the bytes, padded with zeros, as ``(size,)``."""
    return torch.frombuffer(bytearray(contents.ljust(size, b"\0")), dtype=torch.uint8)


def schedule(steps: Mapping[int, float], size: int, owners: Mapping[int, int]) -> list[list[int]]:
    """Assign clients with these expected steps to workers, longest first; returns the clients of each, by rank.

    A client is assigned to the owner of its memory if that worker does not exceed its share of the steps; else to the
    worker with the fewest steps so far.
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
