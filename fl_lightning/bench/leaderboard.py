"""Rows that a user adds to a suite, and their place among its finished rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fl_lightning.bench.cell import Cell, file_part
from fl_lightning.bench.comparison import suite_comparison
from fl_lightning.bench.config_fragments import Fragment, write_text
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.shows import OF_METRIC, Fair, Show
from fl_lightning.bench.statistics import Difference, fairness, holm, p_value, paired_difference
from fl_lightning.bench.suite import Suite, Table
from fl_lightning.bench.suite_file import seedless
from fl_lightning.bench.table_rendering import PACKAGES, TextTable, latex_tables, markdown, plain_table
from fl_lightning.bench.tuner import AXIS
from fl_lightning.utilities.errors import OF_OWN_MODELS, count, require
from fl_lightning.utilities.yaml_files import read_yaml

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# metrics of the last round that are shown beside the accuracy: name and unit
BESIDE = {
    "rank/representation/effective": ("effective rank", 1.0),
    "bytes/up": ("MB up", 1e-6),
    "bytes/down": ("MB down", 1e-6),
}
WORST = "worst tenth of the clients"
NUMBERS_BESIDE = [WORST, *(name for name, _ in BESIDE.values()), "seconds a round"]


def with_rows(suite: Suite, parts: Sequence[str]) -> tuple[Suite, list[str]]:
    """Add a row for each part, a config's file or the class of a method; return the suite and the new labels.

    Raises:
        UsageError: the suite has no axis ``method``, or no rank; a file cannot be read, or a label exists.
    """
    require(AXIS in suite.axes, "--add", [*parts], f"{suite.path} has no axis {AXIS} for further rows")
    hint = f"rows are ranked over equal seeds, by a table of {', '.join(OF_METRIC)} or fair, and {suite.path} has "
    hint += "no such table" if suite.decide is None else "the key decide; leave it out"
    require(bool(endpoints(suite)) and suite.decide is None, "--add", [*parts], hint)
    rows: dict[str, tuple[Fragment, ...]] = {}
    for part in parts:
        path, label = Path(part), part.rpartition(".")[2]
        fragments: tuple[Fragment, ...] = ({"method": [{"class_path": part}]},)
        if path.suffix in (".yaml", ".yml"):
            label, fragments = path.stem, seedless(read_yaml(path), path, f"--add {path}")
        names = {"", *map(file_part, (*suite.axes[AXIS], *rows))}
        hint = "is a row already, or has no letter or digit; give the file, or the class, another name"
        require(file_part(label) not in names, "--add", label, hint)
        rows[label] = fragments
    return replace(suite, axes={**suite.axes, AXIS: {**suite.axes[AXIS], **rows}}), [*rows]


def endpoints(suite: Suite) -> list[tuple[str, Table]]:
    """The first table of the metric, and the first of the clients' accuracies: the numbers by which rows are ranked."""
    tables = []
    for endpoint, shows in {"global model": OF_METRIC, "clients' models": (Fair.name,)}.items():
        tables += [(endpoint, table) for table in suite.tables if table.show.name in shows][:1]
    return tables


