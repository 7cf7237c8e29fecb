"""Reading a suite from its YAML file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fl_lightning.bench.fragments import Fragment, fragments_of, nested_config
from fl_lightning.bench.statistics import half_width
from fl_lightning.bench.suite import (
    OF_METRIC,
    READING,
    SCORE,
    SCORES,
    SHOWS,
    Choice,
    Decide,
    Labels,
    Open,
    Suite,
    Table,
    file_part,
)
from fl_lightning.errors import UsageError, printable, require
from fl_lightning.packaged import packaged_config
from fl_lightning.yaml_files import read_yaml

# the kinds of the values of a suite's keys, as YAML gives them
KINDS_OF_KEYS: dict[str, tuple[type, str]] = {
    "axes": (Mapping, "give a mapping of axes to their labels"),
    "baseline": (Mapping, "give a mapping of axes to labels"),
    "names": (Mapping, "give a mapping of labels, axes or the metric to what tables call them"),
    "metric": (str, "give the tag of a metric, such as test/accuracy"),
    "minimize": (bool, "give true or false"),
    "percent": (bool, "give true or false"),
    **dict.fromkeys(("notes", "overrides", "exclude", "tables"), (list, "give a list")),
}

# the key of a config in whose place each cell has a seed of the suite
SEED = "seed_everything"
ONE_LINE = "give names and labels of one line, without control characters"


def load_suite(path: str | Path) -> Suite:
    """Read a suite from a YAML file, or by its name from the package; paths are relative to the file that has them.

    Raises:
        UsageError: the file or one that it names cannot be read, or a key or label is not known.
    """
    found = Path(path) if os.path.exists(path) else packaged_config(path)
    hint = "there is no such file; give another, or a suite of the package, such as feduv/table1"
    require(found is not None, "SUITE", str(path), hint)
    path = found or Path(path)
    raw = read_yaml(path)
    keys = [field.name for field in fields(Suite) if field.name != "path"]
    if isinstance(raw, Mapping) and "axes" not in raw and {"data", "model", "method", "trainer"} & set(raw):
        raise UsageError(f"{path}: is a config, not a suite; run it with fit --config {path}")
    check_keys(raw, keys, str(path))
    for key in ("base", "axes"):
        require(key in raw, f"{path}: {key}", None, "a suite needs this key")
    for key, value in raw.items():
        kind, hint = KINDS_OF_KEYS.get(key, (object, ""))
        require(isinstance(value, kind) and (key != "axes" or bool(value)), f"{path}: {key}", value, hint)
    axes = {str(axis): suite_axis(axis, value, path) for axis, value in raw["axes"].items()}
    overrides = []
    for override in raw.get("overrides", ()):
        check_keys(override, ["when", "config"], f"{path}: overrides")
        for key in ("when", "config"):
            require(key in override, f"{path}: overrides.{key}", None, "give it: {when: {AXIS: LABEL}, config: ...}")
        when = read_choice(override["when"], f"{path}: overrides.when")
        overrides.append((when, seedless(override["config"], path, f"{path}: overrides.config")))
    decide = None if raw.get("decide") is None else read_decide(raw, path)
    sequence: dict[str, Any] = {"interval": "sequence", "confidence": 1 - decide.alpha} if decide else {}
    suite = Suite(
        **sequence,
        open=None if raw.get("open") is None else read_open(raw["open"], path),
        decide=decide,
        **{key: raw[key] for key in ("metric", "minimize", "percent", "interval", "confidence", "tune") if key in raw},
        path=path,
        title=printable(str(raw.get("title", path.stem))),
        source=printable(str(raw.get("source", ""))),
        notes=tuple(printable(str(note)) for note in raw.get("notes", ())),
        base=tuple(fragments_of(raw["base"], path, f"{path}: base")),
        axes=axes,
        seeds=read_seeds(raw.get("seeds", 1), f"{path}: seeds"),
        overrides=tuple(overrides),
        exclude=tuple(read_choice(when, f"{path}: exclude") for when in raw.get("exclude", ())),
        names={str(known): printable(str(shown)) for known, shown in raw.get("names", {}).items()},
        baseline=strings(raw.get("baseline", {"method": "FedAvg"} if "FedAvg" in axes.get("method", {}) else {})),
        tables=tuple(suite_table(table, axes, path) for table in raw.get("tables", [{}])),
    )
    require(suite.name.isprintable(), "SUITE", str(path), "give the file and its folder names that can be printed")
    check_suite(suite)
    return suite


def suite_axis(axis: str, value: Any, path: Path) -> dict[str, tuple[Fragment, ...]]:
    """The fragments of each label of an axis: a mapping, a file that holds one, or a key with its values."""
    if isinstance(value, str):
        inner = path.parent / value
        return suite_axis(axis, read_yaml(inner), inner)
    require(axis.isprintable(), f"{path}: axes.{printable(axis)}", axis, ONE_LINE)
    return labelled_fragments(value, path, f"{path}: axes.{axis}")


def labelled_fragments(value: Any, path: Path, where: str) -> dict[str, tuple[Fragment, ...]]:
    """Fragments by label: from a mapping, or a key with its values."""
    hint = "give a mapping of labels to configs, or {key: ..., values: [...]}"
    require(isinstance(value, Mapping) and len(value) > 0, where, value, hint)
    parts: list[tuple[str, tuple[Fragment, ...]]]
    if "key" in value:
        check_keys(value, ["key", "values"], where)
        key, values = value["key"], value.get("values")
        require(isinstance(key, str), f"{where}.key", key, "give the key of the config that has the values")
        hint = "give a list of one or more values"
        require(isinstance(values, list) and len(values) > 0, f"{where}.values", values, hint)
        parts = [(str(value), seedless(nested_config(key, value), path, where)) for value in values]
    else:
        parts = [
            (str(label), seedless(config, path, f"{where}.{printable(str(label))}")) for label, config in value.items()
        ]
    labels = [label for label, _ in parts]
    for label in labels:
        require(label.isprintable(), where, label, ONE_LINE)
    distinct = len({file_part(label) for label in labels}) == len(labels)
    require(distinct, where, labels, "give labels whose letters and digits differ")
    return dict(parts)


def seedless(value: Any, path: Path, where: str) -> tuple[Fragment, ...]:
    """Fragments of some cells, which have the seeds of the suite."""
    parts = tuple(fragments_of(value, path, where))
    seeds, hint = [part[SEED] for part in parts if SEED in part], "is ignored; leave it out, and give the key seeds"
    require(not seeds, f"{where}.{SEED}", next(iter(seeds), None), hint)
    return parts


def read_seeds(value: Any, where: str) -> tuple[int, ...]:
    """Seeds from a list, or the first few from their number."""
    seeds = range(value) if type(value) is int else value
    good = isinstance(seeds, (range, list)) and len(seeds) > 0 and all(type(seed) is int for seed in seeds)
    require(good and len(set(seeds)) == len(seeds), where, value, "give their number, or a list of distinct integers")
    return tuple(seeds)


def read_decide(raw: Mapping[str, Any], path: Path) -> Decide:
    """What a suite says under its key ``decide``."""
    given, where = raw["decide"], f"{path}: decide"
    check_keys(given, [field.name for field in fields(Decide)], where)
    for key in ("interval", "confidence"):
        require(key not in raw, f"{path}: {key}", raw.get(key), "leave it out: decide has its own interval, and alpha")

    def number(key: str) -> bool:
        return type(given.get(key, 1)) in (int, float) and 0 < given.get(key, 1) < 1e150

    unit = "give the largest difference that does not matter, above 0, in the unit of the tables, such as 1.6"
    require("margin" in given and number("margin"), f"{where}.margin", given.get("margin"), unit)
    hint = "give the likely size of a difference in its standard deviations, above 0, such as 1"
    require(number("prior_scale"), f"{where}.prior_scale", given.get("prior_scale"), hint)
    alpha = given.get("alpha", 0.05)
    require(isinstance(alpha, float) and 0 < alpha < 1, f"{where}.alpha", alpha, "give a value in (0, 1), such as 0.05")
    decide = Decide(**given)
    seeds, own = decide.max_seeds, len(read_seeds(raw.get("seeds", 1), f"{path}: seeds"))
    hint = f"give a number of seeds, not below the {own} of the key seeds, with which a pair begins"
    require(type(seeds) is int and seeds >= own, f"{where}.max_seeds", seeds, hint)
    ends = seeds > 1 and math.isfinite(half_width(seeds, 1.0, "sequence", 1 - alpha, decide.prior_scale))
    require(ends, f"{where}.max_seeds", seeds, "so few pairs have no interval, and decide nothing; give more, as 20")
    return decide


def read_open(raw: Any, path: Path) -> Open:
    """What a suite says under its key ``open``."""
    where = f"{path}: open"
    check_keys(raw, [field.name for field in fields(Open)], where)
    for key in ("readings", "margin"):
        require(key in raw, f"{where}.{key}", None, "give it: {readings: {NAME: config}, margin: 2}")
    margin = raw["margin"]
    hint = "give the largest distance to a published number, above 0, in the unit of the tables, such as 2"
    require(type(margin) in (int, float) and 0 < margin < 1e150, f"{where}.margin", margin, hint)
    return Open(
        readings=labelled_fragments(raw["readings"], path, f"{where}.readings"),
        margin=float(margin),
        scores=read_scores(raw.get("scores", []), f"{where}.scores"),
        config=seedless(raw.get("config"), path, f"{where}.config"),
        seeds=read_seeds(raw.get("seeds", 1), f"{where}.seeds"),
    )


def read_scores(raw: Any, where: str) -> tuple[str, ...]:
    """Names of scores, each once."""
    require(isinstance(raw, list), where, raw, "give a list of scores")
    for score in raw:
        require(score in SCORES and raw.count(score) == 1, where, score, f"choose among {', '.join(SCORES)}, each once")
    return tuple(raw)


def suite_table(raw: Mapping[str, Any], axes: Mapping[str, Any], path: Path) -> Table:
    """A table; by default the methods are its rows and the other axes its columns."""
    check_keys(raw, [field.name for field in fields(Table)], f"{path}: tables")
    show = raw.get("show", "final")
    require(show in SHOWS, f"{path}: tables.show", raw.get("show"), f"choose among {', '.join(SHOWS)}")
    for key, used_by in {"k": "last", "target": "rounds_to", "scores": "scores"}.items():
        hint = f"is ignored by a table of {show}; leave it out, or give show: {used_by}"
        require(key not in raw or show == used_by, f"{path}: tables.{key}", raw.get(key), hint)
    for key in ("rows", "columns"):
        require(isinstance(raw.get(key, []), list), f"{path}: tables.{key}", raw.get(key), "give a list of axes")
    rows = tuple(raw.get("rows", ["method"] if "method" in axes else [next(iter(axes))]))
    columns = tuple(raw.get("columns", [axis for axis in axes if axis not in rows]))
    for axis in (*rows, *columns, *axes):
        if axis not in axes or (*rows, *columns).count(axis) != 1:
            hint = f"rows and columns take each axis once; the axes are {', '.join(axes)}"
            raise UsageError(f"{path}: tables: axis {axis!r}: {hint}")
    scores = read_scores(raw.get("scores", []), f"{path}: tables.scores")
    clash = show == "scores" and SCORE in axes
    require(not clash, f"{path}: axes", SCORE, "is an axis of a table of scores: give this one another name")
    published = dict(read_published(raw.get("published") or {}, len(rows) + len(columns), path))
    for labels, (mean, _) in published.items():
        where = f"{path}: {'.'.join(('published', *labels))}"
        require(mean > 0 or show != "seconds", where, mean, "give seconds above 0")
    read = {"show": show, "rows": rows, "columns": columns, "published": published, "scores": scores}
    return Table(**{**raw, **read})


def read_published(
    raw: Any, depth: int, path: Path, labels: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tuple[float, float | None]]]:
    """Published numbers by labels, from mappings nested in the order of rows and columns."""
    if raw is None:
        return
    where = f"{path}: {'.'.join(('published', *labels))}"
    if len(labels) < depth:
        require(isinstance(raw, Mapping), where, raw, "give a mapping of labels, by rows, then columns")
        for label, inner in raw.items():
            yield from read_published(inner, depth, path, (*labels, str(label)))
        return
    numbers = list(raw) if isinstance(raw, Sequence) and not isinstance(raw, str) else [raw]
    good = len(numbers) in (1, 2) and all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers)
    good = good and min(numbers[1:], default=0) >= 0
    require(good, where, raw, "give a number, or [mean, deviation] with a deviation of 0 or more")
    yield labels, (float(numbers[0]), float(numbers[1]) if len(numbers) == 2 else None)


def check_keys(raw: Any, known: Sequence[str], where: str) -> None:
    """Refuse keys that are not known."""
    require(isinstance(raw, Mapping), where, raw, "give a mapping")
    for key in raw:
        require(key in known, f"{where}: {key}", raw[key], f"is no key here; the keys are {', '.join(known)}")


def check_suite(suite: Suite) -> None:
    """Refuse labels that no axis has, and what no table can be made of."""
    # what some methods need under a reading alone is an override, or an exclusion, that names it
    with_readings = {**suite.axes, READING: suite.open.readings} if suite.open else suite.axes
    choices = [("overrides.when", when) for when, _ in suite.overrides] + [("exclude", when) for when in suite.exclude]
    labelled = [(key, {axis: label}) for key, when in choices for axis, labels in when.items() for label in labels]
    named: list[tuple[str, Labels, Mapping[str, Any]]] = [("baseline", suite.baseline, suite.axes)]
    named += [(key, label, with_readings) for key, label in labelled]
    for table in suite.tables:
        axes = (*table.rows, *table.columns)
        named += [("published", dict(zip(axes, labels, strict=True)), suite.axes) for labels in table.published]
    for key, labels, known_axes in named:
        for axis, label in labels.items():
            where = f"{suite.path}: {key}"
            require(axis in known_axes, where, axis, f"is no axis; the axes are {', '.join(known_axes)}")
            known = known_axes[axis]
            order = "; published nests by rows, then columns" if key == "published" else ""
            hint = f"is no label of it; they are {', '.join(known)}{order}"
            require(label in known, f"{where}.{axis}", label, hint)
    named_things = [suite.metric, *suite.axes, *(label for labels in suite.axes.values() for label in labels)]
    for name in suite.names:
        hint = f"is neither the metric nor an axis nor a label; there are {', '.join(named_things)}"
        require(name in named_things, f"{suite.path}: names", name, hint)
    if suite.decide is not None:
        require(bool(suite.baseline), f"{suite.path}: baseline", None, "decide needs one: give it, as {method: FedAvg}")
        first = suite.tables[0].show if suite.tables else None
        hint = f"decide looks at the first table: let it show {', '.join(OF_METRIC)}"
        require(first in OF_METRIC, f"{suite.path}: tables.show", first, hint)
        ranked = any(table.show == "rank" for table in suite.tables)
        hint = "with decide, rows have different seeds, which cannot be ranked: leave the table out"
        require(not ranked, f"{suite.path}: tables.show", "rank", hint)
    kinds = ("t", "bootstrap") if suite.decide is None else ("sequence",)
    require(suite.interval in kinds, f"{suite.path}: interval", suite.interval, "choose t or bootstrap")
    level = isinstance(suite.confidence, float) and 0 < suite.confidence < 1
    require(level, f"{suite.path}: confidence", suite.confidence, "give a level in (0, 1), such as 0.95")
    for table in suite.tables:
        last = isinstance(table.k, int) and table.k > 0
        require(last, f"{suite.path}: tables.k", table.k, "give the number of the last rounds, 1 or more")
        target = table.show != "rounds_to" or isinstance(table.target, (int, float))
        hint = "give the value to reach, as the run logs it" + ", such as 0.6 for 60 %" * suite.percent
        require(
            target and not (suite.percent and (table.target or 0) > 1),
            f"{suite.path}: tables.target",
            table.target,
            hint,
        )


def strings(labels: Mapping[Any, Any]) -> Labels:
    """Labels as strings, as they are compared."""
    return {str(axis): str(label) for axis, label in labels.items()}


def read_choice(when: Any, where: str) -> Choice:
    """The labels on each axis, given as one label or a list."""
    require(isinstance(when, Mapping), where, when, "give a mapping of axes to labels")
    lists = {axis: labels if isinstance(labels, list) else [labels] for axis, labels in when.items()}
    return {str(axis): tuple(map(str, labels)) for axis, labels in lists.items()}
