"""Comparisons with other frameworks, and the figures of the pages on speed."""

import json
import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_lightning import methods

SPEED = Path(__file__).resolve().parent.parent / "experiments" / "speed"


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(SPEED)


def run(script, monkeypatch, capsys, *args):
    """Return the output of a program in this process: another one takes many seconds for its imports."""
    monkeypatch.setattr(sys, "argv", [script, *args])
    runpy.run_path(str(SPEED / script), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("accuracy", [0.9, math.nan])
def test_sides_whose_accuracies_differ_are_found(monkeypatch, tmp_path, accuracy):
    import peers

    kinds = (peers.PEERS["fluke"], *peers.OURS)
    accuracies = (0.5, 0.51, 0.515, accuracy)
    sides = [SimpleNamespace(kind=k, seconds=[9, 2, 6], accuracy=a) for k, a in zip(kinds, accuracies, strict=True)]
    sides[1].seconds = [9, 1, 3]
    monkeypatch.setattr(peers, "measure", lambda *_: (sides, {"torch": "2"}))
    results = peers.compare_images(SimpleNamespace(peers=["fluke"], ours=[], model="FedCKACNN"), tmp_path)
    assert "| fluke | 2 | 2.00 | 2.00 | 1.00 | 1.00 |" in peers.table("images", results)
    (differing,) = peers.differing_sides("images", results, 0.02)
    assert differing == f"fluke has an accuracy of 0.500, ours in bf16, channels_last of {accuracy:.3f}"


@pytest.mark.parametrize(
    ("name", "program", "stored"),
    [
        ("side_by_side", "groups.py", "groups.csv"),
        ("side_by_side", "peers.py", "peers_small.json"),
        ("federation", "federation.py", "federation.json"),
        ("speed", "peers.py", "peers.json"),
        ("speed", "limit.py", "limit.json"),
    ],
)
def test_pages_have_the_stored_figures(name, program, stored, monkeypatch, capsys):
    page = (SPEED.parents[1] / "docs" / f"{name}.md").read_text()
    said = run(program, monkeypatch, capsys, "--show", str(SPEED / stored))
    tables = re.findall(r"(?:^\|.*\n){4,}", said, re.MULTILINE)
    fits = re.findall(r"^a program for n clients .*$", said, re.MULTILINE)
    assert tables and len(fits) == (program == "groups.py")
    assert all(text in page for text in (*tables, *fits))


def test_the_readme_says_how_many_times_as_long_a_round_takes_elsewhere():
    import peers

    pairs = json.loads((SPEED / "peers.json").read_text())["images"]["sides"]
    ratios = [peers.ratio(pair) for pair in pairs if not pair["peer"].startswith("bare loop")]
    readme = (SPEED.parents[1] / "README.md").read_text()
    assert f"[{min(ratios):.1f} to {max(ratios):.1f} times as long](docs/speed.md)" in readme


USUAL = {("FedAvg", 1), ("SCAFFOLD", 1), ("FedCKA", 1), ("FedUV", 4)}
FOOTPRINTS = [
    pytest.param(
        name,
        together,
        marks=[
            *([] if (name, together) in USUAL else [pytest.mark.thorough]),
            *([pytest.mark.vectorized] if together > 1 else []),
        ],
    )
    for name in ("FedAvg", *methods.__all__)
    for together in (1, 4)
    if name != "Local" and (name, together) != ("PerFedAvg", 4)  # it trains one client after the other
]


@pytest.mark.parametrize(("name", "together"), FOOTPRINTS)
def test_a_method_waits_for_the_device_and_holds_memory_within_its_budget(name, together):
    import footprint

    found = footprint.footprint(name, 512 if together == 1 else 128, together=together)
    limits = footprint.WAITS_OF.get(name, footprint.WAITS)
    assert all(number <= most for number, most in zip(found.waits, limits, strict=True)), found.places
    assert together > 1 or found.memory <= footprint.MEMORY.get(name, 9), found.memory
