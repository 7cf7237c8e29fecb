"""What clients keep between rounds: in memory up to a limit, beyond it on disk."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from fl_lightning.state import num_bytes

Memory = dict[str, dict[str, Any]]


class Memories(Mapping[int, Memory]):
    """Each client's memory by its id: tensors and plain values by method.

    Beyond ``limit`` the clients that were not visited for the longest time lie on disk, each in a file that is whole or
    not there; they come back memory-mapped.

    Args:
        limit: bytes of tensors held in memory, at least 0.
        device: where a client's memory lies while it is visited; between visits it lies in main memory.

    Attributes:
        changed: clients visited since the last checkpoint.
    """

    def __init__(self, limit: float = float("inf"), device: torch.device | str = "cpu") -> None:
        self.limit, self.device = limit, torch.device(device)
        self._held: OrderedDict[int, Memory] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._files: dict[int, Path] = {}
        self._folder: Path | None = None
        self.changed: set[int] = set()

    def __getitem__(self, k: int) -> Memory:
        """The memory of client ``k``; reading it does not bring it back from disk for good."""
        return self._held[k] if k in self._held else load(self._files[k])

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._held, *self._files}))

    def __len__(self) -> int:
        return len(self._held.keys() | self._files.keys())

    def visited(self, k: int) -> Memory:
        """The memory of client ``k`` for a visit, which may change it; new where it has none."""
        if k not in self._held:
            found = load(self._files[k]) if k in self._files else {}
            self._held[k] = self._moved(found, self.device)
        return self._held[k]

    def settle(self, k: int) -> None:
        """The visit of client ``k`` is over: count what it holds now, and make room."""
        if k not in self._held:
            return
        if not any(self._held[k].values()):
            del self._held[k]
            return
        self.changed.add(k)
        self._settle(k)

    def _settle(self, k: int) -> None:
        self._held[k] = self._moved(self._held[k], torch.device("cpu"))
        self._held.move_to_end(k)
        self._count(k, num_bytes(self._held[k]))
        self._forget_file(k)
        while self._held and self._total > self.limit:
            self._spill(next(iter(self._held)))

    def pack(self, k: int) -> Tensor:
        """Take the memory of client ``k`` out, as bytes ``(n,)``; none where it has none."""
        if k not in self:
            return torch.empty(0, dtype=torch.uint8)
        buffer = io.BytesIO()
        torch.save((self[k], k in self.changed), buffer)
        self.changed.discard(k)
        self._held.pop(k, None)
        self._count(k, 0)
        self._forget_file(k)
        return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)

    def unpack(self, k: int, packed: Tensor) -> None:
        """Take in what :meth:`pack` gave."""
        if len(packed):
            self._held[k], changed = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
            self.changed |= {k} if changed else set()
            self._settle(k)

    def take_file(self, k: int, path: Path) -> None:
        """Let the memory of client ``k`` be what the file of a checkpoint holds; the file stays the checkpoint's."""
        self._files[k] = path

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _moved(self, found: Memory, device: torch.device) -> Memory:
        return found if self.device.type == "cpu" else move_data_to_device(found, device)

    def _spill(self, k: int) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fl_lightning-clients-"))
        path = self._folder / f"{k}.pt"
        save(self._held.pop(k), path)
        self._files[k] = path
        self._count(k, 0)

    def _count(self, k: int, size: int) -> None:
        """Client ``k`` now holds ``size`` bytes in memory."""
        # a total beside the sizes: adding them up anew would make a round quadratic in its clients
        self._total += size - self._sizes.pop(k, 0)
        self._sizes |= {k: size} if size else {}

    def _forget_file(self, k: int) -> None:
        path = self._files.pop(k, None)
        if path is not None and path.parent == self._folder:
            path.unlink(missing_ok=True)  # a memory-mapped tensor outlives the name of its file


def save(found: dict[Any, Any], path: Path) -> None:
    """Write tensors and plain values, with the folder where it is missing; a crash leaves no half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(found, partial)
    os.replace(partial, path)


def load(path: Path) -> Memory:
    """A client's memory from its file; its tensors are read where they are used."""
    return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
