"""Reading a suite from its YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fl_lightning.bench.fragments import Fragment, fragments_of, nested
from fl_lightning.bench.suite import SHOWN, Choice, Labels, Suite, Table, plain
from fl_lightning.errors import UsageError, printable, require
from fl_lightning.yaml_files import read_yaml

# the kinds of the values of a suite's keys, as YAML gives them
KINDS: dict[str, tuple[type, str]] = {
    "axes": (Mapping, "give a mapping of axes to their labels"),
    "baseline": (Mapping, "give a mapping of axes to labels"),
    "metric": (str, "give the tag of a metric, such as test/accuracy"),
    "minimize": (bool, "give true or false"),
    "percent": (bool, "give true or false"),
    **dict.fromkeys(("notes", "overrides", "exclude", "tables"), (list, "give a list")),
}


def load_suite(path: str | Path) -> Suite:
    """Read a suite from a YAML file; paths in it are relative to the file that has them.

    Raises:
        UsageError: the file or one that it names cannot be read, or a key or label is not known.
    """
    path = Path(path)
    raw = read_yaml(path)
    keys = [one.name for one in fields(Suite) if one.name != "path"]
    if isinstance(raw, Mapping) and "axes" not in raw and {"data", "model", "method", "trainer"} & set(raw):
        raise UsageError(f"{path}: is a config, not a suite; run it with fit --config {path}")
    check_keys(raw, keys, str(path))
    for key in ("base", "axes"):
        require(key in raw, f"{path}: {key}", None, "a suite needs this key")
    check_kinds(raw, path)
    axes = {str(axis): labels_of(axis, value, path) for axis, value in raw["axes"].items()}
    suite = Suite(
        **{key: raw[key] for key in ("metric", "minimize", "percent", "interval", "confidence", "tune") if key in raw},
        path=path,
        title=printable(str(raw.get("title", path.stem))),
        source=printable(str(raw.get("source", ""))),
        notes=tuple(printable(str(note)) for note in raw.get("notes", ())),
        base=tuple(fragments_of(raw["base"], path)),
        axes=axes,
        seeds=seeds_of(raw.get("seeds", 1), f"{path}: seeds"),
        tables=(),
    )
    overrides = tuple(override(one, path) for one in raw.get("overrides", ()))
    exclude = tuple(choice(one, f"{path}: exclude") for one in raw.get("exclude", ()))
    baseline = strings(raw.get("baseline", default_baseline(axes)))
    suite = replace(suite, overrides=overrides, exclude=exclude, baseline=baseline)
    require(suite.name.isprintable(), "SUITE", str(path), "give the file and its folder names that can be printed")
    suite = replace(suite, tables=tuple(table_of(one, axes, path) for one in raw.get("tables", [{}])))
    check_labels(suite)
    check_statistics(suite)
    return suite


def labels_of(axis: str, value: Any, path: Path) -> dict[str, tuple[Fragment, ...]]:
    """The fragments of each label of an axis: a mapping, a file that holds one, or a key with its values."""
    if isinstance(value, str):
        inner = path.parent / value
        return labels_of(axis, read_yaml(inner), inner)
    hint = "give a mapping of labels to configs, or {key: ..., values: [...]}"
    require(isinstance(value, Mapping) and len(value) > 0, f"{path}: axes.{axis}", value, hint)
    given: list[tuple[str, tuple[Fragment, ...]]]
    if "key" in value:
        check_keys(value, ["key", "values"], f"{path}: axes.{axis}")
        key, values = value["key"], value.get("values")
        require(isinstance(key, str), f"{path}: axes.{axis}.key", key, "give the key of the config that has the values")
        hint = "give a list of one or more values"
        require(isinstance(values, list) and len(values) > 0, f"{path}: axes.{axis}.values", values, hint)
        given = [(str(one), (nested(key, one),)) for one in values]
    else:
        given = [(str(label), tuple(fragments_of(one, path))) for label, one in value.items()]
    labels = [label for label, _ in given]
    for text in (axis, *labels):
        hint = "give names and labels of one line, without control characters"
        require(text.isprintable(), f"{path}: axes.{printable(axis)}", text, hint)
    distinct = len({plain(label) for label in labels}) == len(labels)
    require(distinct, f"{path}: axes.{axis}", labels, "give labels whose letters and digits differ")
    return dict(given)


def seeds_of(value: Any, where: str) -> tuple[int, ...]:
    """Seeds from a list, or the first few from their number."""
    seeds = range(value) if type(value) is int else value
    good = isinstance(seeds, (range, list)) and len(seeds) > 0 and all(type(one) is int for one in seeds)
    require(good and len(set(seeds)) == len(seeds), where, value, "give their number, or a list of distinct integers")
    return tuple(seeds)


def default_baseline(axes: Mapping[str, Mapping[str, Any]]) -> Labels:
    """FedAvg, where an axis ``method`` has it."""
    return {"method": "FedAvg"} if "FedAvg" in axes.get("method", {}) else {}


def table_of(raw: Mapping[str, Any], axes: Mapping[str, Any], path: Path) -> Table:
    """A table; by default the methods are its rows and the other axes its columns."""
    check_keys(raw, [one.name for one in fields(Table)], f"{path}: tables")
    require(
        raw.get("show", "final") in SHOWN, f"{path}: tables.show", raw.get("show"), f"choose among {', '.join(SHOWN)}"
    )
    for key in ("rows", "columns"):
        require(isinstance(raw.get(key, []), list), f"{path}: tables.{key}", raw.get(key), "give a list of axes")
    rows = tuple(raw.get("rows", ["method"] if "method" in axes else [next(iter(axes))]))
    columns = tuple(raw.get("columns", [axis for axis in axes if axis not in rows]))
    for axis in (*rows, *columns, *axes):
        if axis not in axes or (*rows, *columns).count(axis) != 1:
            hint = f"rows and columns take each axis once; the axes are {', '.join(axes)}"
            raise UsageError(f"{path}: tables: axis {axis!r}: {hint}")
    published = dict(published_of(raw.get("published") or {}, len(rows) + len(columns), path))
    for labels, (mean, _) in published.items():
        where = f"{path}: {'.'.join(('published', *labels))}"
        require(mean > 0 or raw.get("show") != "seconds", where, mean, "give seconds above 0")
    return Table(**{"show": "final", **raw, "rows": rows, "columns": columns, "published": published})


def published_of(
    raw: Any, depth: int, path: Path, labels: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tuple[float, float | None]]]:
    """Published numbers by labels, from mappings nested in the order of rows and columns."""
    if raw is None:
        return
    where = f"{path}: {'.'.join(('published', *labels))}"
    if len(labels) < depth:
        require(isinstance(raw, Mapping), where, raw, "give a mapping of labels, by rows, then columns")
        for label, inner in raw.items():
            yield from published_of(inner, depth, path, (*labels, str(label)))
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


def check_kinds(raw: Mapping[str, Any], path: Path) -> None:
    """Refuse values of another kind than that of their key."""
    for key, value in raw.items():
        kind, hint = KINDS.get(key, (object, ""))
        require(isinstance(value, kind) and (key != "axes" or bool(value)), f"{path}: {key}", value, hint)


def check_labels(suite: Suite) -> None:
    """Refuse labels that no axis has."""
    given = [("baseline", suite.baseline)]
    for key, when in [
        *(("overrides.when", one) for one, _ in suite.overrides),
        *(("exclude", one) for one in suite.exclude),
    ]:
        given += [(key, {axis: label}) for axis, chosen in when.items() for label in chosen]
    for table in suite.tables:
        axes = (*table.rows, *table.columns)
        given += [("published", dict(zip(axes, labels, strict=True))) for labels in table.published]
    for key, labels in given:
        for axis, label in labels.items():
            where = f"{suite.path}: {key}"
            require(axis in suite.axes, where, axis, f"is no axis; the axes are {', '.join(suite.axes)}")
            known = suite.axes[axis]
            order = "; published nests by rows, then columns" if key == "published" else ""
            hint = f"is no label of it; they are {', '.join(known)}{order}"
            require(label in known, f"{where}.{axis}", label, hint)


def check_statistics(suite: Suite) -> None:
    """Refuse what no table can be made of."""
    require(suite.interval in ("t", "bootstrap"), f"{suite.path}: interval", suite.interval, "choose t or bootstrap")
    level = isinstance(suite.confidence, float) and 0 < suite.confidence < 1
    require(level, f"{suite.path}: confidence", suite.confidence, "give a level in (0, 1), such as 0.95")
    for table in suite.tables:
        last = isinstance(table.k, int) and table.k > 0
        require(last, f"{suite.path}: tables.k", table.k, "give the number of the last rounds, 1 or more")
        target = table.show != "rounds_to" or isinstance(table.target, (int, float))
        hint = "give the value to reach, as the run logs it" + ", such as 0.6 for 60 %" * suite.percent
        reachable = target and not (suite.percent and (table.target or 0) > 1)
        require(reachable, f"{suite.path}: tables.target", table.target, hint)


def strings(labels: Mapping[Any, Any]) -> Labels:
    """Labels as strings, as they are compared."""
    return {str(axis): str(label) for axis, label in labels.items()}


def override(raw: Any, path: Path) -> tuple[Choice, tuple[Fragment, ...]]:
    """More config for some cells: their labels, and the config."""
    where = f"{path}: overrides"
    check_keys(raw, ["when", "config"], where)
    for key in ("when", "config"):
        require(key in raw, f"{where}.{key}", None, "give it: {when: {AXIS: LABEL}, config: ...}")
    return choice(raw["when"], f"{where}.when"), tuple(fragments_of(raw["config"], path))


def choice(when: Any, where: str) -> Choice:
    """The labels on each axis, given as one label or a list."""
    require(isinstance(when, Mapping), where, when, "give a mapping of axes to labels")
    return {str(axis): tuple(map(str, one if isinstance(one, list) else [one])) for axis, one in when.items()}
