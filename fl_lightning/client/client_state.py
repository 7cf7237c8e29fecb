"""Memories of clients between rounds: in main memory up to a limit, beyond it on disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.core.collectives import Collectives
from fl_lightning.core.state import State, num_bytes
from fl_lightning.data.transfer import fetched, transferred
from fl_lightning.storage.atomic_io import dump, flush, flush_folder, in_parallel, load, partial_of, save
from fl_lightning.storage.serializable import packed, unpacked, with_tensors
from fl_lightning.storage.tempdirs import TemporaryFolder
from fl_lightning.utilities.code_fingerprint import file_sha256
from fl_lightning.utilities.errors import require

Memory = dict[str, dict[str, Any]]


class ClientStateStore(Mapping[int, Memory]):
    """The memories of the clients that this worker owns, by id.

    A client's memory holds tensors and plain values by method and, as ``state``, the client-local entries of the state.
    Beyond ``limit``, the least recently visited clients' memories are on disk, each in a separate file that is written
    atomically and read memory-mapped.

    A visit changes a memory completely or not at all: it works on a copy, which replaces the original at the end of the
    visit, and is dropped if the visit fails.

    Args:
        limit: bytes of tensors in main memory, at least 0.
        device: device of a client's memory during its visit; between visits it is in main memory.

    Attributes:
        owners: rank of the owner of each client with a memory, the same on all workers.
        files: name and SHA-256 of each client's file in the last checkpoint, the same on all workers.
    """

    def __init__(self, limit: float = float("inf"), device: torch.device | str = "cpu") -> None:
        self.limit, self.device = limit, torch.device(device)
        self.owners: dict[int, int] = {}
        self.files: dict[int, tuple[str, str]] = {}
        self._held: OrderedDict[int, Memory] = OrderedDict()
        # the copies on which visits work
        self._visited: dict[int, Memory] = {}
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._on_disk: dict[int, Path] = {}
        self._scratch: TemporaryFolder | None = None
        self._changed: set[int] = set()

    def __getitem__(self, k: int) -> Memory:
        """Return the memory of client ``k`` for reading, including changes of its current visit.

        A file stays on disk.
        """
        memories = self._visited if k in self._visited else self._held
        if k in memories:
            return memories[k]
        hint = "it had no room for this client, and the files beyond it end with the run; raise it"
        require(self._on_disk[k].is_file(), "trainer.client_memory", self.limit / 2**30, hint)
        return load(self._on_disk[k])

    def own_entries(self, k: int) -> State:
        """The state entries that stay with client ``k``, as its last visit left them; none before its first."""
        return self.get(k, {}).get("state", {})

    def __contains__(self, k: object) -> bool:
        # the method of Mapping would read a file
        return k in self._visited or k in self._held or k in self._on_disk

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._visited, *self._held, *self._on_disk}))

    def __len__(self) -> int:
        return len(self._visited.keys() | self._held.keys() | self._on_disk.keys())

    # ------------------------------------------------------------------ a visit
    @contextmanager
    def committing(self, k: int) -> Iterator[None]:
        """A visit of client ``k``, which changes its memory at the end of the block, and not at all after an error."""
        try:
            yield
            self.commit_visit(k)
        finally:
            self.drop(k)

    @contextmanager
    def unchanged(self, k: int | None = None) -> Iterator[None]:
        """Return a context that drops the changes of its visits; an earlier visit continues after it.

        With ``k``, visits see the present memory of this client, even while it trains.
        """
        memories = {} if k is None else {k: with_tensors(self.get(k, {}), lambda tensor: tensor.to(self.device))}
        outer_visits, self._visited = self._visited, memories
        try:
            yield
        finally:
            self._visited = outer_visits

    def visited(self, k: int) -> Memory:
        """The memory of client ``k`` during its visit, to read and to change; an empty one if it has none yet."""
        if k not in self._visited:
            memory = self._held[k] if k in self._held else load(self._on_disk[k]) if k in self._on_disk else {}
            if self.device.type != "cpu":
                memory = apply_to_collection(memory, Tensor, transferred, self.device)
            elif k in self._held:  # writes into a memory-mapped tensor do not reach its file
                memory = with_tensors(memory, torch.clone)
            self._visited[k] = memory
        return self._visited[k]

    def drop(self, k: int) -> None:
        """Drop the changes of client ``k``'s visit that have not been committed."""
        self._visited.pop(k, None)

    def commit_visit(self, k: int) -> None:
        """Commit the changes of client ``k``'s visit, count the size of its memory, and enforce the limit."""
        if k not in self._visited:
            return
        memory = self._visited.pop(k)
        if any(memory.values()) or k in self:
            self._held[k] = memory
            self._changed.add(k)
            self._enforce_limit(k)

    # ------------------------------------------------------------------ several workers
    def follow(self, placed: list[list[int]], workers: Collectives) -> None:
        """Send memories to the workers on which their clients are ``placed``, by rank; all workers call this."""
        target_ranks = {k: rank for rank, clients in enumerate(placed) for k in clients}
        for k in sorted(target_ranks.keys() & self.owners.keys()):
            if self.owners[k] == target_ranks[k]:
                continue
            if workers.rank == self.owners[k]:
                workers.send(packed((self[k], k in self._changed)), target_ranks[k])
                self._changed.discard(k)
                self._held.pop(k, None)
                self._count(k, 0)
                self._forget_file(k)
            elif workers.rank == target_ranks[k]:
                self._held[k], changed = unpacked(workers.receive(self.owners[k]).numpy().tobytes())
                self._changed |= {k} if changed else set()
                self._enforce_limit(k)
            self.owners[k] = target_ranks[k]

    # ------------------------------------------------------------------ checkpoints
    def write(self, folder: Path, done: int, workers: Collectives) -> None:
        """Write the memories of the clients that have trained since the last checkpoint; all workers call this.

        Each is a file, whose name holds the number of rounds ``done``, and is on the disk when this returns. The files
        of the last checkpoint stay.
        """
        names = {k: f"{k}-{done}.pt" for k in sorted(self._changed)}
        partials = [partial_of(folder / name) for name in names.values()]
        if names:
            folder.mkdir(parents=True, exist_ok=True)
        for k, partial in zip(names, partials, strict=True):
            dump(self[k], partial)
        in_parallel(flush, partials)
        digests = in_parallel(file_sha256, partials)
        for name, partial in zip(names.values(), partials, strict=True):
            partial.replace(folder / name)
        if names:
            flush_folder(folder)
        self._changed.clear()
        files = dict(zip(names, zip(names.values(), digests, strict=True), strict=True))
        files_of_workers = workers.gather(files, "files of memories")
        for files in files_of_workers:
            self.files = self.files | files

    def restore(
        self, paths: Mapping[int, Path], workers: Collectives, files: Mapping[int, tuple[str, str]] | None
    ) -> None:
        """Distribute the clients of a checkpoint among the workers.

        Args:
            paths: file of each client.
            workers: the workers, which get the clients in turn.
            files: name and SHA-256 of each client's file, if the run resumes in the folder of the checkpoint; None if
                the next checkpoint writes all files again.
        """
        self.owners = {k: place % workers.size for place, k in enumerate(sorted(paths))}
        self._on_disk |= {k: paths[k] for k, rank in self.owners.items() if rank == workers.rank}
        if files is not None:
            self.files = dict(files)
        else:
            self._changed |= {*self}

    def close(self) -> None:
        """Remove the files that were written beyond the limit, but no files of checkpoints."""
        if self._scratch is not None:
            self._scratch.close()

    # ------------------------------------------------------------------ inside
    def _enforce_limit(self, k: int) -> None:
        """Count the size of a new memory, and write the oldest memories to disk until the others fit."""
        if self.device.type != "cpu":
            self._held[k] = fetched(self._held[k], self.device)
        self._held.move_to_end(k)
        self._count(k, num_bytes(self._held[k]))
        self._forget_file(k)
        while self._held and self._total > self.limit:
            self._spill(next(iter(self._held)))

    def _spill(self, k: int) -> None:
        if self._scratch is None:
            self._scratch = TemporaryFolder("fl_lightning-clients-")
        path = self._scratch.path / f"{k}.pt"
        save(self._held.pop(k), path)
        self._on_disk[k] = path
        self._count(k, 0)

    def _count(self, k: int, size: int) -> None:
        """Client ``k`` now holds ``size`` bytes in memory."""
        # a running total: adding all sizes each time would make a round quadratic in its clients
        self._total += size - self._sizes.pop(k, 0)
        self._sizes |= {k: size} if size else {}

    def _forget_file(self, k: int) -> None:
        path = self._on_disk.pop(k, None)
        if path is not None and self._scratch is not None and path.parent == self._scratch.path:
            path.unlink(missing_ok=True)  # a memory-mapped tensor outlives its file's name
