"""Reads a suite from its YAML file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.bench.cell import Labels, file_part
from fl_lightning.bench.config_fragments import Fragment, fragments_of, nested_config
from fl_lightning.bench.criteria import Decide
from fl_lightning.bench.shows import OF_METRIC, SCORES, SHOWS, Fair, Mean, Rank, RoundsTo, Seconds, Show
from fl_lightning.bench.statistics import half_width
from fl_lightning.bench.suite import Suite, Table, without_data
from fl_lightning.utilities.bundled_configs import packaged_config
from fl_lightning.utilities.errors import UsageError, printable, require
from fl_lightning.utilities.yaml_files import read_yaml


class Kind(NamedTuple):
    """A kind of values: a test that each of them passes, the remedy for others, and the form that a suite keeps."""

    passes: Callable[[Any], bool]
    remedy: str
    form: Callable[[Any], Any] = lambda value: value


def one_of(names: Sequence[str]) -> Kind:
    """The kind of some names."""
    return Kind(lambda value: value in names, f"choose among {', '.join(names)}")


def strings(labels: Mapping[Any, Any]) -> Labels:
    """Return labels as strings, for comparison."""
    return {str(axis): str(label) for axis, label in labels.items()}


def label_tuple(labels: Any) -> tuple[str, ...]:
    """Return a label, or a list of labels, as strings."""
    return tuple(map(str, labels if isinstance(labels, list) else [labels]))


ANY = Kind(lambda value: True, "a suite needs this key")
TEXT = ANY._replace(form=lambda value: printable(str(value)))
BOOL = Kind(lambda value: isinstance(value, bool), "give true or false")
COUNT = Kind(lambda value: type(value) is int and value > 0, "use a number of 1 or more")
LIST = Kind(lambda value: isinstance(value, list), "give a list", tuple)
VALUES = Kind(lambda value: isinstance(value, list) and bool(value), "use a list of one or more values")
NAME = Kind(lambda value: isinstance(value, str), "use a name, such as test/accuracy or model.init_args.width")
MAPPING = Kind(lambda value: isinstance(value, Mapping), "use a mapping, such as {AXIS: LABEL}", strings)
NOT_EMPTY = Kind(lambda value: isinstance(value, Mapping) and bool(value), "use a mapping that is not empty")
POSITIVE = Kind(lambda value: type(value) in (int, float) and 0 < value < 1e150, "use a number above 0, such as 1.6")
SHARE = Kind(lambda value: isinstance(value, float) and 0 < value < 1, "use a value in (0, 1), such as 0.05")
SEEDS = Kind(
    lambda value: (
        COUNT.passes(value)
        or (VALUES.passes(value) and len({*map(str, value)}) == len(value) and {*map(type, value)} == {int})
    ),
    "use the number of seeds, or a list of distinct integers",
    lambda value: tuple(range(value) if isinstance(value, int) else value),
)
ROUNDS = Kind(
    lambda value: (
        isinstance(value, list)
        and len(value) == 2
        and all(type(round_) is int for round_ in value)
        and 0 <= value[0] <= value[1]
    ),
    "use the first and the last round, counted from 0, such as [2, 5]",
    tuple,
)
SOME_SCORES = Kind(
    lambda value: isinstance(value, list) and all(name in SCORES for name in value) and len({*value}) == len(value),
    f"use a list of some of {', '.join(SCORES)}, each once",
    tuple,
)
# labels on each axis, given as one label or a list
CHOICE = MAPPING._replace(form=lambda when: {str(axis): label_tuple(labels) for axis, labels in when.items()})
KEYS_OF_SUITE = {
    **{"title": TEXT, "source": TEXT, "notes": LIST, "base": ANY, "axes": NOT_EMPTY, "seeds": SEEDS},
    **{"overrides": LIST, "exclude": LIST, "metric": NAME, "minimize": BOOL, "percent": BOOL, "baseline": MAPPING},
    **{"confidence": SHARE, "tables": LIST},
    **{"tune": NOT_EMPTY._replace(passes=lambda value: isinstance(value, Mapping))},
    **{"tuned": TEXT, "decide": ANY, "finished": TEXT},
}
KEYS_OF_DECIDE = {"margin": POSITIVE, "prior_scale": POSITIVE, "alpha": SHARE, "max_seeds": COUNT}
KEYS_OF_TABLE = {
    **{"show": one_of(tuple(SHOWS)), "rows": LIST, "columns": LIST, "k": COUNT, "rounds": ROUNDS, "target": ANY},
    **{"scores": SOME_SCORES, "page": ANY, "caption": ANY, "published": ANY},
}
# the key of a config in whose place each cell has a seed of the suite
SEED = "seed_everything"


def load_suite(path: str | Path) -> Suite:
    """Read a suite from a YAML file, or by its name from the package; paths are relative to the file that has them.

    Raises:
        UsageError: the file or one that it names cannot be read, or a key or label is not known.
    """
    file = packaged_config(path) if os.path.isdir(path) or not os.path.exists(path) else Path(path)
    hint = "no such file; use another, or a suite of the package, such as feduv/table1"
    require(file is not None, "SUITE", str(path), hint)
    path = file or Path(path)
    raw = read_yaml(path)
    if isinstance(raw, Mapping) and "axes" not in raw and {"data", "model", "method", "trainer"} & set(raw):
        raise UsageError(f"{path}: is a config, not a suite; run it with fit --config {path}")
    keys = read_keys(raw, KEYS_OF_SUITE, f"{path}: ", ["base", "axes"])
    axes = {str(axis): read_axis(str(axis), value, path) for axis, value in keys["axes"].items()}
    overrides = []
    for raw_override in keys.get("overrides", ()):
        override = read_keys(raw_override, {"when": CHOICE, "config": ANY}, f"{path}: overrides.", ["when", "config"])
        overrides.append((override["when"], seedless(override["config"], path, f"{path}: overrides.config")))
    for when in keys.get("exclude", ()):
        require(CHOICE.passes(when), f"{path}: exclude", when, CHOICE.remedy)
    decide = None
    if keys.get("decide") is not None:
        decide = read_decide(keys["decide"], len(keys.get("seeds", [0])), path)
        hint = "leave it out: decide has alpha"
        require("confidence" not in keys, f"{path}: confidence", keys.get("confidence"), hint)
        keys["confidence"] = 1 - decide.alpha
        hint = "leave it out: with decide, the baseline's cells are in the study; give the file by --load"
        require("finished" not in keys, f"{path}: finished", keys.get("finished"), hint)
    percent = keys.get("percent", True)
    tables = [parse_table(table, axes, percent, path) for table in keys.get("tables", [{}])]
    arguments = {
        "title": keys.get("title", printable(path.stem)),
        "notes": tuple(map(TEXT.form, keys.get("notes", ()))),
        "base": tuple(fragments_of(keys["base"], path, f"{path}: base")),
        "axes": axes,
        "seeds": keys.get("seeds", (0,)),
        "overrides": tuple(overrides),
        "exclude": tuple(map(CHOICE.form, keys.get("exclude", ()))),
        "baseline": keys.get("baseline", {"method": "FedAvg"} if "FedAvg" in axes.get("method", {}) else {}),
        "tables": tuple(tables),
        "decide": decide,
        "finished": path.parent / keys["finished"] if "finished" in keys else None,
    }
    tuned = keys.pop("tuned", None)
    suite = Suite(path=path, **{**keys, **arguments})
    if tuned is not None:
        folder = path.parent / tuned
        require(folder.is_dir(), f"{path}: tuned", str(folder), "no such folder; name one that tune has written")
        suite = with_tuned(suite, folder)
    require(suite.name.isprintable(), "SUITE", str(path), "use printable names for the file and its folder")
    check_labels(suite)
    return suite


def with_tuned(suite: Suite, folder: Path, methods: Collection[str] = ()) -> Suite:
    """Return a suite with the values in the files of ``tune`` in a folder, by default of all methods."""
    overrides = [*suite.overrides]
    for file in sorted(folder.rglob("*.yaml")):
        *parts, name = file.relative_to(folder).with_suffix("").parts
        if methods and name not in methods:
            continue
        by_axis, when = {"method": name, **dict(zip(suite.tuned_axes, parts, strict=False))}, {}
        for axis, part in by_axis.items():
            labels = tuple(label for label in suite.axes.get(axis, ()) if file_part(label) == part)
            require(bool(labels), str(file), part, f"no label of the axis {axis}; remove the file")
            when[axis] = labels
        overrides.append((when, seedless(read_yaml(file), file, str(file))))
    return replace(suite, overrides=tuple(overrides))


def suites_in(path: str | Path) -> list[Suite]:
    """Return the suite of a file, and its offline form."""
    suite = load_suite(path)
    return [suite, without_data(suite)]


def read_keys(raw: Any, kinds: Mapping[str, Kind], where: str, required: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a mapping in the form of their kinds; refuses unknown keys, and a lack of those ``required``."""
    require(isinstance(raw, Mapping), where.rstrip(".: "), raw, "use a mapping")
    for key, value in raw.items():
        require(key in kinds, f"{where}{key}", value, f"unknown key; available: {', '.join(kinds)}")
        require(kinds[key].passes(value), f"{where}{key}", value, kinds[key].remedy)
    for key in required:
        require(key in raw, f"{where}{key}", None, kinds[key].remedy)
    return {key: kinds[key].form(value) for key, value in raw.items()}


