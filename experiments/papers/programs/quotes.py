"""Provides the numbers of stored cells that texts about results quote, so that texts contain no fixed numbers.

A text, such as ``results/scaled-decisive.md.j2``, is a template of Jinja2:

    {% set at = stored("scaled-decisive") %}
    {% set uv = at(method="FedUV", alpha=0.05) %}
    FedUV is {{ uv.difference | aside }} points {{ uv.difference | side }} FedAvg ({{ uv | span }}): {{ uv.verdict }}.

``stored(file)`` holds the cells of a file in ``results``, and calling it returns a :class:`Quote`; its ``each`` returns
all quotes with some labels, ``coefficients`` the arguments of a method, and ``after(rounds)`` the same cells after some
rounds. ``paired(a.values, b.values)`` compares two quotes in equal seeds, ``differences`` lists the differences by
seed, and ``spearman`` is the rank correlation of two lists, which ``spearman_interval`` resamples. Unknown names,
labels and numbers are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import stdev

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from protocol_variants import MARGIN, consistency, fits  # next to this file
from scipy.stats import spearmanr

from fl_lightning.bench import Cell, Suite
from fl_lightning.bench.comparison import Comparison, suite_comparison
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.shows import SHOWS, ComparedRun, Last
from fl_lightning.bench.statistics import Difference, decision, paired_difference, verdict
from fl_lightning.storage.metric_format import fixed
from fl_lightning.utilities.errors import require

# points between our baseline and the published one up to which a claim counts as tested
MOST_APART = 3.0
# by seed
Numbers = dict[int, float]


@dataclass(frozen=True)
class Quote:
    """Cells that differ in their seed alone, as one table shows them.

    Attributes:
        labels: their label on each axis.
        values: the number of each seed.
        gains: its difference to the baseline.
        compared: the mean of the differences with its interval.
        verdict: what became of the published difference, or how the cells stand to the baseline.
        needed: about how many seeds would decide it; None where it is decided, or nothing tells.
        published: the published number.
        gain_published: the published difference.
        results: results of the cells by seed.
        baseline: the baseline's mean over the seeds of the pairs.
        student: Student's interval, where a suite that decides has spent all its seeds.
        holm: p-value of the difference, corrected for all comparisons of the table.
        student_holm: the same by Student's test, where there is ``student``.
    """

    labels: Mapping[str, str]
    values: Numbers
    gains: Numbers
    compared: Difference | None
    verdict: str
    needed: int | None
    published: float | None
    gain_published: float | None
    results: Mapping[int, CellResult]
    baseline: float | None
    student: tuple[float, float] | None
    holm: float | None
    student_holm: float | None

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return sum(self.values.values()) / len(self.values)

    @property
    def deviation(self) -> float:
        """Their standard deviation, with n - 1 in the denominator."""
        return stdev(self.values.values())

    @property
    def difference(self) -> float:
        """The mean difference to the baseline."""
        assert self.compared is not None
        return self.compared.mean

    @property
    def interval(self) -> tuple[float, float]:
        """Its interval."""
        assert self.compared is not None
        assert self.compared.interval is not None
        return self.compared.interval

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return self.compared.n if self.compared else 0

    @property
    def above(self) -> int:
        """Number of seeds in which it is above the baseline."""
        return sum(gain > 0 for gain in self.gains.values())

    @property
    def below(self) -> int:
        """Number of seeds in which it is below the baseline."""
        return sum(gain < 0 for gain in self.gains.values())

    def metric(self, tag: str) -> Numbers:
        """A metric of the last round, by seed."""
        return {seed: result.metrics[tag] for seed, result in self.results.items()}


@dataclass(frozen=True)
class Fit:
    """The distance of one interpretation of an ambiguous source from its published numbers, by one score.

    Attributes:
        reading: its name.
        score: the score.
        numbers: the number of published numbers and differences that have been compared.
        within: the number of them within the margin.
        farthest: the largest deviation of a number.
        farthest_gain: the largest deviation of a difference; None without compared differences.
        ruled_out: whether it is inconsistent with any of them, independently of the waiting cells.
    """

    reading: str
    score: str
    numbers: int
    within: int
    farthest: float
    farthest_gain: float | None
    ruled_out: bool


class Stored:
    """The cells of one file.

    Args:
        suite: their suite.
        cells: the cells.
        results: their results, by digest.
    """

    def __init__(self, suite: Suite, cells: list[Cell], results: Mapping[str, CellResult]) -> None:
        self.suite, self.cells, self.results = suite, cells, results
        self._comparison = cache(self._compare)

    @property
    def done(self) -> int:
        """Number of finished cells."""
        return sum(result.state == "done" for result in self.results.values())

    @property
    def hours(self) -> float:
        """Hours of training in the rounds of the finished cells."""
        return hours(self.results.values())

    def ended(self, **labels: str) -> list[dict[str, str]]:
        """Return the labels and the state, done or failed, of each run that has ended and has some labels."""
        runs = [{**cell.labels, "state": self.results[cell.digest].state} for cell in self.cells]
        return [run for run in runs if run["state"] in ("done", "failed") and labels.items() <= run.items()]

    @property
    def comparisons(self) -> list[Comparison]:
        """The tables of the suite."""
        return [suite_comparison(self.suite, table, self.cells, self.results) for table in self.suite.tables]

    @property
    def fits(self) -> list[Fit]:
        """Return each reading of a suite under each score, without readings that have no finished cell."""
        made = []
        for (reading, score), parts in fits(self.comparisons).items():
            of_numbers, of_gains = (part.distances for part in parts)
            if of_numbers:
                counts = len(of_numbers + of_gains), sum(part.within() for part in parts)
                far = max(of_numbers), max(of_gains, default=None)
                made.append(Fit(reading, score, *counts, *far, "all" not in consistency(parts)))
        return made

    def coefficients(self, **labels: str) -> str:
        """The numbers that the methods and the server optimizer of some cells were given, such as ``mu 0.1``."""
        alike = (cell for cell in self.cells if labels.items() <= cell.labels.items())
        return " or ".join(dict.fromkeys(text for cell in alike if (text := coefficients(cell))))

    def after(self, rounds: int) -> Stored:
        """Return the same cells with their values of the first rounds alone; ``metric`` still gives the last round."""
        early = {
            digest: replace(result, values={at: value for at, value in result.values.items() if at < rounds})
            for digest, result in self.results.items()
        }
        return Stored(self.suite, self.cells, early)

    def __call__(self, show: str | None = None, k: int | None = None, **labels: object) -> Quote:
        """Return the cells with these labels; an axis with a single label is optional.

        Args:
            show: the table, by its quantity; by default the first one.
            k: the number of last rounds, for ``last``.
            labels: a label on each axis, and the ``score`` of a table of scores.

        Raises:
            UsageError: no entry of the table has these labels, or several have.
        """
        quotes = self._quotes(show, k, labels)
        where = f"{self.suite.name}: {show or 'the first table'}"
        require(len(quotes) == 1, where, labels, "give labels that one entry of the table has")
        return quotes[0]

    def each(self, show: str | None = None, k: int | None = None, **labels: object) -> list[Quote]:
        """All entries of a table that have these labels and a number, with the baseline; see the call."""
        return [quote for quote in self._quotes(show, k, labels) if quote.values]

    def _quotes(self, show: str | None, k: int | None, labels: Mapping[str, object]) -> list[Quote]:
        comparison = self._comparison(show or self.suite.tables[0].show.name, k)
        wanted = {axis: str(label) for axis, label in labels.items()}
        alike: dict[tuple[str, ...], list[ComparedRun]] = {}
        for number in comparison.numbers:
            if wanted.items() <= number.labels.items():
                alike.setdefault(tuple(number.labels.values()), []).append(number)
        return [self._quote(numbers, comparison) for numbers in alike.values()]

    def _compare(self, show: str, k: int | None) -> Comparison:
        shown = Last(k) if k is not None else SHOWS[show]()
        alike = (table for table in self.suite.tables if table.show.name == show and (k is None or table.show == shown))
        # scores and other numbers of the same cells need no separate table
        table = next(alike, replace(self.suite.tables[0], show=shown, published={}))
        return suite_comparison(self.suite, table, self.cells, self.results)

    @staticmethod
    def _quote(numbers: list[ComparedRun], comparison: Comparison) -> Quote:
        labels, table = numbers[0].labels, comparison.table
        row, column = (tuple(labels[axis] for axis in axes) for axes in (table.rows, table.columns))
        entry = comparison.entries[row, column]
        verdict = entry.verdict or (decision(entry.difference) if entry.difference else "")
        if comparison.is_undecided_by_holm(entry):
            verdict = verdict and "undecided"
        return Quote(
            labels,
            {number.seed: number.value for number in numbers if number.value is not None},
            {number.seed: number.pair[0] - number.pair[1] for number in numbers if number.pair},
            entry.difference,
            verdict,
            entry.seeds,
            entry.published[0] if entry.published else None,
            entry.published_difference,
            {number.seed: number.result for number in numbers if number.state == "done"},
            entry.baseline,
            entry.student.interval if entry.student else None,
            entry.holm,
            entry.student_holm,
        )


def coefficients(cell: Cell) -> str:
    """The numbers among the arguments of a cell's methods and of its server optimizer."""
    given = [*cell.config.get("method", []), cell.config.get("trainer", {}).get("server_optimizer")]
    arguments = [pair for one in given if isinstance(one, Mapping) for pair in one.get("init_args", {}).items()]
    numbers = [(name, value) for name, value in arguments if type(value) in (int, float)]
    return ", ".join(f"{name.rstrip('_')} {value:g}" for name, value in numbers)


