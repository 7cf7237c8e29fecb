"""The loss within visits: of each client, by local epoch.

As in FedDecorr's Figure 11 (Shi et al., ICLR 2023), the method's term over the local epochs of each client, and in
FedUV's Figure 3 (Son et al., CVPR 2024), the training loss.
"""

from __future__ import annotations

import csv
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.measurement import Measurement, log_pictures, warn_of_damage
from fl_lightning.client import Client
from fl_lightning.pictures import Panel, Picture, Shown
from fl_lightning.storage.atomic_io import write_atomically

Row = dict[str, float]
KEYS = ("round", "client", "epoch")


class LocalLosses(Measurement):
    """Writes the loss of each client in each of its local epochs to ``local_losses.csv``.

    A row has ``round``, ``client``, ``epoch`` (the local epoch, from 0), ``loss`` (that of the module, without
    penalties) and a column for each method's penalty (``feduv``) and for the terms of one that has several
    (``feduv/uniformity``), with their coefficients: ``loss`` and the penalties add up to what is trained. Values are
    means over the examples of the epoch, taken while the model changes. A cell is empty where a client has no such
    term, as in its first visit with FedCKA. At the end there is a figure of the last recorded round for each column
    (``figures/local_losses_loss.png``).

    Without this callback nothing is collected; with it, an epoch costs one dictionary.

    Args:
        every_n_rounds: rounds from one that is recorded to the next, at least 1; the last round is recorded too.

    Raises:
        UsageError: ``every_n_rounds`` is below 1.
    """

    file = "local_losses.csv"

    def __init__(self, every_n_rounds: int = 1) -> None:
        super().__init__(every_n_rounds)

    def on_fit_start(self, trainer: RunAccess) -> None:
        super().on_fit_start(trainer)
        self._path = None if trainer.run_dir is None else trainer.run_dir / self.file
        self._number, self._columns, self._latest = 0, list[str](), list[Row]()

    def on_round_start(self, trainer: RunAccess) -> None:
        self._rows: list[Row] = []

    def on_client_end(self, trainer: RunAccess, client: Client) -> None:
        where = {"round": trainer.server.round, "client": client.info.id}
        self._rows += [{**where, "epoch": epoch, **terms} for epoch, terms in enumerate(client.epochs)]

    def measure(self, trainer: RunAccess) -> None:
        rows = [row for theirs in trainer.gather(self._rows) for row in theirs]
        self._append(sorted(rows, key=lambda row: (row["client"], row["epoch"])))

    def draw(self, trainer: RunAccess) -> None:
        for term in [term for term in self._columns if term not in KEYS] if self._path and self._latest else ():
            log_pictures(trainer, [picture_of(term, self._latest)], arrays_of(term, self._latest))

    def on_fit_end(self, trainer: RunAccess) -> None:
        self.draw(trainer)

    def state_dict(self) -> dict[str, Any]:
        # the rows themselves are in the file
        return {"rows": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        number = state.get("rows", 0)
        if self._source is None or not number:
            return
        path = self._source / self.file
        try:
            with path.open(newline="") as file:
                lines = [line for line in islice(file, number + 1) if line.endswith("\n")]
            rows = [
                {k: int(v) if k in KEYS else float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)
            ]
        except (OSError, ValueError, TypeError, csv.Error):
            rows = []
        if len(rows) == number:
            self._continues = True
            self._append(rows)
        else:
            warn_of_damage(path)

    def _append(self, rows: list[Row]) -> None:
        """Add rows to the file, which is written anew the first time, and where a column is new."""
        last = max((row["round"] for row in rows), default=None)
        self._latest = [row for row in rows if row["round"] == last] or self._latest
        self._number += len(rows)
        before = self._columns
        self._columns = list(dict.fromkeys([*before, *(name for row in rows for name in row)]))
        if self._path is None or not rows:
            return
        if self._columns == before:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerows(rows)
            return
        earlier: list[Any] = []
        if before:
            with self._path.open(newline="") as file:
                earlier = list(csv.DictReader(file))
        self.set_other_aside(self._path)
        write_atomically(self._path, partial(self._write, rows=[*earlier, *rows]))

    def _write(self, path: Path, rows: list[Any]) -> None:
        # a row has empty cells for the columns that it lacks
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)


def picture_of(term: str, rows: list[Row]) -> Picture:
    """What a figure shows of a term in the visits of one round: a line for each client, over the local epochs."""
    lines = tuple(Shown(f"client {k}", f"client {k}") for k in sorted({int(row["client"]) for row in rows}))
    panel = Panel("curves", lines, axis="local epoch", names=("epochs",), values=f"{term}, mean over the epoch")
    return Picture(f"local_losses/{term}", f"{term} within the visits", (panel,))


def arrays_of(term: str, rows: list[Row]) -> dict[str, np.ndarray]:
    """The arrays of :func:`picture_of`: the rows as values ``(1, E)`` of each client, nan where there is none."""
    number = 1 + max(int(row["epoch"]) for row in rows)
    arrays = {"rounds": np.array([int(rows[0]["round"])]), "epochs": np.arange(1, number + 1)[None]}
    for row in rows:
        values = arrays.setdefault(f"client {int(row['client'])}", np.full((1, number), np.nan))
        values[0, int(row["epoch"])] = row.get(term, np.nan)
    return arrays