def read_axis(axis: str, value: Any, path: Path) -> dict[str, tuple[Fragment, ...]]:
    """Return the fragments of each label of an axis, which may be in another file."""
    if isinstance(value, str):
        inner = path.parent / value
        return read_axis(axis, read_yaml(inner), inner)
    require(axis.isprintable(), f"{path}: axes", axis, "use a name on one line, without control characters")
    return labelled_fragments(value, path, f"{path}: axes.{axis}")


def labelled_fragments(value: Any, path: Path, where: str) -> dict[str, tuple[Fragment, ...]]:
    """Fragments by label: from a mapping, or a key with its values."""
    hint = "use a mapping of labels to configs, or {key: ..., values: [...]}"
    require(NOT_EMPTY.passes(value), where, value, hint)
    pairs = [(str(label), config) for label, config in value.items()]
    if "key" in value:
        keys = read_keys(value, {"key": NAME, "values": VALUES}, f"{where}.", ["values"])
        pairs = [(str(argument), nested_config(keys["key"], argument)) for argument in keys["values"]]
    labels = [label for label, _ in pairs]
    for label in labels:
        require(label.isprintable(), where, label, "give labels of one line, without control characters")
    distinct = len(set(map(file_part, labels))) == len(labels)
    require(distinct, where, labels, "give labels whose letters and digits differ")
    fragments = {}
    for label, config in pairs:
        fragments[label] = seedless(config, path, where if "key" in value else f"{where}.{label}")
    return fragments


