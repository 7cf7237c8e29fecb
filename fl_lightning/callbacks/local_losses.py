"""Loss of each client by local epoch.

FedDecorr's Figure 11 (Shi et al., ICLR 2023) shows the method's term over the local epochs of each client, FedUV's
Figure 3 (Son et al., CVPR 2024) the training loss.
"""

from __future__ import annotations

import csv
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.callbacks.measurement import Measurement, log_figures, warn_of_damage
from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext
from fl_lightning.storage.atomic_io import write_atomically

if TYPE_CHECKING:
    from fl_lightning.plotting.figures import Plot

Row = dict[str, float]
KEYS = ("round", "client", "epoch")


class LocalLosses(Measurement):
    """Writes the loss of each client in each of its local epochs to ``local_losses.csv``.

    A row has ``round``, ``client``, ``epoch`` (the local epoch, from 0), ``loss`` (the module's, without
    penalties) and a column for each method's penalty (``feduv``) and for each of several terms of a penalty
    (``feduv/uniformity``), with coefficients: ``loss`` and the penalties add up to the training objective. Values are
    means over the examples of the epoch, while the model changes. Cells without a term are empty, as in the first visit
    with FedCKA. At the end, each column has a figure of the last recorded round
    (``figures/local_losses_loss.png``).

    Without this callback nothing is collected; with it, an epoch costs one dictionary.

    Args:
        every_n_rounds: rounds from one record to the next, at least 1; the last round is recorded too.

    Raises:
        UsageError: ``every_n_rounds`` is below 1.
    """

    file = "local_losses.csv"

    def __init__(self, every_n_rounds: int = 1) -> None:
        super().__init__(every_n_rounds)

    def on_fit_start(self, trainer: RunContext) -> None:
        super().on_fit_start(trainer)
        self._path = None if trainer.run_dir is None else trainer.run_dir / self.file
        self._number, self._columns = 0, list[str]()

    def on_round_start(self, trainer: RunContext) -> None:
        self._rows: list[Row] = []

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        where = {"round": trainer.server.round, "client": client.info.id}
        for epoch, terms in enumerate(client.visit.loss_terms()):
            self._rows.append({**where, "epoch": epoch, **terms})

    def measure(self, trainer: RunContext) -> None:
        rows = [row for of_worker in trainer.gather(self._rows) for row in of_worker]
        self._append(sorted(rows, key=lambda row: (row["client"], row["epoch"])))

    def on_fit_end(self, trainer: RunContext) -> None:
        rows = read_rows(self._path) if self._path and self._number else []
        latest = [row for row in rows if row["round"] == rows[-1]["round"]]
        terms = [term for term in self._columns if term not in KEYS] if latest else []
        log_figures(trainer, (plot_term(term, latest) for term in terms))

    def state_dict(self) -> dict[str, Any]:
        # the rows are in the file
        return {"rows": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        number = state.get("rows", 0)
        if self._source is None or not number:
            return
        path = self._source / self.file
        try:
            rows = read_rows(path, number)
        except (OSError, ValueError, TypeError, csv.Error):
            rows = []
        self._continues = len(rows) == number
        if self._continues:
            self._append(rows)
        else:
            warn_of_damage(path)

    def _append(self, rows: list[Row]) -> None:
        """Append rows to the file, and rewrite it at first and for a new column."""
        self._number += len(rows)
        before = self._columns
        self._columns = list(dict.fromkeys([*before, *(name for row in rows for name in row)]))
        if self._path is None or not rows:
            return
        if self._columns == before:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerows(rows)
            return
        rows = [*(read_rows(self._path) if before else []), *rows]
        self.set_other_aside(self._path)
        write_atomically(self._path, partial(self._write, rows=rows))

    def _write(self, path: Path, rows: list[Row]) -> None:
        # cells of missing columns are empty
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)


def read_rows(path: Path, number: int | None = None) -> list[Row]:
    """Return the first rows of a file, or all; an incomplete last line does not count."""
    with path.open(newline="") as file:
        # the head counts as a line
        first_lines = file if number is None else islice(file, number + 1)
        lines = [line for line in first_lines if line.endswith("\n")]
    rows = []
    for row in csv.DictReader(lines):
        names = [name for name in row if row[name]]
        rows.append({name: int(row[name]) if name in KEYS else float(row[name]) for name in names})
    return rows


def plot_term(term: str, rows: list[Row]) -> Plot:
    """Plot a term in the visits of one round: a curve for each client, over the local epochs."""
    from fl_lightning.plotting.drawing import Curve, curves
    from fl_lightning.plotting.figures import Plot

    epochs, lines = 1 + max(int(row["epoch"]) for row in rows), []
    for number, client in enumerate(sorted({int(row["client"]) for row in rows})):
        values = np.full(epochs, np.nan)
        for row in rows:
            if int(row["client"]) == client:
                values[int(row["epoch"])] = row.get(term, np.nan)
        lines.append(Curve(number, values, f"client {client}"))
    ticks = [str(epoch) for epoch in range(1, epochs + 1)]
    draw = curves(lines, ticks=ticks, xlabel="local epoch", ylabel=f"{term}, mean over the epoch")
    return Plot(f"local_losses/{term}", f"{term} within the visits, round {int(rows[0]['round'])}", [draw])
