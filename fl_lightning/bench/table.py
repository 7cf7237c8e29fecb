"""The tables of a suite as Markdown, LaTeX and CSV."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from fl_lightning.bench.cell import Cell
from fl_lightning.bench.cells_csv import cells_csv, in_columns
from fl_lightning.bench.comparison import NOT_COMPARED, Comparison, Part, TableEntry, suite_comparison
from fl_lightning.bench.config_fragments import write_text
from fl_lightning.bench.results import CellResult, CellState, waiting, with_notes
from fl_lightning.bench.shows import ByScore, Fair, Rank, Seconds
from fl_lightning.bench.statistics import MOST_SEEDS, Decision, Difference, Verdict
from fl_lightning.bench.suite import Suite
from fl_lightning.bench.table_rendering import (
    DAGGER,
    NONE,
    PACKAGES,
    STAR,
    StyledText,
    TextTable,
    in_markdown,
    latex_tables,
    markdown,
    plain_table,
)
from fl_lightning.storage.metric_format import fixed
from fl_lightning.utilities.errors import count, require

TableForm = Literal["md", "tex", "csv"]
FORMS: tuple[TableForm, ...] = get_args(TableForm)
STATES_OF_CELLS = ("done", "nan", "failed", "running", "waiting")
VERDICTS = tuple(dict.fromkeys((*get_args(Verdict), *get_args(Decision), NOT_COMPARED)))
# pairs of rows in a sentence at most
MOST_PAIRS = 10
AT_THIS_SCALE = " at this scale"


def render(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult], form: TableForm = "md") -> str:
    """Return the tables of a suite.

    Args:
        suite: the suite.
        cells: cells to show.
        results: results by the digest of the cell; a cell without one waits.
        form: ``md`` for Markdown, ``tex`` for LaTeX, ``csv`` for a line for each number.

    Raises:
        UsageError: the form is unknown.
    """
    require(form in FORMS, "form", form, "unknown form; available: md, tex, csv")
    results = with_notes(cells, results)
    comparisons = [suite_comparison(suite, table, cells, results) for table in suite.tables]
    if form == "csv":
        return comparisons_csv((None, comparison) for comparison in comparisons)
    lines = list(about(suite, cells, results))
    parts = suite_tables(suite, comparisons)
    if form == "tex":
        comments = filter(None, (line.lstrip("#- ") for line in lines))
        tables = latex_tables(table for _, of_part, _ in parts for table in of_part)
        return "\n".join([PACKAGES, *(f"% {comment}" for comment in comments), *tables])
    for title, of_part, below in parts:
        lines += [f"## {in_markdown(title)}", ""]
        for table in of_part:
            lines += markdown(table)
        lines += map(in_markdown, below)
    return "\n".join(lines)


def suite_tables(suite: Suite, comparisons: Sequence[Comparison]) -> Iterator[tuple[str, list[TextTable], list[str]]]:
    """Yield the title of each part of a suite's tables, its tables and the lines below them.

    Args:
        suite: the suite.
        comparisons: its tables.
    """
    for comparison in comparisons:
        tables = []
        for text_table in text_tables(comparison):
            tables.append(replace(text_table, key=f"{suite.name}-{text_table.key}"))
        table = comparison.table
        title = table.caption or first_upper(comparison.title)
        if table.page is not None:
            page = f"page {table.page} of the source" if str(table.page).isdigit() else table.page
            title = f"{title} ({page})"
        yield title, tables, list(summary_lines(comparison))


def write_tables(
    suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult], folder: str | Path
) -> list[Path]:
    """Write the tables of a suite as ``<suite>.table.md``, ``.tex`` and ``.csv``, its cells as ``<suite>.cells.csv``.

    The file names of scaled tables end in their scale, so that tables of two scales do not replace each other.

    Returns:
        The files.
    """
    scale = cells[0].scale if cells else 1.0
    stem = suite.name if scale == 1 else f"{suite.name}_scale{scale:g}"
    texts = {f"{stem}.table.{form}": render(suite, cells, results, form) for form in FORMS}
    texts[f"{stem}.cells.csv"] = cells_csv(suite, cells, results)
    return [write_text(Path(folder) / name, text) for name, text in texts.items()]


def about(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> Iterator[str]:
    """Yield the lines above the tables: title, source, progress, machines, and notes on the source."""
    yield from (f"# {in_markdown(suite.title)}", "")
    if suite.source:
        yield from (f"Source: {in_markdown(suite.source)}", "")
    yield from (f"{len(cells)} cells: {count_states(cells, results)}.", "")
    results_of_cells = [results[cell.digest] for cell in cells if cell.digest in results]
    machines = sorted({result.machine for result in results_of_cells} - {""})
    if machines:
        yield from (f"Run on {in_markdown('; '.join(machines))}.", "")
    if suite.notes:
        yield from ("Details that the source does not state, and our choices:", "")
        yield from (*(f"- {in_markdown(note)}" for note in suite.notes), "")


def count_states(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> str:
    """Return the number of cells in each state."""
    states = Counter(results.get(cell.digest, waiting(cell)).state for cell in cells)
    order: tuple[CellState, ...] = ("done", "running", "waiting", "failed")
    return ", ".join(f"{states[state]} {state}" for state in order if states[state])


def text_tables(comparison: Comparison) -> Iterator[TextTable]:
    """Yield the table of our numbers and the published numbers, and the table of differences to the baseline."""
    notes: dict[str, str] = {}
    entries = comparison.entries.values()
    published = any(entry.published for entry in entries)
    inner = ["ours", "paper"] if published else []
    groups = [(column_name(comparison, column), inner) for column in comparison.columns]
    lines = []
    for row in comparison.rows:
        line = [StyledText(label) for label in row]
        for column in comparison.columns:
            entry = comparison.entries.get((row, column))
            line.append(ours(entry, comparison, footnotes(entry.notes, notes)) if entry else StyledText(NONE))
            if published:
                line.append(StyledText(published_text(entry, comparison)))
        lines.append(line)
    mean = overall(comparison) if isinstance(comparison.table.show, Rank) and len(groups) > 1 else {}
    if mean:
        groups.append(("mean of the columns", ["ours", ""] if published else []))
        for row, line in zip(comparison.rows, lines, strict=True):
            line += [StyledText(mean.get(row, NONE)), *([StyledText("")] if published else [])]
    table = comparison.table
    yield TextTable(caption_of(comparison), table.rows, groups, lines, notes, table.caption, key=table.show.name)
    if comparison.criteria.baseline and not isinstance(table.show, Fair) and any(map(differs, entries)):
        yield differences_table(comparison, notes)


def published_text(entry: TableEntry | None, comparison: Comparison) -> str:
    """Return the published mean and its deviation, if it is known; a dash without a published number."""
    if entry is None or entry.published is None:
        return NONE
    mean, deviation = entry.published
    text = number_text(mean, comparison)
    return text if deviation is None else f"{text} ± {number_text(deviation, comparison)}"


def footnotes(texts: Iterable[str], notes: dict[str, str]) -> tuple[str, ...]:
    """Return the numbers of footnotes, and add the footnotes to ``notes``; equal footnotes share a number."""
    numbers = {note: number for number, note in notes.items()}
    marks = tuple(numbers.setdefault(text, str(len(numbers) + 1)) for text in texts)
    notes.update({number: note for note, number in numbers.items()})
    return marks


def ours(entry: TableEntry, comparison: Comparison, marks: tuple[str, ...]) -> StyledText:
    """Return our mean and deviation, with the number of seeds if some are missing, or the states of the cells."""
    states = [state for state in STATES_OF_CELLS[1:] if entry.states[state]]
    pending = [f"{entry.states[state]} {state}" for state in states]
    if entry.ours is None:
        text = states[0] if len(states) == 1 else ", ".join(pending)
        return StyledText(text or NONE, marks=marks)
    text = number_text(entry.ours.mean, comparison, entry.bound)
    if entry.ours.deviation is not None and not entry.bound:
        text += f" ± {number_text(entry.ours.deviation, comparison)}"
    if comparison.criteria.decide is not None:
        states_of_begun = [state for state in pending if "waiting" not in state]
        text += f" ({', '.join([count(entry.ours.n, 'seed'), *states_of_begun])})"
    elif entry.ours.n < entry.cells:
        text += f" ({', '.join([f'{entry.ours.n} of {entry.cells} seeds', *pending])})"
    signs = [DAGGER] if entry.scale != 1 else []
    if significant(entry):
        signs.append(STAR)
    return StyledText(text, entry.best, (*signs, *marks))


def significant(entry: TableEntry) -> bool:
    """Return whether the interval of an entry's difference to the baseline excludes 0."""
    interval = entry.difference.interval if entry.difference else None
    return interval is not None and (interval[0] > 0 or interval[1] < 0)