def seedless(value: Any, path: Path, where: str) -> tuple[Fragment, ...]:
    """Fragments of some cells, which have the seeds of the suite."""
    parts = tuple(fragments_of(value, path, where))
    for part in parts:
        require(SEED not in part, f"{where}.{SEED}", part.get(SEED), "is ignored; remove it, and use the key seeds")
    return parts


def read_decide(raw: Any, num_seeds: int, path: Path) -> Decide:
    """Return the key ``decide`` of a suite with a number of seeds."""
    where = f"{path}: decide."
    decide = Decide(**read_keys(raw, KEYS_OF_DECIDE, where, ["margin"]))
    seeds = decide.max_seeds
    hint = f"use a number of seeds, not below the {num_seeds} of the key seeds, with which a pair begins"
    require(seeds >= num_seeds, f"{where}max_seeds", seeds, hint)
    ends = seeds > 1 and math.isfinite(half_width(seeds, 1.0, "sequence", 1 - decide.alpha, decide.prior_scale))
    require(ends, f"{where}max_seeds", seeds, "so few pairs have no interval, and decide nothing; give more, as 20")
    return decide


def parse_table(raw: Any, axes: Mapping[str, Any], percent: bool, path: Path) -> Table:
    """A table; by default the methods are its rows and the other axes its columns."""
    where = f"{path}: tables."
    keys = read_keys(raw, KEYS_OF_TABLE, where)
    show = read_show(raw, percent, where)
    rows = keys.get("rows", ("method",) if "method" in axes else (next(iter(axes)),))
    columns = keys.get("columns", tuple(axis for axis in axes if axis not in rows))
    for axis in (*rows, *columns, *axes):
        if axis not in axes or (*rows, *columns).count(axis) != 1:
            hint = f"rows and columns take each axis once; the axes are {', '.join(axes)}"
            raise UsageError(f"{path}: tables: axis {axis!r}: {hint}")
    hint = f"is an axis of a table of {show.name}: give this one another name"
    require(show.added_axis not in axes, f"{path}: axes", show.added_axis, hint)
    require(
        "published" not in keys or not isinstance(show, Fair),
        f"{where}published",
        "given",
        "is ignored by a table of fair; leave it out",
    )
    published = dict(read_published(keys.get("published"), len(rows) + len(columns), path))
    for labels, (mean, _) in published.items():
        place = f"{path}: {'.'.join(('published', *labels))}"
        require(mean > 0 or not isinstance(show, Seconds), place, mean, "give seconds above 0")
    return Table(rows, columns, show, keys.get("page"), keys.get("caption", ""), published)


