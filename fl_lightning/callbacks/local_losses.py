"""Loss of each client by local epoch.

FedDecorr's Figure 11 (Shi et al., ICLR 2023) shows the method's term over the local epochs of each client, FedUV's
Figure 3 (Son et al., CVPR 2024) the training loss.
"""

from __future__ import annotations

import csv
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        self._rows: list[Row] = []

    def on_round_start(self, trainer: RunContext) -> None:
        self._of_round: list[Row] = []

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        where = {"round": trainer.server.round, "client": client.info.id}
        for epoch, terms in enumerate(client.visit.loss_terms()):
            self._of_round.append({**where, "epoch": epoch, **terms})

    def measure(self, trainer: RunContext) -> None:
        rows = chain.from_iterable(trainer.gather(self._of_round))
        self._rows += sorted(rows, key=lambda row: (row["client"], row["epoch"]))
        if trainer.run_dir is not None and self._rows:
            self.set_other_aside(trainer.run_dir / self.file)
            write_atomically(trainer.run_dir / self.file, self._write)

    def on_fit_end(self, trainer: RunContext) -> None:
        latest = [row for row in self._rows if row["round"] == self._rows[-1]["round"]]
        terms = [term for term in dict.fromkeys(chain(*latest)) if term not in KEYS]
        if trainer.run_dir is not None:
            log_figures(trainer, (plot_term(term, latest) for term in terms))

    def state_dict(self) -> dict[str, Any]:
        # the rows are in the file
        return {"rows": len(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        number = state.get("rows", 0)
        if self._source is None or not number:
            return
        path = self._source / self.file
        try:
            rows = read_rows(path)[:number]
        except (OSError, ValueError, TypeError, csv.Error):
            rows = []
        self._continues = len(rows) == number
        if self._continues:
            self._rows = rows
        else:
            warn_of_damage(path)

    def _write(self, path: Path) -> None:
        # cells of missing columns are empty
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(chain(*self._rows)))
            writer.writeheader()
            writer.writerows(self._rows)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; an incomplete last line does not count."""
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    rows = []
    for row in csv.DictReader(lines):
        names = [name for name in row if row[name]]
        rows.append({name: int(row[name]) if name in KEYS else float(row[name]) for name in names})
    return rows


def plot_term(term: str, rows: list[Row]) -> Plot:
    """Plot a term in the visits of one round: a curve for each client, over the local epochs."""
    import pandas  # slow import

    from fl_lightning.plotting.drawing import Curve, curves
    from fl_lightning.plotting.figures import Plot

    table = pandas.DataFrame(rows).pivot(index="client", columns="epoch", values=term)
    lines = []
    for number, (client, values) in enumerate(table.iterrows()):
        lines.append(Curve(number, values.to_numpy(), f"client {client}"))
    ticks = [str(epoch + 1) for epoch in table]
    draw = curves(lines, ticks=ticks, xlabel="local epoch", ylabel=f"{term}, mean over the epoch")
    return Plot(f"local_losses/{term}", f"{term} within the visits, round {int(rows[0]['round'])}", [draw])
