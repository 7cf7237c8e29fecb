"""The folder of a run's checkpoints: the last, the one before it and the best, each valid by its manifest.

The manifest of a checkpoint is renamed into place before the checkpoint is, and the one before is complete by then: a
kill at any instruction leaves a valid checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from fl_lightning.records.checkpoint import BEST, LAST, PREVIOUS, Checkpoint
from fl_lightning.records.files import DamagedFileError, Stamp, flush, flush_folder, partial_of, remove, write_stamped
from fl_lightning.records.history import HISTORY, HistoryFile, MetricsRow
from fl_lightning.records.manifest import FORMAT, Manifest, manifest_path, read_manifest

# what a kill may leave behind, by folder; nothing else is removed
LEFT = re.compile(r"(last|previous|best|model|ccvr|history)(\.ckpt)?\.partial")
LEFT_IN_CLIENTS = re.compile(r"\d+-\d+\.(pt|partial)", re.ASCII)


class CheckpointFolder:
    """Writes checkpoints into a folder; one process does.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._history = HistoryFile(path / HISTORY)
        self._clients: dict[str, set[str]] = {}

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue after a checkpoint of this folder: make it the last one, and remove what no checkpoint names."""
        if checkpoint.path.name == PREVIOUS:
            flush(self._copied_manifest(PREVIOUS, LAST))
            self._rename(PREVIOUS, LAST)
        if checkpoint.manifest is not None and checkpoint.manifest.best:
            self._keep_as_best()  # the kill may have come before that
        self._clients = {name: self._named(name) for name in (LAST, PREVIOUS, BEST)}
        if checkpoint.manifest is not None:  # else nothing says which files belong to it
            self._remove_left(self.path, LEFT, set())
            self._remove_left(self.path / "clients", LEFT_IN_CLIENTS, set().union(*self._clients.values()))

    def save(
        self, contents: dict[str, Any], clients: dict[str, Stamp], history: list[MetricsRow], best: bool = False
    ) -> None:
        """Write the last checkpoint; the one that was becomes the previous one.

        Args:
            contents: the state of the run; ``round`` is the number of rounds that are done.
            clients: the stamps of the clients' files, which are on the disk.
            history: the rows of the rounds that are done.
            best: whether to keep the checkpoint as the best one.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / LAST
        new, noted = partial_of(path), partial_of(manifest_path(path))
        stamp = write_stamped({**contents, "format": FORMAT}, new)
        manifest = Manifest(contents["round"], stamp, self._history.append(history), clients, best)
        noted.write_text(manifest.text())
        flush([new, noted, self._history.path, *self._copied_manifest(LAST, PREVIOUS)])
        flush_folder(self.path)
        if path.is_file():
            self._rename(LAST, PREVIOUS)
        os.replace(noted, manifest_path(path))
        os.replace(new, path)
        if best:
            self._keep_as_best()
        flush_folder(self.path)
        # the files of clients that no checkpoint names any longer
        before = set().union(*self._clients.values())
        self._clients[PREVIOUS], self._clients[LAST] = self._clients.get(LAST, set()), set(clients)
        if best:
            self._clients[BEST] = set(clients)
        remove(self.path / "clients" / name for name in before.difference(*self._clients.values()))

    def _copied_manifest(self, name: str, new: str) -> list[Path]:
        """Copy the manifest of a checkpoint for the name it will have; the copy is complete when it is flushed."""
        source, copied = manifest_path(self.path / name), partial_of(manifest_path(self.path / new))
        if not source.is_file():
            return []
        shutil.copyfile(source, copied)
        return [copied]

    def _rename(self, name: str, new: str) -> None:
        """Rename a checkpoint, after its copied manifest, so that one of the two is valid at any time."""
        target = manifest_path(self.path / new)
        if manifest_path(self.path / name).is_file():
            os.replace(partial_of(target), target)
        else:
            target.unlink(missing_ok=True)
        os.replace(self.path / name, self.path / new)

    def _keep_as_best(self) -> None:
        """Give the last checkpoint the name of the best one, too."""
        for source, target in ((LAST, BEST), (f"{LAST}.json", f"{BEST}.json")):
            partial = partial_of(self.path / target)
            partial.unlink(missing_ok=True)
            try:
                os.link(self.path / source, partial)  # both are replaced, never written to
            except OSError:
                shutil.copyfile(self.path / source, partial)
                flush([partial])
            os.replace(partial, self.path / target)

    def _named(self, name: str) -> set[str]:
        try:
            return set(read_manifest(self.path / name).clients)
        except DamagedFileError:
            return set()

    def _remove_left(self, folder: Path, pattern: re.Pattern[str], named: set[str]) -> None:
        """Remove the plain files of a folder whose name has the pattern and is not ``named``."""
        if folder.is_symlink() or not folder.is_dir():
            return
        entries = [entry for entry in os.scandir(folder) if pattern.fullmatch(entry.name) and entry.name not in named]
        remove(Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False))