def read_show(raw: Mapping[str, Any], percent: bool, where: str) -> Show:
    """The number that a table shows, from its key ``show`` and the keys that belong to it."""
    kind = SHOWS[raw.get("show", "final")]
    arguments = {}
    for name, owner in SHOWS.items():
        for key in raw.keys() & {field.name for field in fields(owner)}:
            hint = f"is ignored by a table of {kind.name}; leave it out, or give show: {name}"
            require(owner is kind, f"{where}{key}", raw[key], hint)
            arguments[key] = KEYS_OF_TABLE[key].form(raw[key])
    require("rounds" in raw or kind is not Mean, f"{where}rounds", None, ROUNDS.remedy)
    if kind is RoundsTo:
        target = raw.get("target")
        possible = isinstance(target, (int, float)) and not (percent and target > 1)
        hint = "use the scale of the logged values" + (", such as 0.6 for 60 %" if percent else "")
        require(possible, f"{where}target", target, hint)
    return kind(**arguments)


def read_published(
    raw: Any, depth: int, path: Path, labels: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tuple[float, float | None]]]:
    """Published numbers by labels, from mappings nested in the order of rows and columns."""
    where = f"{path}: {'.'.join(('published', *labels))}"
    if len(labels) < depth and raw is not None:
        require(isinstance(raw, Mapping), where, raw, "use a mapping of labels, by rows, then columns")
        for label, inner in raw.items():
            yield from read_published(inner, depth, path, (*labels, str(label)))
    elif raw is not None:
        numbers = raw if isinstance(raw, list) else [raw]
        good = len(numbers) in (1, 2) and all(
            type(number) in (int, float) and abs(number) < 1e300 for number in numbers
        )
        good = good and min(numbers[1:], default=0) >= 0
        require(good, where, raw, "use a number, or [mean, deviation] with a deviation of 0 or more")
        yield labels, (float(numbers[0]), float(numbers[1]) if len(numbers) == 2 else None)


def check_labels(suite: Suite) -> None:
    """Refuse labels that no axis has, and tables that cannot be made."""
    named = [("baseline", axis, label) for axis, label in suite.baseline.items()]
    choices = [("overrides.when", when) for when, _ in suite.overrides]
    choices += [("exclude", when) for when in suite.exclude]
    for key, when in choices:
        for axis, labels in when.items():
            named += [(key, axis, label) for label in labels]
    for table in suite.tables:
        axes = (*table.rows, *table.columns)
        for labels in table.published:
            named += [("published", *pair) for pair in zip(axes, labels, strict=True)]
    for key, axis, label in named:
        where = f"{suite.path}: {key}"
        order = "; published nests by rows, then columns" if key == "published" else ""
        require(axis in suite.axes, where, axis, f"is not an axis; available: {', '.join(suite.axes)}")
        hint = f"is not a label; available: {', '.join(suite.axes[axis])}{order}"
        require(label in suite.axes[axis], f"{where}.{axis}", label, hint)
    if suite.decide is not None:
        require(
            bool(suite.baseline), f"{suite.path}: baseline", None, "decide needs a baseline, such as {method: FedAvg}"
        )
        show = suite.tables[0].show.name if suite.tables else None
        hint = f"decide uses the first table, which must show {', '.join(OF_METRIC)}"
        require(show in OF_METRIC, f"{suite.path}: tables.show", show, hint)
        ranked = any(isinstance(table.show, Rank) for table in suite.tables)
        hint = "with decide, rows have different seeds, which cannot be ranked: leave the table out"
        require(not ranked, f"{suite.path}: tables.show", "rank", hint)