def frame_of_runs(suite: Suite, table: Table, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> pd.DataFrame:
    """Return a line for each run that has ended, with its setting, method, seed, number, partition, and more numbers.

    A run that failed has no number, and one without a model that all clients share only its clients' accuracies.
    """
    lines = []
    for number in suite_comparison(suite, table, cells, results).numbers:
        labels, result = dict(number.labels), number.result
        ended = number.state in ("done", "failed", "nan")
        if not ended or labels.pop(table.show.added_axis, "accuracy") != "accuracy":
            continue
        shares_no_model = any(OF_OWN_MODELS in warning for warning in result.warnings)
        value = None if shares_no_model and not isinstance(table.show, Fair) else number.value
        method = labels.pop(AXIS)
        line: dict[str, Any] = {"setting": ", ".join(labels.values()), "method": method, "seed": number.seed}
        line |= {"value": value, "plan": result.plan, "seconds a round": result.seconds}
        line[WORST] = 100 * fairness(result.metrics, {}).get("worst_tenth", math.nan)
        for tag, (name, scale) in BESIDE.items():
            line[name] = scale * result.metrics.get(tag, math.nan)
        lines.append(line)
    return pd.DataFrame(lines)


class Standing:
    """The rows of one setting in the order of an endpoint.

    Args:
        suite: the suite.
        show: the endpoint.
        numbers: the lines of :func:`frame_of_runs` of one setting that have a number.

    Attributes:
        frame: a line for each method from best to worst: its rank, the mean and deviation over the seeds, the paired
            difference to the baseline with its interval and p-value by Holm, and further numbers. A method with other
            partitions than the baseline's, such as IID clients, or without a run of each seed, has no rank and no
            difference.
    """

    def __init__(self, suite: Suite, show: Show, numbers: pd.DataFrame) -> None:
        self.baseline, self._confidence = suite.baseline.get(AXIS, ""), suite.confidence
        self._decimals = show.decimals(suite)
        self._values = numbers.pivot(index="seed", columns="method", values="value")
        plans = numbers.pivot(index="seed", columns="method", values="plan")
        of_baseline = plans.get(self.baseline, pd.Series(index=plans.index, dtype=object))
        either_lacks = plans.isna().to_numpy() | of_baseline.isna().to_numpy()[:, None]
        comparable = (plans.eq(of_baseline, axis=0) | either_lacks).all() & self._values.notna().all()
        runs = numbers.groupby("method", sort=False)
        frame = runs["value"].agg(["mean", "std"]).set_axis(["mean", "deviation"], axis=1)
        frame[["difference", "low", "high", "p"]] = math.nan
        for method in frame.index:
            difference = self.difference(method, self.baseline)
            if difference is not None and comparable[method] and method != self.baseline:
                p = p_value(difference, "t") if difference.deviation else math.nan
                interval = difference.interval or (math.nan, math.nan)
                frame.loc[method, ["difference", "low", "high", "p"]] = [difference.mean, *interval, p]
        tested = frame["p"].dropna()
        frame.loc[tested.index, "p"] = holm([*tested])
        lower_is_better = show.lower_is_better(suite)
        ranks = frame["mean"].where(comparable).rank(ascending=lower_is_better, method="min")
        frame.insert(0, "rank", ranks.astype("Int64"))
        frame = frame.join(runs[NUMBERS_BESIDE].mean()).join(runs.size().rename("seeds"))
        self.frame = frame.sort_values(["rank", "mean"], ascending=[True, lower_is_better], kind="stable")

    @property
    def significant(self) -> list[str]:
        """The methods whose difference to the baseline is significant after Holm's correction, from best to worst."""
        return [*self.frame.index[self.frame["p"] < 1 - self._confidence]]

    def difference(self, method: str, other: str) -> Difference | None:
        """The paired difference of two methods over their common seeds; None without a common seed."""
        pairs = self._values.reindex(columns=[method, other]).dropna()
        return paired_difference([*pairs.itertuples(index=False, name=None)], "t", self._confidence)

    def _signed(self, mean: float, *interval: float) -> str:
        """A difference with its interval, and the number of decimals of the endpoint."""
        text, *ends = (f"{number:+.{self._decimals}f}" for number in (mean, *interval))
        return f"{text} ({' to '.join(ends)})" if ends else text

    def rivals(self, label: str) -> dict[str, str]:
        """The rows with which a row is compared, each with the reason: the baseline, the nearest and the best other."""
        rivals = self.frame[self.frame["rank"].notna()].drop(label, errors="ignore")
        reasons = {self.baseline: "the baseline"} if self.baseline in rivals.index else {}
        if len(rivals):
            distances = (rivals["mean"] - self.frame["mean"][label]).abs()
            reasons |= {distances.idxmin(): "the nearest mean", rivals.index[0]: "the best other mean"}
        return reasons

    def sentence(self, label: str) -> str:
        """Where a row stands: rank, mean, and the differences to its rivals."""
        row, number = self.frame.loc[label], self.frame["rank"].count()
        text = f"{label}: {row['mean']:.{self._decimals}f} over {count(int(row['seeds']), 'seed')}"
        if pd.isna(row["rank"]):
            return f"{text}, without a rank, since it lacks seeds, or has other partitions than {self.baseline}"
        parts = [f"{text}, rank {int(row['rank'])} of {number}"]
        for rival, reason in self.rivals(label).items():
            difference = self.difference(label, rival)
            if difference is not None:
                text = self._signed(difference.mean, *(difference.interval or ()))
                parts.append(f"{text} against {rival}, {reason}")
        return "; ".join(parts)

    def table(self, caption: str, methods: Collection[str] | None = None) -> TextTable:
        """The rows of some methods, by default of all, as text."""
        lines = []
        for method, row in (self.frame if methods is None else self.frame.loc[[*methods]]).iterrows():
            interval = row[["low", "high"]].dropna()
            difference = self._signed(row["difference"], *interval) if pd.notna(row["difference"]) else "-"
            numbers = row[["mean", "deviation"]].dropna()
            mean = " ± ".join(f"{number:.{self._decimals}f}" for number in numbers)
            beside = [f"{row[name]:.3g}" if pd.notna(row[name]) else "-" for name in NUMBERS_BESIDE]
            p = "-" if pd.isna(row["p"]) else "< 0.001" if row["p"] < 0.001 else f"{row['p']:.3f}"
            rank = row["rank"] if pd.notna(row["rank"]) else "-"
            lines.append([rank, method, mean, difference, p, *beside, int(row["seeds"])])
        heads = ["mean ± deviation", f"minus {self.baseline}", "p by Holm", *NUMBERS_BESIDE, "seeds"]
        return plain_table(caption, ["rank", AXIS], heads, lines)


def standings(
    suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult], added: Collection[str] = ()
) -> dict[tuple[str, str], Standing]:
    """Return the standing of each setting by each endpoint with a finished run.

    Rows are compared over the seeds that have ended for the ``added`` ones and the baseline, where these have any.
    """
    board, decisive = {}, [*added, suite.baseline.get(AXIS, "")]
    for endpoint, table in endpoints(suite):
        numbers = frame_of_runs(suite, table, cells, results)
        for setting, of_setting in numbers.groupby("setting", sort=False) if len(numbers) else ():
            seeds = {*of_setting["seed"]}
            for _, of_row in of_setting[of_setting["method"].isin(decisive)].groupby("method"):
                seeds &= {*of_row["seed"]}
            of_seeds = of_setting[of_setting["seed"].isin(seeds)].dropna(subset="value")
            if len(of_seeds):
                board[str(setting), endpoint] = Standing(suite, table.show, of_seeds)
    return board


