"""What a run has come to, in Python: its metrics by round, as a table of pandas, as curves, and as a notebook shows it.

Nothing here imports torch, so that finished runs are read at once.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.errors import choices, require
from fl_lightning.records.summary import best, final, is_share, names_to_show, told

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from fl_lightning.plotting.drawing import CurveLine, Draw
    from fl_lightning.plotting.figures import ShownFigure

# of the cells of a table in a notebook
CELL = 'style="text-align:right;padding:2px 10px"'
# the columns of a table of several runs that are not keys of their configs
LABELS = ("run", "seed", "method", "round")


class History(list[dict[str, float]]):
    """The metrics of a run: a mapping of tags to values for each round that is done, in their order."""

    def frame(self) -> pandas.DataFrame:
        """The same as a table: a row for each round, and a column for each tag."""
        return frame_of(self, ["round"])


@dataclass(eq=False, repr=False)
class FitResult:
    """What a fit returns, and what :func:`fl_lightning.load_run` reads of a run that is over.

    A notebook shows it as a table and curves.

    Args:
        name: the folder of the run's versions and its version, such as ``feduv/version_0``.
        history: the metrics of all rounds.
        run_dir: the folder of the run; None where nothing was written, as in a ``fast_dev_run``.
        seed: the base seed of the run.
        state: ``finished``; of a run that was read also ``stopped`` before its last round, or ``running``.
        settings: of a run that was read, what its config says of its result, by the shortest ends of keys that tell
            them apart; of one of several, only the keys in which they differ. Empty for a run made from Python.
        method: of a run that was read, its methods with their arguments, such as ``FedProx(mu=0.1)``; the name of the
            folder of its versions where it has no config.
    """

    name: str
    history: History
    run_dir: Path | None
    seed: int
    state: str = "finished"
    settings: Mapping[str, str | float] = field(default_factory=dict)
    method: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last round that is done, by tag."""
        return self.history[-1] if self.history else {}

    def frame(self) -> pandas.DataFrame:
        """The history as a table, as :meth:`History.frame` gives it."""
        return self.history.frame()

    def plot(self, *tags: str) -> ShownFigure:
        """Curves of metrics against the rounds, one drawing for each.

        Args:
            tags: the metrics; by default those that the console shows, such as ``test/accuracy``.

        Raises:
            UsageError: the run has no metric of a name.
        """
        return curves_of([self], tags)

    def __repr__(self) -> str:
        return f"<{self._told}{''.join(f', {tag} {told(tag, self.metrics[tag])}' for tag in self._last)}>"

    def _repr_html_(self) -> str:
        names = shown_tags([self])
        rows = [[name, *best(self.history, name), final(self.history, name)] for name in names]
        return page_of(self._told, ["", "best", "round", "final"], rows, [self])

    @property
    def _told(self) -> str:
        number = f"{len(self.history)} round{'s' * (len(self.history) != 1)}"
        return f"{self.name}: {self.state}, {number}, seed {self.seed}, in {self.run_dir or 'no folder'}"

    @property
    def _last(self) -> list[str]:
        return names_to_show(self.metrics)


class FitResults(list[FitResult]):
    """Several runs, as :func:`fl_lightning.load_runs` reads them."""

    def frame(self) -> pandas.DataFrame:
        """One table of all: a row for each run and round.

        Its first columns are ``run``, ``seed``, ``method``, and the keys of the configs in which the runs differ.
        """
        first = dict.fromkeys([key for one in self for key in labels_of(one)] + ["round"])
        return frame_of([{**labels_of(one), **row} for one in self for row in one.history], list(first))

    def plot(self, *tags: str) -> ShownFigure:
        """Curves of metrics against the rounds: a drawing for each metric, and in it a curve for each run.

        Of more than twelve runs, those of one method and the same settings are one curve: their mean, over the rounds
        that all of them have, in a band from their least to their greatest value. Runs made from Python, whose settings
        are not known, are one where their folders have one name. More than twelve such curves have no legend.

        Args:
            tags: the metrics; by default those that the console shows, such as ``test/accuracy``.

        Raises:
            UsageError: no run has a metric of a name.
        """
        return curves_of(self, tags)

    def _repr_html_(self) -> str:
        names = shown_tags(self)
        keys = list(dict.fromkeys(key for one in self for key in labels_of(one)))
        rows = [
            [*(labels_of(one).get(key, "") for key in keys), one.state, len(one.history)]
            + [final(one.history, name) for name in names]
            for one in self
        ]
        return page_of(f"{len(self)} runs", [*keys, "state", "rounds", *names], rows, self)


def labels_of(result: FitResult) -> dict[str, Any]:
    """What tells a run apart from others."""
    return {"run": result.name, "seed": result.seed, "method": result.method, **result.settings}


