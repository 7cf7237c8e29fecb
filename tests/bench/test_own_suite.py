"""The suite of the guide runs, its tables come with it, and what it tunes is a config."""

import csv
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.benches import FakeRunner, quick_database

from fl_lightning.bench import load_suite
from fl_lightning.bench.cells_csv import read_cells
from fl_lightning.bench.runner import outcome
from fl_lightning.cli import bench as command
from fl_lightning.cli import main
from fl_lightning.cli.cells import run_cell

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "experiments" / "own_method" / "suite.yaml"
GUIDE = (ROOT / "docs" / "bench.md").read_text()
# a round of two clients
SHORT = {"trainer": {"max_rounds": 1, "local_epochs": 1}, "data": {"init_args": {"num_clients": 2}}}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, one_parser):
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    monkeypatch.setattr(command, "open_database", quick_database)
    monkeypatch.chdir(ROOT)


@pytest.fixture
def _here(monkeypatch):
    """Cells run in this process: importing torch anew takes many seconds, and test_bench.py has a runner process."""

    def answer(cell, on_round):
        return outcome(run_cell, cell, SimpleNamespace(report=on_round))

    runner = partial(FakeRunner, answer=answer)
    monkeypatch.setattr(command, "Driver", partial(command.Driver, runner=runner))
    monkeypatch.setattr(command, "Runner", runner)


@pytest.fixture
def short(tmp_path):
    """A config that comes last and makes runs short."""
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(SHORT))
    return path


def test_it_compares_with_fifteen_methods_in_three_settings_with_five_seeds():
    suite = load_suite(SUITE)
    assert len(SUITE.read_text().splitlines()) <= 20
    assert set(suite.axes["method"]) - {"FedAvg", "ClippedChange"} == {
        *("FedProx", "SCAFFOLD", "FedDyn", "FedNova", "MOON", "FedProto", "FedCKA", "FedUV", "FedDecorr"),
        *("DeCov", "StructuredDeCov", "FedLC", "FedRS", "FedBABU", "Freeze"),
    }
    assert len({cell.digest for cell in suite.cells()}) == 17 * 3 * 5


def test_the_guide_shows_the_file():
    assert SUITE.read_text() in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guide_names_all_keys_and_arguments():
    from dataclasses import fields

    from fl_lightning.bench import Suite, Table
    from fl_lightning.bench.suite import SHOWS
    from fl_lightning.bench.tuning import Tuning
    from fl_lightning.cli.bench import bench_parser

    words = [one.name for kind in (Suite, Table, Tuning) for one in fields(kind) if one.name != "path"]
    options = [
        text for name in ("bench", "tune") for action in bench_parser(name)._actions for text in action.option_strings
    ]
    for word in [*words, *SHOWS, *(one for one in options if one not in ("-h", "--help"))]:
        assert re.search(rf"(?<![\w-]){word}(?![\w-])", GUIDE), word


def test_the_guide_names_files_that_exist():
    for path in re.findall(r"\]\((?!http|#)([^)#]+)", GUIDE):
        assert (ROOT / "docs" / path).exists(), path


@pytest.mark.usefixtures("_here")
def test_it_runs_and_its_tables_come_with_it(tmp_path, short, capsys):
    only = ["--only", "alpha=0.1,method=FedAvg", "alpha=0.1,method=ClippedChange"]
    run = ["bench", str(SUITE), "--seeds", "1", *only, "--config", str(short), "--output", str(tmp_path / "out")]
    main([*run, "--save", str(tmp_path / "saved")])
    said = capsys.readouterr().out
    assert "2 cells: 2 done." in said
    assert "| ClippedChange | 0.1 |" in said
    files = [f"own_method-suite.{end}" for end in ("cells.csv", "table.csv", "table.md", "table.tex")]
    assert sorted(one.name for one in (tmp_path / "saved").iterdir()) == files
    results = read_cells(tmp_path / "out" / files[0])
    # the files hold the whole suite, whatever part of it was asked for
    done = [one for one in results.values() if one.state == "done"]
    assert len(done) == 2 < len(results)
    assert len({one.plan for one in done}) == 1
    with (tmp_path / "saved" / files[1]).open() as file:
        means = {(one["table"], one["method"]): float(one["mean"]) for one in csv.DictReader(file) if one["mean"]}
    # the first round of this method is FedAvg
    assert means["1", "FedAvg"] == means["1", "ClippedChange"]
    assert "| FedAvg | **1.50** |" in said


@pytest.mark.usefixtures("_here")
def test_what_is_tuned_is_a_config_of_fit(tmp_path, short, capsys):
    run = ["tune", str(SUITE), "--only", "method=ClippedChange", "--trials", "2", "--config", str(short)]
    main([*run, "--output", str(tmp_path)])
    assert "(2 of 2)" in capsys.readouterr().out
    base = f"--config={SUITE.parent / 'clipped_change.yaml'}"
    with pytest.raises(SystemExit) as ended:
        main(["fit", base, f"--config={tmp_path / 'tuned' / 'ClippedChange.yaml'}", "--print_config"])
    assert ended.value.code == 0
    (method,) = yaml.safe_load(capsys.readouterr().out)["method"]
    assert method["class_path"].endswith("ClippedChange")
    assert method["init_args"]["factor"] in (0.5, 0.8)