def number_text(value: float, comparison: Comparison, bound: bool = False) -> str:
    """Return a number as its table shows it."""
    text = comparison.table.show.text(value, comparison.criteria)
    return f"> {text}" if bound else text


def overall(comparison: Comparison) -> dict[Part, str]:
    """Return the mean rank of each row over the columns, for rows with a rank in each column."""
    texts = {}
    for row in comparison.rows:
        entries = [comparison.entries.get((row, column)) for column in comparison.columns]
        means = [entry.ours.mean for entry in entries if entry and entry.ours]
        if len(means) == len(entries):
            texts[row] = number_text(sum(means) / len(means), comparison)
    return texts


def differs(entry: TableEntry) -> bool:
    """Return whether an entry has a row in the table of differences."""
    return entry.difference is not None or entry.verdict == NOT_COMPARED


def differences_table(comparison: Comparison, notes: Mapping[str, str]) -> TextTable:
    """Return the differences to the baseline, one line for each row and column; footnotes continue ``notes``."""
    criteria, table, decide = comparison.criteria, comparison.table, comparison.criteria.decide
    all_notes = dict(notes)
    entries = comparison.entries.values()
    has_verdicts = bool(table.published) or any(entry.verdict for entry in entries)
    heads = ["difference", f"{100 * criteria.confidence:g} % interval", "pairs = looks" if decide else "pairs"]
    if decide:
        heads += [f"Student's, {decide.max_seeds} pairs, post hoc", "its p by Holm"]
    heads.append("p by Holm")
    if decide:
        heads.append(f"{criteria.baseline_name}, same seeds")
    if table.published:
        heads.append("paper's difference")
    if has_verdicts:
        heads.append("verdict")
    lines = []
    for row, column in itertools.product(comparison.rows, comparison.columns):
        entry = comparison.entries.get((row, column))
        if entry is None or not differs(entry):
            continue
        labels = [*row, *(label for _, label in of_columns(comparison, column))]
        line = [*map(StyledText, labels), *difference_texts(entry, comparison, all_notes)]
        if table.published:
            line.append(StyledText(signed(entry.published_difference, comparison)))
        if has_verdicts:
            line.append(StyledText(verdict_text(entry)))
        lines.append(line)
    axes = (*table.rows, *(axis for axis, _ in of_columns(comparison, comparison.columns[0])))
    new_notes = {number: note for number, note in all_notes.items() if number not in notes}
    caption = caption_of_differences(comparison)
    return plain_table(caption, axes, heads, lines, notes=new_notes, key=f"{table.show.name}-differences")


