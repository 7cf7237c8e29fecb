"""``bench`` and ``tune`` with cells that are answered without training."""

import pytest

from helpers.benches import run_command


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """``bench(*args, answer=...)`` runs the command in an empty folder and returns how it has ended."""
    monkeypatch.chdir(tmp_path)

    def run(*args, command="bench", **answer):
        return run_command(monkeypatch, capsys, [command, *args], **answer)

    return run


@pytest.fixture
def tune(bench):
    """``tune(*args, answer=...)``, as ``bench``."""
    return lambda *args, **answer: bench(*args, command="tune", **answer)
