"""Results of former code are never averaged with those of the present one in silence."""

import csv
import sqlite3
import sys
from contextlib import closing
from functools import partial

import pytest
import yaml
from helpers.benches import FakeRunner, outcome, quick_database
from helpers.errors import assert_names

from fl_lightning.bench import estimate, load_suite
from fl_lightning.bench.cells_csv import read_cells, stored_cells
from fl_lightning.bench.results import changed_code
from fl_lightning.bench.table import render
from fl_lightning.cli import bench as command
from fl_lightning.cli import main
from fl_lightning.sources import code_of

SUITE = {
    "base": {"model": {"class_path": "Toy"}},
    "axes": {"method": {"FedAvg": {}, "Mine": {"method": [{"class_path": "my_own_method.Mine"}]}}},
    "seeds": 2,
}
BEFORE, AFTER = "import my_own_helpers\nclass Mine: factor = 1\n", "class Mine: factor = 2\n"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with a suite and a method, whose cells have the value that they are asked to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    monkeypatch.setattr(command, "open_database", quick_database)
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(SUITE))
    (tmp_path / "my_own_method.py").write_text(BEFORE)
    (tmp_path / "my_own_helpers.py").write_text("one = 1\n")


@pytest.fixture
def bench(monkeypatch, capsys):
    """``bench(*arguments)`` is the exit status, what is said, and the names of the cells that were run."""

    def run(*args, value=0.5, known=True):
        ran = []

        def answer(cell, on_round):
            ran.append(cell["name"])
            own = {"my_own_method": {"Mine"}} if "Mine" in cell["name"] else {}
            return outcome([value], **({"code": code_of(own)} if known else {}))

        made = partial(FakeRunner, answer=answer)
        with monkeypatch.context() as patched:
            patched.setattr(command, "Driver", partial(command.Driver, runner=made))
            patched.setattr(estimate, "Runner", made)
            try:
                status = main(["bench", "suite.yaml", *map(str, args)]) or 0
            except SystemExit as ended:
                status = ended.code
        return status, capsys.readouterr(), ran

    return run


def edit(tmp_path, text=AFTER):
    (tmp_path / "my_own_method.py").write_text(text)