def caption_of_differences(comparison: Comparison) -> str:
    """Return the caption of a table of differences."""
    criteria, decide = comparison.criteria, comparison.criteria.decide
    compared = sum(entry.difference is not None for entry in comparison.entries.values())
    by_holm = f"p by Holm is for all {compared} comparisons of this table together."
    about = f"Difference to {criteria.baseline_name} on the same seeds and partitions, mean over the pairs"
    if not decide:
        return f"{about}; interval: Student's t, from two pairs on, for each pair by itself. {by_holm}"
    text = (
        f"{about} in the order of the seeds; the interval is a confidence sequence, which is valid at each look, "
        f"one after each pair. Its error of {100 * decide.alpha:g} % is per pair of rows in one setting, not per "
        f"table. Post hoc, since the plan names the sequence: Student's interval of {decide.max_seeds} pairs, "
        f"which is not valid with looks, and missing for pairs that ended earlier. {by_holm}"
    )
    return f"{text} No difference: within {decide.margin:g}." if comparison.table.show.is_of_metric else text


def verdict_text(entry: TableEntry) -> str:
    """Return the verdict on a published difference, with the number of seeds that would decide it."""
    if entry.published_difference == 0:
        return "none: equal in the paper"
    text = verdict_at_scale(entry) or NONE
    if entry.verdict == "undecided" and entry.seeds is not None:
        number = f"more than {MOST_SEEDS}" if entry.seeds > MOST_SEEDS else f"about {entry.seeds}"
        text += f", {number} seeds"
    return text


