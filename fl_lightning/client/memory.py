"""What clients keep between rounds: in main memory up to a limit, beyond it on disk."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from fl_lightning.records.files import load, save
from fl_lightning.records.temporary import TemporaryFolder
from fl_lightning.state import num_bytes

if TYPE_CHECKING:
    from fl_lightning.engine.workers import Workers

Memory = dict[str, dict[str, Any]]


class Memories(Mapping[int, Memory]):
    """The memories of the clients that this worker owns, by id.

    A client's memory holds tensors and plain values by method and, as ``state``, the entries of the state that do not
    travel. Beyond ``limit``, the memories of the clients whose last visit is the longest ago lie on disk, each in a
    file of its own that is written atomically and read back memory-mapped.

    Args:
        limit: bytes of tensors held in main memory, at least 0.
        device: where a client's memory lies while it is visited; between visits it lies in main memory.

    Attributes:
        owners: owner rank of each client that remembers something, the same on all workers.
        files: name of each client's file in the last checkpoint, the same on all workers.
    """

    def __init__(self, limit: float = float("inf"), device: torch.device | str = "cpu") -> None:
        self.limit, self.device = limit, torch.device(device)
        self.owners: dict[int, int] = {}
        self.files: dict[int, str] = {}
        self._held: OrderedDict[int, Memory] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._on_disk: dict[int, Path] = {}
        self._scratch: TemporaryFolder | None = None
        self._folder: Path | None = None
        self._changed: set[int] = set()
        self._replaced: list[str] = []

    def __getitem__(self, k: int) -> Memory:
        """The memory of client ``k``, to read; one that lies on disk stays there."""
        return self._held[k] if k in self._held else load(self._on_disk[k])

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._held, *self._on_disk}))

    def __len__(self) -> int:
        return len(self._held.keys() | self._on_disk.keys())

    # ------------------------------------------------------------------ a visit
    def visited(self, k: int) -> Memory:
        """The memory of client ``k`` during its visit, to read and to change; an empty one if it has none yet."""
        if k not in self._held:
            memory = load(self._on_disk[k]) if k in self._on_disk else {}
            self._held[k] = self._moved(memory, self.device)
        return self._held[k]

    def settle(self, k: int) -> None:
        """End the visit of client ``k``: count what its memory holds now, and keep to :attr:`limit`."""
        if k not in self._held:
            return
        if not any(self._held[k].values()):
            del self._held[k]
            return
        self._changed.add(k)
        self._settle(k)

    # ------------------------------------------------------------------ several workers
    def owned(self, clients: Collection[int]) -> set[int]:
        """The clients among ``clients`` whose memory lies here."""
        return self.keys() & set(clients)

    def note_owners(self, owned: list[set[int]]) -> None:
        """Record the owners: ``owned`` holds the clients that each worker owns, by rank."""
        self.owners |= {k: rank for rank, clients in enumerate(owned) for k in clients}

    def follow(self, placed: list[list[int]], workers: Workers) -> None:
        """Send memories to the workers on which their clients are placed; all workers call this.

        Args:
            placed: the clients of each worker, by rank.
            workers: who sends and receives.
        """
        there = {k: rank for rank, clients in enumerate(placed) for k in clients}
        for k in sorted(there.keys() & self.owners.keys()):
            if self.owners[k] == there[k]:
                continue
            if workers.rank == self.owners[k]:
                workers.send(self._pack(k), there[k])
            elif workers.rank == there[k]:
                self._unpack(k, workers.receive(self.owners[k]))
            self.owners[k] = there[k]

    # ------------------------------------------------------------------ checkpoints
    def write(self, folder: Path, done: int, workers: Workers) -> None:
        """Write the memories of the clients that have trained since the last checkpoint; all workers call this.

        Each is a file, whose name holds the number of rounds ``done``. The files of the last checkpoint stay until
        :meth:`remove_replaced`.
        """
        written = {k: f"{k}-{done}.pt" for k in sorted(self._changed)}
        for k, name in written.items():
            save(self[k], folder / name)
        self._changed.clear()
        new = {k: name for names in workers.gather(written) for k, name in names.items()}
        self._replaced += [self.files[k] for k, name in new.items() if self.files.get(k, name) != name]
        self.files = self.files | new

    def state_dict(self) -> dict[int, str]:
        """The name of each client's file, of the clients that remember something."""
        return dict(self.files)

    def remove_replaced(self, folder: Path) -> None:
        """Remove the files that newer ones have replaced, once the checkpoint that names these is written."""
        for name in self._replaced:
            (folder / name).unlink(missing_ok=True)
        self._replaced = []

    def restore(self, paths: Mapping[int, Path], workers: Workers, in_place: bool) -> None:
        """Deal the clients of a checkpoint out over the workers.

        Args:
            paths: file of each client.
            workers: the workers, over which the clients are dealt out in turn.
            in_place: whether the run resumes in the folder of the checkpoint; if not, the next checkpoint writes every
                file anew.
        """
        self.owners = {k: place % workers.size for place, k in enumerate(sorted(paths))}
        self._on_disk |= {k: paths[k] for k, rank in self.owners.items() if rank == workers.rank}
        if in_place:
            self.files = {k: path.name for k, path in paths.items()}
        else:
            self._changed |= {*self}

    def close(self) -> None:
        """Remove the files that were written beyond the limit; those of checkpoints stay."""
        if self._scratch is not None:
            self._scratch.close()

    # ------------------------------------------------------------------ inside
    def _settle(self, k: int) -> None:
        self._held[k] = self._moved(self._held[k], torch.device("cpu"))
        self._held.move_to_end(k)
        self._count(k, num_bytes(self._held[k]))
        self._forget_file(k)
        while self._held and self._total > self.limit:
            self._spill(next(iter(self._held)))

    def _pack(self, k: int) -> Tensor:
        """Remove the memory of client ``k`` and return it as bytes ``(n,)``; no bytes if it has none."""
        if k not in self:
            return torch.empty(0, dtype=torch.uint8)
        buffer = io.BytesIO()
        torch.save((self[k], k in self._changed), buffer)
        self._changed.discard(k)
        self._held.pop(k, None)
        self._count(k, 0)
        self._forget_file(k)
        return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)

    def _unpack(self, k: int, packed: Tensor) -> None:
        """Store what :meth:`_pack` of another worker gave."""
        if len(packed):
            self._held[k], changed = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
            self._changed |= {k} if changed else set()
            self._settle(k)

    def _moved(self, memory: Memory, device: torch.device) -> Memory:
        return memory if self.device.type == "cpu" else move_data_to_device(memory, device)

    def _spill(self, k: int) -> None:
        if self._folder is None:
            self._scratch = TemporaryFolder("fl_lightning-clients-")
            self._folder = self._scratch.path / "clients"
            self._folder.mkdir()
        path = self._folder / f"{k}.pt"
        save(self._held.pop(k), path)
        self._on_disk[k] = path
        self._count(k, 0)

    def _count(self, k: int, size: int) -> None:
        """Client ``k`` now holds ``size`` bytes in memory."""
        # the total is kept beside the sizes: adding them up each time would make a round quadratic in its clients
        self._total += size - self._sizes.pop(k, 0)
        self._sizes |= {k: size} if size else {}

    def _forget_file(self, k: int) -> None:
        path = self._on_disk.pop(k, None)
        if path is not None and path.parent == self._folder:
            path.unlink(missing_ok=True)  # a memory-mapped tensor outlives its file's name