def hours(results: Iterable[CellResult]) -> float:
    """Hours of training in the rounds of finished cells, also of those that were not evaluated."""
    done = [result for result in results if result.state == "done" and result.values]
    return sum((result.seconds or 0) * (max(result.values) + 1) for result in done) / 3600


def paired(one: Numbers, other: Numbers, confidence: float = 0.95) -> Difference:
    """The mean difference of two series on equal seeds, with Student's interval."""
    pairs = [(one[seed], other[seed]) for seed in differences(one, other)]
    difference = paired_difference(pairs, "t", confidence)
    require(difference is not None, "paired", (one, other), "give series that have a seed in common")
    assert difference is not None
    return difference


def differences(one: Numbers, other: Numbers) -> Numbers:
    """The differences of two series on equal seeds."""
    return {seed: one[seed] - other[seed] for seed in one if seed in other}


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The rank correlation of two lists."""
    return float(spearmanr(one, other).statistic)


def spearman_interval(one: Sequence[float], other: Sequence[float], draws: int) -> tuple[float, float]:
    """The 95 % bootstrap percentile interval of the rank correlation of two lists; equal lists give equal intervals."""
    pairs, rng = np.array([one, other]), np.random.default_rng(0)
    samples = rng.integers(len(one), size=(draws, len(one)))
    low, high = np.nanquantile([spearmanr(*pairs[:, rows]).statistic for rows in samples], [0.025, 0.975])
    return float(low), float(high)


def gains_together(quotes: Sequence[Quote], baseline: Quote, tag: str) -> tuple[list[float], list[float]]:
    """The mean gains over the baseline in the number of the table, and in a metric of the last round on equal seeds."""
    gains = [paired(quote.metric(tag), baseline.metric(tag)).mean for quote in quotes]
    return [quote.difference for quote in quotes], gains


def differing(quotes: Sequence[Quote], baseline: Quote, tag: str, unit: float = 1, digits: int = 1) -> str:
    """The methods whose metric differs from the baseline's by Student's interval, with the difference."""
    found = {quote.labels["method"]: paired(quote.metric(tag), baseline.metric(tag)) for quote in quotes}
    texts = []
    for method, difference in found.items():
        low, high = difference.interval or (0, 0)
        if low > 0 or high < 0:
            mean, *ends = (signed(unit * value, digits) for value in (difference.mean, low, high))
            texts.append(f"{method} ({mean}, {' to '.join(ends)})")
    return listed(texts)


def only_by_student(quotes: Sequence[Quote]) -> str:
    """The comparisons that the sequence does not decide, where Student's interval of all seeds excludes 0."""
    texts = []
    for quote in quotes:
        low, high = quote.student or (0, 0)
        if quote.verdict not in ("above", "below") and (low > 0 or high < 0):
            texts.append(f"{quote.labels['method']} at {quote.labels['alpha']} ({signed(low)} to {signed(high)})")
    return listed(texts)