def forests(board: Mapping[tuple[str, str], Standing], added: Collection[str] = ()) -> Figure:
    """Draw the differences to the baseline with their intervals, a column for each setting, a row for each endpoint.

    Args:
        board: the standings.
        added: rows that are marked with an arrow.

    Returns:
        A figure. Marks are filled where the difference is significant after Holm's correction.
    """
    from fl_lightning.plotting.drawing import forest
    from fl_lightning.plotting.figures import laid_out

    drawings, rows = [], 0
    for part, standing in board.items():
        compared = standing.frame.dropna(subset="low")
        names = {method: method for method in compared.index}
        names |= {method: f"\u25b8 {method}" for method in added if method in names}
        estimates = [*compared[["difference", "low", "high"]].itertuples(index=False, name=None)]
        significant = [names[method] for method in standing.significant]
        labels = {"title": ", ".join(filter(None, part)), "xlabel": f"minus {standing.baseline}"}
        drawings.append(forest([*names.values()], estimates, significant, **labels))
        rows = max(rows, len(compared))
    return laid_out(drawings, columns=len({setting for setting, _ in board}), size=(3.6, 1 + 0.17 * rows))


def write_leaderboard(
    suite: Suite, board: Mapping[tuple[str, str], Standing], labels: Sequence[str], folder: Path
) -> list[Path]:
    """Write the standings as Markdown, LaTeX and CSV, and the differences to the baseline as SVG and PNG.

    Args:
        suite: the suite.
        board: its standings.
        labels: the added rows.
        folder: an existing folder.

    Returns:
        The files.
    """
    from fl_lightning.plotting.drawing import in_style

    tables, frames = [], []
    for part, standing in board.items():
        tables.append(standing.table(", ".join(filter(None, part))))
        frames.append(standing.frame.reset_index().assign(setting=part[0], endpoint=part[1]))
    legend = (
        "Ranks are of the means over the seeds. Differences are paired, with Student's interval; p is corrected by "
        "Holm for the rows of a table. Seconds are of the machines on which the rows ran. In the picture, marks are "
        f"filled where p is below {1 - suite.confidence:.2g}."
    )
    texts = {
        "md": "\n".join([*(line for table in tables for line in markdown(table)), "", legend, ""]),
        "tex": "\n".join([PACKAGES, *latex_tables(tables)]),
        "csv": pd.concat(frames).to_csv(index=False),
    }
    stem = f"{suite.name}.leaderboard"
    files = [write_text(folder / f"{stem}.{form}", text) for form, text in texts.items()]
    figure = forests(board, labels)
    for form in ("svg", "png"):
        files.append(folder / f"{stem}.{form}")
        with in_style():
            figure.savefig(files[-1])
    return files
