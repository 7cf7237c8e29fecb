"""The programs that measure speed start, and the comparison with other frameworks runs on a tiny size."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SPEED = Path(__file__).resolve().parent.parent / "experiments" / "speed"
TINY = ("--turns=1", "--images=64", "--test=100")
PACKAGES = {"bare-2": "torch", "flower": "flwr", "pfl-2": "pfl", "fluke": "fluke"}
PROGRAMS = sorted(path.name for path in SPEED.glob("*.py"))


def run(script, *arguments):
    return subprocess.run([sys.executable, SPEED / script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", PROGRAMS)
def test_a_program_says_what_it_measures(script, monkeypatch, capsys):
    # in this process: importing torch and lightning anew takes many seconds
    monkeypatch.syspath_prepend(SPEED)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SPEED / script), run_name="__main__")
    assert not ended.value.code
    assert f"experiments/speed/{script}" in capsys.readouterr().out


def test_scaling_runs_on_a_tiny_size(monkeypatch, capsys):
    monkeypatch.syspath_prepend(SPEED)
    for arguments in (["clients", "--numbers", "3", "--rounds", "1"], ["memory", "--rounds", "4", "--cohorts", "2"]):
        monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
        runpy.run_path(str(SPEED / "scaling.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.split()[0].isdigit()] == ["3", "2"]


@pytest.mark.parametrize("peer", PACKAGES)
def test_a_peer_is_compared_where_it_is_installed(peer):
    if peer != "fluke":  # what is said of one that is missing is tested on it alone
        pytest.importorskip(PACKAGES[peer])
    found = run("peers.py", "--peers", peer, "--ours", "float32, channels_last", *TINY)
    assert found.returncode == 0, found.stderr
    rows = found.stdout.splitlines()[2:]
    if importlib.util.find_spec(PACKAGES[peer]) is None:
        assert "not installed" in rows[0]
    else:
        assert "float32" in rows[0]
        # seconds, then their ratio
        peers_fastest, _, ours_fastest, _, ratio = map(float, rows[0].split()[-10:-5])
        assert ratio == pytest.approx(peers_fastest / ours_fastest, rel=0.3, abs=0.02)


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
