"""What the programs that measure speed say of themselves, and what a comparison with other frameworks finds."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SPEED = Path(__file__).resolve().parent.parent / "experiments" / "speed"
PROGRAMS = sorted(path.name for path in SPEED.glob("*.py"))


@pytest.mark.parametrize("script", PROGRAMS)
def test_a_program_says_what_it_measures(script, monkeypatch, capsys):
    # in this process: importing torch and lightning anew takes many seconds
    monkeypatch.syspath_prepend(SPEED)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SPEED / script), run_name="__main__")
    assert not ended.value.code
    assert f"experiments/speed/{script}" in capsys.readouterr().out


def test_sides_whose_accuracies_differ_are_found(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(SPEED)
    import peers

    kinds = (peers.PEERS["fluke"], *peers.OURS)
    accuracies = (0.5, 0.51, 0.515, 0.9)
    sides = [SimpleNamespace(kind=k, seconds=[9, 1, 3], accuracy=a) for k, a in zip(kinds, accuracies, strict=True)]
    monkeypatch.setattr(peers, "measure", lambda *_: (sides, {"torch": "2"}))
    versions, differing = peers.compare(SimpleNamespace(peers=["fluke"], tolerance=0.02), tmp_path)
    assert versions == {"torch": "2"}
    assert differing == ["fluke 0.500, bf16, channels_last 0.900"]
    assert capsys.readouterr().out.split()[2:10] == ["1.00", "2.00", "1.00", "2.00", "1.00", "1.00", "1.00", "1.00"]
