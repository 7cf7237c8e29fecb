"""Finished cells that were run with another version of the user's own code than the one that is here now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fl_lightning.bench.results import Result
from fl_lightning.bench.suite import Cell
from fl_lightning.sources import digest_now, is_own_module


def changed_code(results: Mapping[str, Result]) -> dict[str, list[str]]:
    """The modules that are not as they were for a cell, by the digest of each finished cell that has any.

    A module whose file is gone is one of them. Cells of which nobody knows the code are left out.
    """
    done = {digest: result.code for digest, result in results.items() if result.state == "done" and result.code}
    now = {module: digest_now(module) for module in {module for code in done.values() for module in code}}
    changed = {digest: [name for name, then in code.items() if now[name] != then] for digest, code in done.items()}
    return {digest: names for digest, names in changed.items() if names}


def with_notes(cells: Sequence[Cell], results: Mapping[str, Result]) -> dict[str, Result]:
    """Results with a note on those that may not be of the present code."""
    changed = changed_code(results)
    notes = {digest: f"run with another version of {', '.join(names)}" for digest, names in changed.items()}
    own: dict[str, bool] = {}
    for cell in cells:
        result = results.get(cell.digest)
        if result is not None and result.state == "done" and result.code is None:
            modules = {path.split(".")[0] for path in class_paths(cell.config) if "." in path}
            unknown = [top for top in sorted(modules) if own.setdefault(top, is_own_module(top))]
            if unknown:
                notes[cell.digest] = f"run with an unknown version of {', '.join(unknown)}"
    return {digest: replace(result, note=notes.get(digest, "")) for digest, result in results.items()}


def class_paths(value: Any) -> Iterator[str]:
    """The classes that a config names."""
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"]
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from class_paths(one)
