"""The manifest beside a checkpoint: the size and the SHA-256 of every file that the checkpoint consists of."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.records.files import DamagedFileError, Stamp, stamp_of

# of the layout of checkpoints; one that is higher is a later version's
FORMAT = 1
LARGEST_MANIFEST = 2**28
CLIENT_FILE = re.compile(r"(0|[1-9]\d{0,18})-(0|[1-9]\d{0,18})\.pt", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint.

    Args:
        round: rounds that are done.
        checkpoint: stamp of the file with the state of the run, ``last.ckpt`` or whatever its name is now.
        history: stamp of the first bytes of ``history.jsonl``.
        clients: stamp of each file in ``clients``, by name.
        best: whether the checkpoint is kept as the best so far.
    """

    round: int
    checkpoint: Stamp
    history: Stamp
    clients: dict[str, Stamp]
    best: bool = False

    def text(self) -> str:
        """The manifest as JSON."""
        stamps = {name: stamp._asdict() for name, stamp in self.clients.items()}
        known = {"format": FORMAT, "round": self.round, "best": self.best}
        own = {"checkpoint": self.checkpoint._asdict(), "history": self.history._asdict()}
        return json.dumps({**known, **own, "clients": stamps}) + "\n"

    def check(self, path: Path) -> None:
        """Check the files of the checkpoint at ``path`` but for its history.

        Raises:
            DamagedFileError: one is missing or altered; the text names it.
        """
        for name, stamp in {path.name: self.checkpoint, **{f"clients/{k}": s for k, s in self.clients.items()}}.items():
            file = path.parent / name
            if not file.is_file():
                raise DamagedFileError(f"{name} is missing")
            size = file.stat().st_size
            if size != stamp.size:
                raise DamagedFileError(f"{name} has {size} bytes and had {stamp.size}")
            if stamp_of(file) != stamp:
                raise DamagedFileError(f"{name} was altered: its SHA-256 differs")


def manifest_path(path: Path) -> Path:
    """Where the manifest of a checkpoint lies."""
    return path.with_name(f"{path.name}.json")


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at ``path``.

    Raises:
        DamagedFileError: it is missing, damaged or of a later version.
    """
    where = manifest_path(path)
    if not where.is_file():
        raise DamagedFileError(f"its manifest {where.name} is missing")
    if where.stat().st_size > LARGEST_MANIFEST:
        raise DamagedFileError(f"its manifest {where.name} has more than {LARGEST_MANIFEST} bytes")
    try:
        contents = json.loads(where.read_bytes())
        if contents["format"] != FORMAT:
            raise DamagedFileError(f"it has format {contents['format']!r}, and this version reads {FORMAT}")
        clients = {name: _stamp(fields) for name, fields in contents["clients"].items()}
        foreign = next((name for name in clients if not CLIENT_FILE.fullmatch(name)), None)
        if foreign is not None:
            raise DamagedFileError(f"its manifest names {foreign[:60]!r}, which is no file of a client")
        own = (_stamp(contents["checkpoint"]), _stamp(contents["history"]))
        return Manifest(int(contents["round"]), *own, clients, contents["best"] is True)
    except DamagedFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"its manifest {where.name} is damaged") from error


def _stamp(fields: dict[str, Any]) -> Stamp:
    size, digest = fields["size"], fields["sha256"]
    if type(size) is not int or size < 0 or type(digest) is not str:
        raise ValueError("no stamp")
    return Stamp(size, digest)