def difference_texts(entry: TableEntry, comparison: Comparison, notes: dict[str, str]) -> list[StyledText]:
    """Return our difference, its interval, number of pairs and p-value, with footnotes; dashes without a pair."""
    criteria, difference = comparison.criteria, entry.difference
    marks = footnotes((note for note in entry.notes if NOT_COMPARED in note), notes)
    mean, num_pairs = NONE, 0
    if difference is not None:
        mean, num_pairs = f"{difference.bound} {signed(difference.mean, comparison)}".strip(), difference.n
        if entry.scale != 1:
            marks = (DAGGER, *marks)
    texts = [StyledText(mean, marks=marks)]
    interval_marks = footnotes(difference.notes if difference else (), notes)
    texts += [StyledText(interval_text(difference, comparison), marks=interval_marks), StyledText(str(num_pairs))]
    if criteria.decide:
        student_p = p_text(entry.student_holm, entry.student)
        texts += [StyledText(interval_text(entry.student, comparison)), StyledText(student_p)]
    texts.append(StyledText(p_text(entry.holm, difference)))
    if criteria.decide:
        texts.append(StyledText(NONE if entry.baseline is None else number_text(entry.baseline, comparison)))
    return texts


def interval_text(difference: Difference | None, comparison: Comparison) -> str:
    """Return the interval of a difference; a dash without one."""
    if difference is None or difference.interval is None:
        return NONE
    return f"[{', '.join(signed(end, comparison) for end in difference.interval)}]"


def p_text(value: float | None, difference: Difference | None) -> str:
    """Return the p-value of a difference with three decimals; a dash for one without an interval."""
    if value is None or difference is None or difference.interval is None:
        return NONE
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def signed(value: float | None, comparison: Comparison) -> str:
    """Return a difference with its sign."""
    return NONE if value is None else fixed(value, comparison.table.show.decimals(comparison.criteria), "+")


def verdict_at_scale(entry: TableEntry) -> str:
    """Return the verdict with a remark on the scale; empty without a verdict."""
    if entry.scale == 1 or entry.verdict in ("", NOT_COMPARED):
        return entry.verdict
    return f"{entry.verdict}{AT_THIS_SCALE}"


def column_name(comparison: Comparison, column: Part) -> str:
    """Return the name of a column, such as ``alpha=0.1``, or the name of the numbers in a table of one column."""
    pairs = of_columns(comparison, column)
    labels = (label if axis == Fair.added_axis else f"{axis}={label}" for axis, label in pairs)
    return ", ".join(labels) or first_upper(comparison.title)


def of_columns(comparison: Comparison, column: Part) -> list[tuple[str, str]]:
    """Return the axes and labels of a column, without axes on which all columns have one label."""
    pairs = list(zip(comparison.table.columns, column, strict=True))
    num_labels = [len(set(labels)) for labels in zip(*comparison.columns, strict=True)]
    return [pair for pair, number in zip(pairs, num_labels, strict=True) if number > 1] or pairs


def caption_of(comparison: Comparison) -> str:
    """Return the caption of a table: its numbers, and how to read them."""
    criteria, table, entries = comparison.criteria, comparison.table, comparison.entries.values()
    seeds = max((entry.cells for entry in entries), default=0)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds != 1 else "of one seed"
    if criteria.decide is not None:
        over = "mean ± standard deviation over the seeds until the decision"
    texts = [f"{first_upper(comparison.title)}: {over}."]
    if any(entry.best for entry in entries):
        texts.append("Bold: best value of a column.")
    if any(entry.published for entry in entries):
        texts.append("Paper: published number.")
    for scale in sorted({entry.scale for entry in entries} - {1.0}):
        texts.append(f"{DAGGER} scaled: a run has about {scale:g} of the suite's work.")
    if any(map(significant, entries)):
        interval = f"{100 * criteria.confidence:g} % interval of the difference to {criteria.baseline_name}"
        texts.append(f"Star: the {interval} excludes 0, for each pair separately.")
    for column in comparison.columns[:1]:
        pairs, named = zip(table.columns, column, strict=True), of_columns(comparison, column)
        common = [f"{axis}={label}" for axis, label in pairs if (axis, label) not in named]
        if common:
            texts.append(f"All with {', '.join(common)}.")
    if any(entry.bound for entry in entries):
        texts += [
            "A run that misses the target counts with all its rounds, and > marks a lower bound of a mean.",
            "A pair in which both runs miss it does not count. If one run misses it, the difference is",
            "at least (>) or at most (<) the mean, without an interval, and omitted if it has both bounds.",
        ]
    return " ".join([*texts, *remarks(comparison)])