def listed(words: Iterable[object]) -> str:
    """Join words with commas and an ``and``; an empty list becomes ``none``."""
    *first, last = [str(word) for word in words] or ["none"]
    return f"{', '.join(first)} and {last}" if first else last


def plain(value: float, digits: int = 1) -> str:
    """A number with its decimals; never -0."""
    return f"{value:.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign."""
    return fixed(value, digits, "+")


def p_value(value: float) -> str:
    """A p-value with three decimals, ``0.021`` or ``< 0.001``."""
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def span(what: Quote | Difference | Numbers | Sequence[float], digits: int = 1, sign: bool | None = None) -> str:
    """The interval of a difference, ``-0.6 to +4.4``; or the least and the largest of numbers, ``25.7 to 28.2``."""
    if isinstance(what, Mapping):
        what = list(what.values())
    ends = (min(what), max(what)) if isinstance(what, Sequence) else what.interval
    assert ends is not None
    # differences have a sign by default
    form = signed if sign or (sign is None and not isinstance(what, Sequence)) else plain
    return " to ".join(form(end, digits) for end in ends)


def chosen(coefficients: str) -> str:
    """The coefficients that were tuned, without the other arguments of a method or a server optimizer."""
    fixed_ones = ("temperature", "layers", "lambda", "floor", "dampening", "beta1", "beta2", "tau 0.001", "initial_v")
    tuned = [text for text in coefficients.split(", ") if not text.startswith(fixed_ones)]
    return ", ".join(text for text in tuned if len(tuned) == 1 or text != "lr 1")