def contents(folder):
    """Of all files: of a database what it holds, since SQLite writes its files anew as a connection is closed."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix == ".db":
            with closing(sqlite3.connect(path)) as database:
                found[path] = list(database.iterdump())
        elif not path.name.endswith((".db-shm", ".db-wal")):
            found[path] = path.read_bytes()
    return found


def test_it_stops_and_names_the_cells_and_writes_nothing(bench, tmp_path):
    assert bench("--save", "saved")[0] == 0
    edit(tmp_path, f'"""Told."""\n\n{BEFORE}  # unchanged')
    assert bench()[0] == 0
    edit(tmp_path)
    before = contents(tmp_path)
    status, said, ran = bench("--save", "other")
    assert (status, ran) == (2, [])
    assert_names(said.err, "error: --stale=None", "my_own_method", "2", "run", "keep")
    assert said.err.count("\n") == 1
    assert [line.split(":")[0] for line in said.out.splitlines()] == ["method=Mine,seed=0", "method=Mine,seed=1"]
    assert contents(tmp_path) == before
    assert bench("--only", "method=FedAvg")[0] == 0  # they are not asked for


@pytest.mark.parametrize("gone", [False, True])
def test_a_helper_that_changed_or_is_gone_counts(bench, tmp_path, gone):
    bench()
    path = tmp_path / "my_own_helpers.py"
    path.unlink() if gone else path.write_text("one = 2\n")
    assert_names(bench()[1].err, "error: --stale=None", "my_own_helpers")


def test_they_are_run_anew_where_that_is_asked_for(bench, tmp_path):
    bench()
    edit(tmp_path)
    status, said, ran = bench("--stale", "run", value=0.75)
    assert (status, ran) == (0, ["method=Mine,seed=0", "method=Mine,seed=1"])
    assert "| Mine | **75.00 ± 0.00** |" in said.out and "another version" not in said.out
    assert bench("--stale", "run")[2] == bench()[2] == []
    edit(tmp_path, BEFORE)
    assert bench("--only", "seed=0", "--stale", "run")[2] == ["method=Mine,seed=0"]
    # the other one, of the same row, is of another code
    status, said, _ = bench("--status")
    assert status == 0 and "seed 1: run with another version of my_own_method" in said.out


def test_a_cell_that_fails_anew_does_not_get_its_old_number_back(bench, tmp_path, monkeypatch):
    bench("--save", "saved")
    edit(tmp_path)
    made = partial(FakeRunner, answer=lambda cell, on_round: {"failed": "a bug"})
    with monkeypatch.context() as patched:
        patched.setattr(command, "Driver", partial(command.Driver, runner=made))
        with pytest.raises(SystemExit) as ended:
            main(["bench", "suite.yaml", "--stale", "run"])
    assert ended.value.code == 1
    status, said, ran = bench()
    assert (status, ran) == (1, []) and "| Mine | failed" in said.out
    assert bench("--retry", value=0.75)[2] == ["method=Mine,seed=0", "method=Mine,seed=1"]


def test_they_are_kept_with_a_footnote_where_that_is_asked_for(bench, tmp_path):
    bench()
    edit(tmp_path)
    status, said, ran = bench("--stale", "keep", "--save", "saved")
    assert (status, ran) == (0, [])
    assert "run with another version of my_own_method" in said.out
    for form in ("md", "tex", "csv"):
        text = next((tmp_path / "saved").glob(f"*.table.{form}")).read_text().replace("\\", "")
        assert "run with another version of my_own_method" in text
    assert bench("--seeds", 3, "--stale", "keep", value=0.6)[2] == ["method=FedAvg,seed=2", "method=Mine,seed=2"]
    assert "seeds 0, 1: run with another version" in bench("--seeds", 3, "--status")[1].out


def test_a_dry_run_counts_what_would_be_run(bench, tmp_path):
    bench()
    edit(tmp_path)
    assert "4 cells, 4 done" in bench("--dry-run")[1].out
    assert "4 cells, 2 done" in bench("--dry-run", "--stale", "run")[1].out


def test_code_survives_the_file_of_cells(bench, tmp_path):
    bench("--save", "saved")
    file = next((tmp_path / "saved").glob("*.cells.csv"))
    results = read_cells(file)
    assert [list(one.code) for one in results.values()] == [[], ["my_own_helpers", "my_own_method"]] * 2
    edit(tmp_path)
    assert len(changed_code(results)) == 2
    assert "another version" in render(load_suite("suite.yaml"), stored_cells(file, load_suite("suite.yaml")), results)
    status, said, ran = bench("--load", file, "--output", "here")
    assert_names(said.err, "error: --stale=None", "my_own_method")
    assert (status, ran) == (2, [])
    assert not (tmp_path / "here").exists()
    assert len(bench("--load", file, "--output", "here", "--stale", "run")[2]) == 2
    status, said, ran = bench("--load", file, "--output", "there", "--stale", "keep")
    assert (status, ran) == (0, []) and "another version of my_own_method" in said.out


def test_of_cells_of_former_versions_it_is_said_that_nobody_knows(bench, tmp_path):
    """But for those that have no class of the user's."""
    _, said, _ = bench("--save", "saved", known=False)
    assert said.out.count("run with an unknown version of my_own_method") == 1
    assert "seeds 0, 1: run with an unknown version" in said.out
    edit(tmp_path)
    file = next((tmp_path / "saved").glob("*.cells.csv"))
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    with file.open("w") as lines:  # as former versions wrote it
        writer = csv.DictWriter(lines, [name for name in rows[0] if name != "code"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    assert all(one.code is None for one in read_cells(file).values())
    assert bench()[2] == bench("--load", file, "--output", "here")[2] == []
