"""Reading a suite from its YAML file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# a kind of values: a test that each of them passes, and the remedy for one that does not
Kind = tuple[Callable[[Any], bool], str]


def one_of(names: Sequence[str]) -> Kind:
    """The kind of some names."""
    return lambda value: value in names, f"choose among {', '.join(names)}"


def are_seeds(value: Any) -> bool:
    """Whether a value is a list of distinct integers, or their number."""
    if isinstance(value, list):
        return bool(value) and all(type(seed) is int for seed in value) and len(set(value)) == len(value)
    return type(value) is int and value > 0


ANY: Kind = (lambda value: True, "a suite needs this key")
BOOL: Kind = (lambda value: isinstance(value, bool), "give true or false")
COUNT: Kind = (lambda value: type(value) is int and value > 0, "give a number of 1 or more")
LIST: Kind = (lambda value: isinstance(value, list), "give a list")
MAPPING: Kind = (lambda value: isinstance(value, Mapping), "give a mapping, such as {AXIS: LABEL}")
POSITIVE: Kind = (lambda value: type(value) in (int, float) and 0 < value < 1e150, "give a number above 0")
MARGIN: Kind = (
    POSITIVE[0],
    "give a distance that does not matter, above 0, in the unit of the tables, as 1.6",
)
SHARE: Kind = (lambda value: isinstance(value, float) and 0 < value < 1, "give a value in (0, 1), such as 0.05")
SEEDS: Kind = (are_seeds, "give the number of seeds, or a list of distinct integers")
SOME_SCORES: Kind = (
    lambda value: isinstance(value, list) and all(one in SCORES and value.count(one) == 1 for one in value),
    f"give a list of some of {', '.join(SCORES)}, each once",
)
METRIC: Kind = (lambda value: isinstance(value, str), "give the tag of a metric, such as test/accuracy")
KEYS_OF_SUITE: dict[str, Kind] = {
    **dict.fromkeys(("title", "source", "base", "tune", "decide", "open"), ANY),
    "axes": (lambda value: isinstance(value, Mapping) and bool(value), "give a mapping of axes to their labels"),
    **dict.fromkeys(("baseline", "names"), MAPPING),
    **dict.fromkeys(("notes", "overrides", "exclude", "tables"), LIST),
    **dict.fromkeys(("minimize", "percent"), BOOL),
    **{"metric": METRIC, "seeds": SEEDS, "interval": one_of(("t", "bootstrap")), "confidence": SHARE},
}
KEYS_OF_DECIDE = {"margin": MARGIN, "prior_scale": POSITIVE, "alpha": SHARE, "max_seeds": COUNT}
KEYS_OF_OPEN = {"readings": ANY, "margin": MARGIN, "scores": SOME_SCORES, "config": ANY, "seeds": SEEDS}
KEYS_OF_TABLE = {
    **{"show": one_of(SHOWS), "rows": LIST, "columns": LIST, "k": COUNT, "scores": SOME_SCORES},
    **dict.fromkeys(("target", "page", "caption", "published"), ANY),
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
    if isinstance(raw, Mapping) and "axes" not in raw and {"data", "model", "method", "trainer"} & set(raw):
        raise UsageError(f"{path}: is a config, not a suite; run it with fit --config {path}")
    check_values(raw, KEYS_OF_SUITE, f"{path}: ", ["base", "axes"])
    axes = {str(axis): suite_axis(axis, value, path) for axis, value in raw["axes"].items()}
    overrides = []
    for override in raw.get("overrides", ()):
        where = f"{path}: overrides."
        check_values(override, {"when": MAPPING, "config": ANY}, where, ["when", "config"])
        overrides.append((read_choice(override["when"]), seedless(override["config"], path, f"{where}config")))
    for when in raw.get("exclude", ()):
        require(MAPPING[0](when), f"{path}: exclude", when, MAPPING[1])
    seeds, percent = seeds_of(raw.get("seeds", 1)), raw.get("percent", True)
    decide = None if raw.get("decide") is None else read_decide(raw, len(seeds), path)
    sequence: dict[str, Any] = {"interval": "sequence", "confidence": 1 - decide.alpha} if decide else {}
    suite = Suite(
        **sequence,
        open=None if raw.get("open") is None else read_open(raw["open"], path),
        decide=decide,
        **{key: raw[key] for key in ("metric", "minimize", "interval", "confidence", "tune") if key in raw},
        percent=percent,
        path=path,
        title=printable(str(raw.get("title", path.stem))),
        source=printable(str(raw.get("source", ""))),
        notes=tuple(printable(str(note)) for note in raw.get("notes", ())),
        base=tuple(fragments_of(raw["base"], path, f"{path}: base")),
        axes=axes,
        seeds=seeds,
        overrides=tuple(overrides),
        exclude=tuple(map(read_choice, raw.get("exclude", ()))),
        names={str(known): printable(str(shown)) for known, shown in raw.get("names", {}).items()},
        baseline=strings(raw.get("baseline", {"method": "FedAvg"} if "FedAvg" in axes.get("method", {}) else {})),
        tables=tuple(suite_table(table, axes, percent, path) for table in raw.get("tables", [{}])),
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
        of_key: Kind = (lambda key: isinstance(key, str), "give the key of the config that has the values")
        of_values: Kind = (
            lambda values: isinstance(values, list) and bool(values),
            "give a list of one or more values",
        )
        check_values(value, {"key": of_key, "values": of_values}, f"{where}.", ["values"])
        key = value["key"]
        parts = [(str(one), seedless(nested_config(key, one), path, where)) for one in value["values"]]
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


def seeds_of(value: int | Sequence[int]) -> tuple[int, ...]:
    """Seeds from a list, or the first few from their number."""
    return tuple(range(value) if isinstance(value, int) else value)


def read_decide(raw: Mapping[str, Any], own: int, path: Path) -> Decide:
    """What a suite with so many seeds of its own says under its key ``decide``."""
    where = f"{path}: decide."
    check_values(raw["decide"], KEYS_OF_DECIDE, where, ["margin"])
    for key in ("interval", "confidence"):
        require(key not in raw, f"{path}: {key}", raw.get(key), "leave it out: decide has its own interval, and alpha")
    decide = Decide(**raw["decide"])
    seeds = decide.max_seeds
    hint = f"give a number of seeds, not below the {own} of the key seeds, with which a pair begins"
    require(seeds >= own, f"{where}max_seeds", seeds, hint)
    ends = seeds > 1 and math.isfinite(half_width(seeds, 1.0, "sequence", 1 - decide.alpha, decide.prior_scale))
    require(ends, f"{where}max_seeds", seeds, "so few pairs have no interval, and decide nothing; give more, as 20")
    return decide


def read_open(raw: Any, path: Path) -> Open:
    """What a suite says under its key ``open``."""
    where = f"{path}: open."
    check_values(raw, KEYS_OF_OPEN, where, ["readings", "margin"])
    return Open(
        readings=labelled_fragments(raw["readings"], path, f"{where}readings"),
        margin=float(raw["margin"]),
        scores=tuple(raw.get("scores", ())),
        config=seedless(raw.get("config"), path, f"{where}config"),
        seeds=seeds_of(raw.get("seeds", 1)),
    )


def suite_table(raw: Mapping[str, Any], axes: Mapping[str, Any], percent: bool, path: Path) -> Table:
    """A table; by default the methods are its rows and the other axes its columns."""
    where = f"{path}: tables."
    check_values(raw, KEYS_OF_TABLE, where)
    show, target = raw.get("show", "final"), raw.get("target")
    for key, used_by in {"k": "last", "target": "rounds_to", "scores": "scores"}.items():
        hint = f"is ignored by a table of {show}; leave it out, or give show: {used_by}"
        require(key not in raw or show == used_by, f"{where}{key}", raw.get(key), hint)
    reached = isinstance(target, (int, float)) and not (percent and target > 1)
    hint = "give the value to reach, as the run logs it" + ", such as 0.6 for 60 %" * percent
    require(reached or show != "rounds_to", f"{where}target", target, hint)
    rows = tuple(raw.get("rows", ["method"] if "method" in axes else [next(iter(axes))]))
    columns = tuple(raw.get("columns", [axis for axis in axes if axis not in rows]))
    for axis in (*rows, *columns, *axes):
        if axis not in axes or (*rows, *columns).count(axis) != 1:
            hint = f"rows and columns take each axis once; the axes are {', '.join(axes)}"
            raise UsageError(f"{path}: tables: axis {axis!r}: {hint}")
    clash = show == "scores" and SCORE in axes
    require(not clash, f"{path}: axes", SCORE, "is an axis of a table of scores: give this one another name")
    published = dict(read_published(raw.get("published") or {}, len(rows) + len(columns), path))
    for labels, (mean, _) in published.items():
        place = f"{path}: {'.'.join(('published', *labels))}"
        require(mean > 0 or show != "seconds", place, mean, "give seconds above 0")
    read = {"show": show, "rows": rows, "columns": columns, "published": published}
    return Table(**{**raw, **read, "scores": tuple(raw.get("scores", ()))})


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


def check_values(raw: Any, kinds: Mapping[str, Kind], where: str, needed: Sequence[str] = ()) -> None:
    """Refuse all but a mapping of known keys to values of their kinds, with the keys that are needed."""
    require(isinstance(raw, Mapping), where.rstrip(".: "), raw, "give a mapping")
    for key, value in raw.items():
        require(key in kinds, f"{where}{key}", value, f"is no key here; the keys are {', '.join(kinds)}")
        fits, hint = kinds[key]
        require(fits(value), f"{where}{key}", value, hint)
    for key in needed:
        require(key in raw, f"{where}{key}", None, kinds[key][1])


def check_suite(suite: Suite) -> None:
    """Refuse labels that no axis has, and what no table can be made of."""
    clash = suite.open is not None and READING in suite.axes
    require(not clash, f"{suite.path}: axes", READING, "is the axis of the readings: give this one another name")
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


def strings(labels: Mapping[Any, Any]) -> Labels:
    """Labels as strings, as they are compared."""
    return {str(axis): str(label) for axis, label in labels.items()}


def read_choice(when: Mapping[Any, Any]) -> Choice:
    """The labels on each axis, given as one label or a list."""
    lists = {axis: labels if isinstance(labels, list) else [labels] for axis, labels in when.items()}
    return {str(axis): tuple(map(str, labels)) for axis, labels in lists.items()}