def outcome(primary: Quote, final: Quote, reference: Quote) -> str:
    """What became of a claim: one of the five words by the primary endpoint, or ``untested``.

    Args:
        primary: the method, by the endpoint that was stated before the first run.
        final: the method after the last round, with the published numbers.
        reference: the baseline after the last round. A claim is untested where it is more than 3 points from the
            published accuracy, since the protocols then differ too much.
    """
    if reference.published is None or abs(reference.mean - reference.published) > MOST_APART:
        return "untested"
    word = verdict(primary.compared, final.gain_published)
    shown = primary.holm is not None and primary.holm < 0.05
    return word if word in ("undecided", "no difference") or shown else "undecided"  # type: ignore[return-value]


def quoted(text: str, stored: Callable[[str], Stored], folder: Path, names: Sequence[str]) -> str:
    """A text with its numbers.

    Args:
        text: the template.
        stored: gives the cells of a file in ``results``, by the name of its suite and scale.
        folder: folder of the templates that it imports.
        names: names of all files of cells.
    """
    how = {"undefined": StrictUndefined, "keep_trailing_newline": True, "trim_blocks": True}
    made = Environment(loader=FileSystemLoader(folder), **how)  # type: ignore[arg-type]
    made.globals |= {"stored": cache(stored), "names": names, "paired": paired, "differences": differences}
    made.globals |= {"outcome": outcome, "margin": MARGIN}
    made.globals |= {"spearman": spearman, "spearman_interval": spearman_interval}
    made.globals |= {"gains_together": gains_together, "differing": differing, "only_by_student": only_by_student}
    made.filters |= {
        "plain": plain,
        "signed": signed,
        "span": span,
        "listed": listed,
        "aside": lambda value, digits=1: plain(abs(value), digits),
        "side": lambda value: "above" if value > 0 else "below",
        "p_value": p_value,
        "chosen": chosen,
    }
    return made.from_string(text).render()
