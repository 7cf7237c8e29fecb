"""Which workers are there: who has not joined, who has fallen silent, who is late."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.errors import LostWorkerError, UsageError

# seconds: between two signs of life (three that are missing are told); of a wait, before it is told who is waited for;
# of silence, after which a worker is lost; in which all workers must join
BEAT, PATIENCE, SILENCE, JOIN = 10.0, 60.0, 300.0, 300.0
# seconds between two looks around while a worker waits
LOOK = 1.0


class Sign(NamedTuple):
    """A sign of life: its number, and the collectives that the worker has called."""

    number: int
    calls: int


class SignsInStore:
    """Signs in a store, for workers of several machines."""

    def __init__(self, store: Any, size: int) -> None:
        self._store, self._size = store, size

    def leave(self, rank: int, sign: Sign) -> None:
        """Leave a sign in the place of the last one."""
        self._store.set(str(rank), f"{sign.number} {sign.calls}")

    def read(self) -> list[Sign]:
        """The last sign of each worker, by rank."""
        texts = self._store.multi_get([str(rank) for rank in range(self._size)])
        return [Sign(*map(int, text.split())) for text in texts]


class SignsInFile:
    """Signs in a file, for workers of one machine; it does not grow, and needs its name no more once it is open."""

    NUMBERS = struct.Struct("=qq")

    def __init__(self, path: Path, size: int) -> None:
        path.touch()
        self._file, self._size = path.open("r+b", buffering=0), size * self.NUMBERS.size

    def leave(self, rank: int, sign: Sign) -> None:
        """Leave a sign in the place of the last one."""
        self._file.seek(rank * self.NUMBERS.size)
        self._file.write(self.NUMBERS.pack(*sign))

    def read(self) -> list[Sign]:
        """The last sign of each worker, by rank."""
        self._file.seek(0)
        packed = self._file.read(self._size).ljust(self._size, b"\0")
        return [Sign(*numbers) for numbers in self.NUMBERS.iter_unpack(packed)]


class Presence:
    """Leaves signs of life of this worker, and reads those of the others while this worker waits.

    A worker whose signs stop has ended without closing its connections, is stopped or cannot be reached, and is lost.
    One that is late but alive trains longer than the others, and is waited for.

    Args:
        store: part of the store in which all workers leave their names, until they have joined.
        signs: where they leave their signs of life.
        rank: rank of this worker.
        size: number of workers.
        per_node: workers of each machine.

    Attributes:
        calls: collectives that this worker has called.
        where: how far the run has come, for messages.
    """

    def __init__(self, store: Any, signs: SignsInStore | SignsInFile, rank: int, size: int, per_node: int) -> None:
        self.rank, self.size, self.per_node, self.calls = rank, size, per_node, 0
        self.where = ""
        self._store = store
        self._names: dict[int, str] = {}
        self._place, self._signs = signs, [Sign(0, 0)] * size
        self._last, self._looks, self._quiet = self._signs, 0, [0] * size
        self._patience, self._waits, self._told = PATIENCE, False, False
        self._ended = threading.Event()

    def join(self, check: Callable[[], None]) -> None:
        """Wait until all workers have joined, and begin to leave signs of life.

        Args:
            check: called every second; raises where there is no point in waiting.

        Raises:
            UsageError: some have not come in time.
        """
        self._store.set(f"name/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        began, warnings_so_far, pause = time.monotonic(), 0, 0.001
        while missing := [rank for rank in range(self.size) if not self._store.check([f"name/{rank}"])]:
            waited = time.monotonic() - began
            if waited >= JOIN:
                raise UsageError(f"{self._list(missing)} of {self.size} did not join within {JOIN:.0f} s: {START}")
            if waited // PATIENCE > warnings_so_far:
                warnings_so_far = int(waited // PATIENCE)
                warnings.warn(f"waiting for {self._list(missing)} of {self.size}, since {waited:.0f} s", stacklevel=2)
            check()
            time.sleep(pause)  # not the store's own wait, which would warn of each second
            pause = min(2 * pause, LOOK)
        names = self._store.multi_get([f"name/{rank}" for rank in range(self.size)])
        self._names = {rank: f"worker {rank} ({name.decode()})" for rank, name in enumerate(names)}
        self._place.leave(self.rank, Sign(0, self.calls))
        threading.Thread(target=self._beat, daemon=True).start()

    def leave(self) -> None:
        """End the signs of life."""
        self._ended.set()

    def wait(self, ended: Callable[[float], bool], check: Callable[[], None]) -> None:
        """Wait until ``ended(seconds)`` is true, which waits that long itself.

        Args:
            ended: whether the wait is over.
            check: called every second; raises where there is no point in waiting.

        Raises:
            LostWorkerError: a worker has been silent for too long.
        """
        self._looks, self._quiet, self._told, self._waits = 0, [0] * self.size, False, True
        try:
            while not ended(LOOK):
                check()
                self._look()
        finally:
            self._waits = False

    def _look(self) -> None:
        """Look at the signs of the others. Time is counted in looks: this process may have been stopped itself."""
        signs, self._looks = self._signs, self._looks + 1
        for rank, (new, old) in enumerate(zip(signs, self._last, strict=True)):
            self._quiet[rank] = 0 if new.number > old.number else self._quiet[rank] + 1
        self._last = signs
        # the signs may be in worker 0, or in the launcher of its machine: without it, not even our own is seen
        own = self._is_silent(self.rank)
        late = [rank for rank, sign in enumerate(signs) if sign.calls < self.calls and rank != self.rank]
        missing = [0] if own else late
        silent = [rank for rank in missing if self._is_silent(rank)]
        lost = [rank for rank in silent if self._quiet[rank] * LOOK >= SILENCE]
        if lost:
            text = f"{self.where}no sign of life of {self._list(lost)} for {SILENCE:.0f} s: the run cannot go on"
            raise LostWorkerError(text, worker=lost[0])
        self._tell(missing, silent)

    def _is_silent(self, rank: int) -> bool:
        return self._quiet[rank] * LOOK >= 3 * BEAT

    def _tell(self, missing: list[int], silent: list[int]) -> None:
        """Say who is waited for: once a wait if someone is silent; else ever more rarely, since clients differ."""
        present = [rank for rank in range(self.size) if rank not in missing]
        waited = self._looks * LOOK
        if not missing or present[:1] != [self.rank]:
            return  # another one says so
        if silent and not self._told:
            self._told = True
            hint = f"stopped, or its machine is not reached; the run ends after {SILENCE:.0f} s of silence"
            warnings.warn(
                f"{self.where}no sign of life of {self._list(silent)} for {3 * BEAT:.0f} s: {hint}", stacklevel=2
            )
        elif waited >= self._patience:
            self._patience *= 2
            hint = "no sign of life" if silent else "alive, and still busy"
            since = f"{waited:.0f} s: {hint}"
            warnings.warn(f"{self.where}waiting for {self._list(missing)}, since {since}", stacklevel=2)

    def _beat(self) -> None:
        number = 0
        while not self._ended.wait(BEAT):
            number += 1
            # without a connection nothing is written or read, which is how it is noticed
            with suppress(RuntimeError, OSError):
                self._place.leave(self.rank, Sign(number, self.calls))
                if self._waits:
                    self._signs = self._place.read()

    def _list(self, ranks: list[int]) -> str:
        return ", ".join(self._names.get(rank, f"worker {rank} (node {rank // self.per_node})") for rank in ranks)


START = "start the program on every node, with the same MASTER_ADDR and MASTER_PORT"