def remarks(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on how to read what a table shows."""
    show = comparison.table.show
    if isinstance(show, Seconds):
        yield from seconds_of_baseline(comparison)
    elif isinstance(show, ByScore):
        yield "All scores are of the same model."
        yield from order_by_score(comparison)
    elif isinstance(show, Fair):
        yield "Noise: what small test sets add to the variance."
        if "gain" in comparison.axes[show.added_axis]:
            yield "Gain, client by client, over Local with the same seed and partition: mean, least, and share of"
            yield "clients with a gain."
    elif isinstance(show, Rank):
        yield "1 is best; runs without a number have no rank."


def seconds_of_baseline(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence with the mean seconds of the baseline in each column, if there are any."""
    seconds: dict[str, list[float]] = {}
    for run in comparison.numbers:
        if comparison.criteria.is_baseline(run.labels) and run.value is not None and run.result.seconds:
            column = tuple(run.labels[axis] for axis in comparison.table.columns)
            seconds.setdefault(column_name(comparison, column), []).append(run.result.seconds)
    means = []
    for column_label, values in seconds.items():
        where = f" ({column_label})" if len(seconds) > 1 else ""
        means.append(f"{sum(values) / len(values):.3g} s{where}")
    if means:
        yield f"A round of {comparison.criteria.baseline_name} takes {', '.join(means)}."


def order_by_score(comparison: Comparison) -> Iterator[str]:
    """Yield the pairs of methods whose order by our means depends on the score, if there are any."""
    means = {place: entry.ours.mean for place, entry in comparison.entries.items() if entry.ours}
    columns_of: dict[Part, list[Part]] = {}
    for column in comparison.columns:
        columns_of.setdefault(column[:-1], []).append(column)
    names: dict[str, None] = {}
    for row_a, row_b in itertools.combinations(comparison.rows, 2):
        for columns in columns_of.values() if differ_in_method(row_a, row_b, comparison.table.rows) else ():
            places = [((row_a, column), (row_b, column)) for column in columns]
            measured = [pair for pair in places if means.keys() >= {*pair}]
            gaps = [means[at_a] - means[at_b] for at_a, at_b in measured]
            if any(gap > 0 for gap in gaps) and any(gap < 0 for gap in gaps):
                names[f"{', '.join(row_a)} and {', '.join(row_b)}"] = None
    if names:
        texts = [*names][:MOST_PAIRS]
        if len(names) > MOST_PAIRS:
            texts.append(f"{len(names) - MOST_PAIRS} more pairs")
        yield f"The order depends on the score of: {'; '.join(texts)}."


def differ_in_method(row_a: Part, row_b: Part, axes: Sequence[str]) -> bool:
    """Return whether two rows are of one setting, and so differ in the method alone; true for rows without methods."""
    if "method" not in axes:
        return True
    return all(a == b for axis, a, b in zip(axes, row_a, row_b, strict=True) if axis != "method")


def summary_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the number of columns with each verdict, by row."""
    lines = []
    for row in comparison.rows:
        entries = [entry for (labels, _), entry in comparison.entries.items() if labels == row]
        counts = Counter(entry.verdict for entry in entries)
        texts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
        if texts:
            lines.append(f"- {', '.join(row)}: {', '.join(texts)}")
    if lines:
        scaled = AT_THIS_SCALE if any(entry.scale != 1 for entry in comparison.entries.values()) else ""
        yield f"Verdicts relative to {comparison.criteria.baseline_name}{scaled}, as numbers of columns:"
        yield from ("", *lines, "")


def conclusion(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> str:
    """Return the first table in one sentence: the best row, its difference to the baseline, and the number of seeds."""
    if suite.offline:
        states = count_states(cells, results)
        return f"The suite was tried offline ({states}): its numbers mean nothing, and say nothing about a method."
    if not suite.tables:
        return "The suite has no table."
    comparison = suite_comparison(suite, suite.tables[0], cells, results)
    won = Counter(row for (row, _), entry in comparison.entries.items() if entry.best)
    if not won:
        return "No row is best: there are fewer than two with numbers, or they differ in partitions or seeds."
    best = max(comparison.rows, key=lambda row: won[row])
    column = next(column for (row, column), entry in comparison.entries.items() if row == best and entry.best)
    text = f"{', '.join(best)} has the best {comparison.title}"
    if len(comparison.columns) > 1:
        columns = count(len(comparison.columns), "column")
        text += f" in {won[best]} of {columns}, such as {column_name(comparison, column)}"
    entry = comparison.entries[best, column]
    assert entry.ours is not None  # only a number is best
    text += f": {number_text(entry.ours.mean, comparison)} over {count(entry.ours.n, 'seed')}"
    if entry.difference is not None:
        text += f", {difference_in_words(entry, comparison)} to {comparison.criteria.baseline_name}"
    else:
        # the baseline is best: the row nearest to it
        rows = [row for row in comparison.rows if row != best]
        entries = {row: comparison.entries[row, column] for row in rows if (row, column) in comparison.entries}
        means = {row: entry.difference.mean for row, entry in entries.items() if entry.difference}
        if means:
            sign = 1 if comparison.table.show.lower_is_better(comparison.criteria) else -1
            near = min(means, key=lambda row: sign * means[row])
            text += f"; to it, {', '.join(near)} has {difference_in_words(entries[near], comparison)}"
    return f"{text}."


def difference_in_words(entry: TableEntry, comparison: Comparison) -> str:
    """Return the difference of an entry to the baseline with its interval."""
    difference = entry.difference
    assert difference is not None
    mean = f"{difference.bound} {signed(difference.mean, comparison)}".strip()
    if difference.interval is None:
        return f"{mean} (without an interval, undecided)"
    low, high = difference.interval
    ends = ", ".join(signed(end, comparison) for end in (low, high))
    undecided = ", undecided" if low <= 0 <= high else ""
    if not undecided and comparison.is_undecided_by_holm(entry):
        undecided = ", undecided after Holm's correction"
    return f"{mean} ({100 * comparison.criteria.confidence:g} % interval [{ends}]{undecided})"


def comparisons_csv(comparisons: Iterable[tuple[str | None, Comparison]]) -> str:
    """Return CSV with a line for each row and column of each table, numbers unrounded; titles have a first column."""
    lines = list[dict[str, Any]]()
    for number, (title, comparison) in enumerate(comparisons, 1):
        title_column = {} if title is None else {"title": title}
        lines += ({**title_column, **line} for line in csv_lines(number, comparison))
    # a table of scores has an additional column, and other suites have other axes
    longest: Mapping[str, Any] = max(lines, key=len, default={})
    columns = dict.fromkeys(column for line in (longest, *lines) for column in line)
    return in_columns(list(columns), lines)


def csv_lines(at: int, comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the lines of one table for a CSV file."""
    criteria = comparison.criteria
    for entry in comparison.entries.values():
        difference, published = entry.difference, entry.published or (None, None)
        low, high = difference.interval if difference and difference.interval else (None, None)
        student_low, student_high = (entry.student.interval if entry.student else None) or (None, None)
        of_pairs = {"student_low": student_low, "student_high": student_high}
        of_pairs |= {"student_p_holm": entry.student_holm, "baseline_mean": entry.baseline}
        notes = "; ".join([*entry.notes, *(difference.notes if difference else ())])
        yield {
            **{"table": at, "caption": comparison.table.caption, "shows": comparison.title},
            **{axis: entry.labels[axis] for axis in comparison.axes},
            **{"seeds": entry.cells, **{state: entry.states[state] for state in STATES_OF_CELLS}},
            "n": entry.ours.n if entry.ours else 0,
            "mean": entry.ours.mean if entry.ours else None,
            "deviation": entry.ours.deviation if entry.ours else None,
            "lower_bound": entry.bound,
            "pairs": difference.n if difference else 0,
            "difference": difference.mean if difference else None,
            **{"low": low, "high": high},
            "bound": difference.bound if difference else "",
            **{"interval": criteria.interval, "confidence": criteria.confidence},
            **{"published": published[0], "published_deviation": published[1]},
            "published_difference": entry.published_difference,
            "p_holm": entry.holm,
            **(of_pairs if criteria.decide else {}),
            "verdict": verdict_at_scale(entry),
            **{"seeds_to_decide": entry.seeds, "scale": entry.scale, "notes": notes},
        }


def first_upper(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]
