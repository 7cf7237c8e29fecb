"""What the programs that measure speed say of themselves, and what a comparison with other frameworks finds."""

import json
import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SPEED = Path(__file__).resolve().parent.parent / "experiments" / "speed"


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(SPEED)


def run(script, monkeypatch, capsys, *args):
    """What a program prints, in this process: importing torch and lightning anew takes many seconds."""
    monkeypatch.setattr(sys, "argv", [script, *args])
    runpy.run_path(str(SPEED / script), run_name="__main__")
    return capsys.readouterr().out


def test_a_program_says_what_it_measures(monkeypatch, capsys):
    for script in sorted(path.name for path in SPEED.glob("*.py")):
        with pytest.raises(SystemExit, match="0"):
            run(script, monkeypatch, capsys, "--help")
        assert f"experiments/speed/{script}" in capsys.readouterr().out


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


def test_a_side_of_a_small_model_whose_weights_differ_is_named(monkeypatch, capsys, tmp_path):
    import peers

    found = {"threads": 1, "microseconds": [4.0, 1, 9]}
    rows = [{"side": f"side {d}", **found, "difference": d} for d in (0, 9e-5, 2e-4)]
    results = {"machine": "a machine", "versions": {"torch": "2"}, "moved": 0.01, "sides": rows}
    monkeypatch.setattr(peers, "compare_small", lambda *_: results)
    file = tmp_path / "results.json"
    file.write_text('{"images": 1}')
    args = SimpleNamespace(case="femnist", clients=None, cohort=None, output=file, tolerance=0.02)
    with pytest.raises(SystemExit, match=r"the weights of side 0\.0002 differ"):
        peers.run(args)
    assert "| side 9e-05 | 1 | 1.0 | 4.0 | 9e-05 |" in capsys.readouterr().out
    assert json.loads(file.read_text()).keys() == {"images", "femnist"}


def test_a_weight_that_is_not_a_number_differs():
    import peers

    a = {"first": torch.tensor([1.0, 2.0]), "second": torch.tensor([3.0])}
    assert peers.gap({**a, "first": torch.tensor([1.0, 1.5])}, a) == 0.5
    assert math.isnan(peers.gap({**a, "first": torch.tensor([1.0, math.nan])}, a))


def test_clients_that_are_stacked_train_as_one_after_another(monkeypatch):
    from sides import loop, small, vmap

    sizes = [7, 3, 8, 8, 1]
    generator = torch.Generator().manual_seed(0)
    visits = [(torch.randn(n, 60, generator=generator), torch.arange(n) % 10) for n in sizes]
    monkeypatch.setitem(small.CASES, "synthetic", small.Case(len(sizes), len(sizes), 3, 0.5))
    states = []

    def played(args, gate, train, prepare, start, weights):
        states.append(weights(train(start, prepare(visits))))

    for side in (loop, vmap):
        monkeypatch.setattr(side, "play", played)
        side.run(SimpleNamespace(case="synthetic"), None)
    one_by_one, together = states
    assert together.keys() == one_by_one.keys()
    for name, value in one_by_one.items():
        torch.testing.assert_close(together[name], value)


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
