"""The program imports no more than a command needs."""

import subprocess
import sys

import pytest

import fl_lightning
from fl_lightning import cli

CHECK = """
import sys
import fl_lightning, fl_lightning.bench, fl_lightning.bench.driver, fl_lightning.bench.runner, fl_lightning.cli.bench
from fl_lightning.cli import main
try:
    main(["bench", "nowhere.yaml"])
except SystemExit as ended:
    assert ended.code == 2
print([name for name in ("torch", "lightning", "torchvision") if name in sys.modules], fl_lightning.__version__)
"""


def test_bench_never_imports_torch():
    """In a process that has imported it, the heartbeat's thread and the database's connections would be forked."""
    ended = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True, timeout=300)
    assert ended.stdout.strip() == "[] 0.1.0"
    assert ended.stderr.strip() == "error: nowhere.yaml: cannot be read: No such file or directory; give another file"


@pytest.mark.parametrize("name", fl_lightning.__all__)
def test_the_names_of_the_package_are_imported_when_they_are_used(name):
    assert getattr(fl_lightning, name).__name__ == name and name in dir(fl_lightning)


def test_the_parts_of_the_package_are_imported_when_they_are_used():
    assert fl_lightning.methods.FedProx.__name__ == "FedProx"
    assert cli.FederatedCLI.__name__ == "FederatedCLI"
    for module in (fl_lightning, cli):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            module.nothing  # noqa: B018


def test_the_help_mentions_the_commands_of_suites(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "`bench SUITE`" in said and "`tune SUITE`" in said
