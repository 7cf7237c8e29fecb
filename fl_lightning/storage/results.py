"""The result of a run in Python: metrics by round as a list, a pandas frame, curves, and a notebook cell.

Importing this module does not import torch, so that reading finished runs is fast.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.storage.metric_format import best, final, format_value, in_percent, names_to_show
from fl_lightning.utilities.errors import choices, count, require

if TYPE_CHECKING:
    import pandas

    from fl_lightning.plotting.figures import ShownFigure

RunState = Literal["finished", "running", "stopped", "failed"]


class History(list[dict[str, float]]):
    """The metrics of a run: a mapping of tags to values for each finished round, in order."""

    def frame(self) -> pandas.DataFrame:
        """Return a frame with a row for each round and a column for each tag."""
        return frame_of(self, ["round"])


@dataclass(eq=False, repr=False)
class FitResult:
    """A run: the result of a fit, and of :func:`fl_lightning.load_run`.

    A notebook shows it as a table and curves.

    Args:
        name: its folder, such as ``feduv/version_0``.
        history: the metrics of all rounds.
        run_dir: the folder of the run; None where nothing was written, as in a ``fast_dev_run``.
        seed: the base seed of the run.
        state: ``finished``, ``running``, ``stopped`` or ``failed``.
        method: the methods with their arguments, such as ``FedProx(mu=0.1)``; the name of the folder for a run without
            config. Empty for a fit.
        settings: the part of the config that can change the result, by dotted key. Empty for a fit, and for a run from
            Python.
        config: the config; empty for a fit, and for a run from Python.
        environment: the contents of ``environment.json``; empty for a fit.
        notes: warnings about its files, such as damaged lines.
        labels: its labels in a study.
        reason: reason of a failure.
        plan: hash of its partition; empty if unknown.
        machine: processor or GPUs, and number of cores.
        seconds: median seconds of a round without the first; None with too few rounds.
        cost: the last line of ``cost.csv``.
    """

    name: str
    history: History
    run_dir: Path | None
    seed: int
    state: RunState = "finished"
    method: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    plan: str = ""
    machine: str = ""
    seconds: float | None = None
    cost: Mapping[str, str] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last finished round, by tag."""
        return self.history[-1] if self.history else {}

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return int(self.history[-1]["round"]) + 1 if self.history else 0

    def values(self, tag: str) -> dict[int, float]:
        """Return a metric by round."""
        return {int(row["round"]): row[tag] for row in self.history if tag in row}

    def frame(self) -> pandas.DataFrame:
        """Return the history as a frame with a row for each round and a column for each tag."""
        return self.history.frame()

    def plot(self, *tags: str) -> ShownFigure:
        """Draw metrics against the rounds, in separate axes.

        Args:
            tags: the metrics; by default the metrics on the console, such as ``test/accuracy``.

        Raises:
            UsageError: the run has no metric of this name.
        """
        return curves_of({"": [self]}, tags)

    def __repr__(self) -> str:
        tags = names_to_show(self.metrics)
        texts = [f", {tag} {format_value(tag, self.metrics[tag])}" for tag in tags]
        return f"<{self._summary}{''.join(texts)}>"

    def _repr_html_(self) -> str:
        names = shown_tags([self])
        rows = [[name, *best(self.history, name), final(self.history, name)] for name in names]
        return notebook_page(self._summary, ["", "best", "round", "final"], rows, {"": [self]})

    @property
    def _summary(self) -> str:
        rounds = count(len(self.history), "round")
        return f"{self.name}: {self.state}, {rounds}, seed {self.seed}, in {self.run_dir or 'no folder'}"


def frame_of(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> pandas.DataFrame:
    """Return rows as a frame that starts with the columns ``first``."""
    import pandas  # slow import

    tags = sorted({tag for row in rows for tag in row} - set(first))
    return pandas.DataFrame(rows, columns=[*first, *tags])


def shown_tags(results: Sequence[FitResult]) -> list[str]:
    """Return the metrics that are shown by default."""
    metrics: dict[str, float] = {}
    for result in results:
        for row in result.history:
            metrics |= row
    return names_to_show(metrics)


def curves_of(groups: Mapping[str, Sequence[FitResult]], tags: Sequence[str] = (), title: str = "") -> ShownFigure:
    """Draw metrics against the rounds, in separate axes; shares are in percent.

    Args:
        groups: runs by label. A group of several runs has one curve: the mean over its runs, for the rounds that all of
            them have, in a band from the least to the greatest value.
        tags: the metrics; by default the metrics on the console.
        title: title of the figure.

    Raises:
        UsageError: there is no such metric, or no metric.
    """
    # slow imports
    import pandas

    from fl_lightning.plotting.drawing import Curve, curves
    from fl_lightning.plotting.figures import laid_out

    results = [run for group in groups.values() for run in group]
    rows = [row for run in results for row in run.history]
    logged_tags = list(dict.fromkeys(tag for row in rows for tag in row if tag != "round"))
    curve_tags = list(tags or shown_tags(results))
    names = [run.name for run in results]
    require(bool(curve_tags), "plot", names, "no finished round with a metric; resume the run")
    drawings = []
    for tag in curve_tags:
        require(tag in logged_tags, "plot", tag, f"no such metric; available: {choices(logged_tags, tag)}")
        percent = in_percent(tag, [value for run in results for value in run.values(tag).values()])
        lines = []
        for place, (label, group) in enumerate(groups.items()):
            columns = {number: run.values(tag) for number, run in enumerate(group)}
            table = pandas.DataFrame(columns).dropna()
            if len(table):
                table = (100 if percent else 1) * table.sort_index()
                band = (table.min(axis=1), table.max(axis=1)) if len(group) > 1 else None
                shown_label = label if len(groups) > 1 else ""
                lines.append(Curve(place, table.mean(axis=1), shown_label, table.index, band))
        drawings.append(curves(lines, xlabel="round", ylabel=f"{tag} (%)" if percent else tag))
    return laid_out(drawings, title)


def notebook_page(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], groups: Mapping[str, Sequence[FitResult]]
) -> str:
    """Return a title, a table and curves, for a notebook."""
    lines = [f"<div><p><b>{escape(title)}</b></p>", "<table>"]
    for kind, row in (("th", heads), *(("td", row) for row in rows)):
        style = 'style="text-align:right;padding:2px 10px"'
        cells = [f"<{kind} {style}>{escape(str(cell))}</{kind}>" for cell in row]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</table>")
    if shown_tags([run for group in groups.values() for run in group]):
        picture = base64.b64encode(curves_of(groups)._repr_png_()).decode()
        alt = f'alt="{escape(title)}: metrics against rounds"'
        lines.append(f'<img {alt} style="max-width:100%" src="data:image/png;base64,{picture}"/>')
    return "\n".join([*lines, "</div>"])
