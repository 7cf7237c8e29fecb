"""The programs that measure speed start, and the comparison with other frameworks runs on a tiny size."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SPEED = Path(__file__).resolve().parent.parent / "experiments" / "speed"
TINY = ("--turns=1", "--images=64", "--test=100", "--devices=1")
PACKAGES = {"bare-2": "torch", "flower": "flwr", "pfl-2": "pfl", "fluke": "fluke"}


def run(script, *arguments):
    return subprocess.run([sys.executable, SPEED / script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", sorted(path.name for path in SPEED.glob("*.py")))
def test_help(script):
    found = run(script, "--help")
    assert found.returncode == 0, found.stderr
    assert "--help" in found.stdout


@pytest.mark.parametrize("peer", PACKAGES)
def test_a_peer_is_compared_where_it_is_installed(peer):
    found = run("peers.py", "--peers", peer, *TINY)
    assert found.returncode == 0, found.stderr
    rows = found.stdout.splitlines()[2:]
    if importlib.util.find_spec(PACKAGES[peer]) is None:
        assert "not installed" in rows[0]
    else:
        assert "float32" in rows[0]
        assert "bf16" in rows[1]
        # seconds, then their ratio
        peers_fastest, _, ours_fastest, _, ratio = map(float, rows[0].split()[-10:-5])
        assert ratio == pytest.approx(peers_fastest / ours_fastest, rel=0.3, abs=0.02)


def test_sides_that_differ_are_an_error():
    found = run("peers.py", "--peers", "bare-2", *TINY, "--tolerance=-1")
    assert found.returncode == 1
    assert "not the same work" in found.stderr