def frame_of(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> pandas.DataFrame:
    """Rows as a table, of which some columns come first."""
    # pandas takes a while, and not all who fit ask for a table
    import pandas

    tags = sorted({tag for row in rows for tag in row} - set(first))
    return pandas.DataFrame(rows, columns=[*first, *tags])


def shown_tags(results: Sequence[FitResult]) -> list[str]:
    """The metrics of some runs that are shown."""
    return names_to_show({tag: value for one in results for row in one.history for tag, value in row.items()})


def curves_of(results: Sequence[FitResult], tags: Sequence[str]) -> ShownFigure:
    """Curves of metrics against the rounds: a drawing for each metric, and in it a curve for each run or their means.

    Shares are in percent, as on the console.

    Raises:
        UsageError: no run has a metric of a name, or there is none at all.
    """
    # matplotlib takes a while, and not all who read runs draw them
    import numpy as np

    from fl_lightning.plotting.drawing import CurveLine
    from fl_lightning.plotting.figures import IN_AXES, laid_out
    from fl_lightning.plotting.style import line_style

    known = list(dict.fromkeys(tag for one in results for row in one.history for tag in row if tag != "round"))
    wanted = list(tags or shown_tags(results))
    require(bool(wanted), "plot", [one.name for one in results], "no round with a metric is done; train further")
    named = [", ".join([one.name, *(f"{key}={value}" for key, value in one.settings.items())]) for one in results]
    groups, title = [(name if len(results) > 1 else "", [one]) for name, one in zip(named, results, strict=True)], ""
    if len(results) > IN_AXES:
        groups = alike([one for one in results if one.history])
        averaged = any(len(some) > 1 for _, some in groups)
        title = "mean and range of the runs of each method and setting" if averaged else ""
        if len(groups) > IN_AXES:
            title = f"{len(groups)} curves, too many for a legend: give load_runs fewer folders"
            groups = [("", some) for _, some in groups]
    drawings = []
    for tag in wanted:
        require(tag in known, "plot", tag, f"there is no such metric; there are {choices(known, tag)}")
        values = [row[tag] for one in results for row in one.history if tag in row]
        percent = is_share(tag) and all(0 <= value <= 1 for value in values)
        lines = []
        for at, (label, some) in enumerate(groups):
            each = [{row["round"]: row[tag] for row in one.history if tag in row} for one in some]
            x = [place for place in each[0] if all(place in by_round for by_round in each)]
            if x:
                y = (100 if percent else 1) * np.array([[by_round[place] for place in x] for by_round in each], float)
                band = (y.min(0), y.max(0)) if len(each) > 1 else None
                lines.append(CurveLine(np.array(x, float), y.mean(0), line_style(at), band, label))
        drawings.append(over_rounds(lines, f"{tag} (%)" if percent else tag))
    return laid_out(drawings, title)


def alike(results: Sequence[FitResult]) -> list[tuple[str, list[FitResult]]]:
    """Runs of one method and the same settings together; they are called by what tells them from others."""
    groups: dict[tuple[object, ...], list[FitResult]] = {}
    for one in results:
        groups.setdefault((one.method, *sorted(one.settings.items())), []).append(one)
    made = []
    for some in groups.values():
        first = some[0]
        others = [one.settings for one in results if one.method == first.method]
        own = [
            f"{key}={value}" for key, value in first.settings.items() if any(one.get(key) != value for one in others)
        ]
        number = f" ({len(some)} runs)" if len(some) > 1 else ""
        made.append((", ".join([first.method, *own]) + number, some))
    return made


def over_rounds(lines: Sequence[CurveLine], tag: str) -> Draw:
    """A drawing of curves whose places are rounds."""
    from matplotlib.ticker import MaxNLocator

    from fl_lightning.plotting.drawing import curves

    def draw(axes: Axes) -> None:
        curves(lines, xlabel="round", ylabel=tag)(axes)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    return draw


def page_of(told: str, heads: Sequence[str], rows: Sequence[Sequence[object]], results: Sequence[FitResult]) -> str:
    """What a notebook shows of some runs: a line, a table, and curves where there are some."""
    lines = [f"<div><p><b>{escape(told)}</b></p>", "<table>"]
    for kind, row in (("th", heads), *(("td", row) for row in rows)):
        cells = "".join(f"<{kind} {CELL}>{escape(str(cell))}</{kind}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    lines.append("</table>")
    if shown_tags(results):
        picture = base64.b64encode(curves_of(results, ())._repr_png_()).decode()
        alt = f'alt="{escape(told)}: metrics against rounds"'
        lines.append(f'<img {alt} style="max-width:100%" src="data:image/png;base64,{picture}"/>')
    return "\n".join([*lines, "</div>"])
