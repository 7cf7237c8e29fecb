"""Results of former code are never averaged with those of the present code without a note."""

import csv

import pytest
import yaml
from helpers.benches import outcome
from helpers.errors import assert_names

from fl_lightning.utilities.code_fingerprint import code_of

pytest_plugins = ["helpers.bench_fixtures", "helpers.report_fixtures"]

SUITE = {
    "base": {"model": {"class_path": "Toy"}},
    "axes": {"method": {"FedAvg": {}, "Mine": {"method": [{"class_path": "my_own_method.Mine"}]}}},
    "seeds": 2,
}
BEFORE, AFTER = "import my_own_helpers\nclass Mine: factor = 1\n", "class Mine: factor = 2\n"
MINE = ["method=Mine,seed=0", "method=Mine,seed=1"]
NOTE = "run with another version of my_own_method"


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    """A folder with a suite and a method."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(SUITE))
    (tmp_path / "my_own_method.py").write_text(BEFORE)
    (tmp_path / "my_own_helpers.py").write_text("one = 1\n")


@pytest.fixture
def run(bench):
    """``run(*args)`` runs the suite, whose cells have the value that is asked for."""

    def command(*args, value=0.5, known=True):
        def answer(cell, on_round):
            own = {"my_own_method": {"Mine"}} if "Mine" in cell["name"] else {}
            return outcome([value], **({"code": code_of(own)} if known else {}))

        return bench("suite.yaml", *args, answer=answer)

    return command


def edit(tmp_path, text=AFTER):
    (tmp_path / "my_own_method.py").write_text(text)


def test_it_stops_and_names_the_cells_and_writes_nothing(run, tmp_path):
    assert run("--save", "saved").status == 0
    edit(tmp_path, f'"""Told."""\n\n{BEFORE}  # unchanged')
    assert run().status == 0
    edit(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    ended = run("--save", "other")
    assert (ended.status, ended.ran) == (2, []) and ended.err.count("\n") == 1
    assert_names(ended.err, "error: --stale=None", "my_own_method", "2", "run", "keep")
    assert [line.split(":")[0] for line in ended.out.splitlines()] == MINE
    assert sorted(tmp_path.rglob("*")) == before
    assert run("--only", "method=FedAvg").status == 0  # they are not asked for
    assert "4 cells, 4 done" in run("--dry-run").out and "4 cells, 2 done" in run("--dry-run", "--stale", "run").out


@pytest.mark.parametrize("gone", [False, True])
def test_a_helper_that_changed_or_is_gone_counts(run, tmp_path, gone):
    run()
    path = tmp_path / "my_own_helpers.py"
    path.unlink() if gone else path.write_text("one = 2\n")
    assert_names(run().err, "error: --stale=None", "my_own_helpers")


def test_they_are_run_again_where_that_is_asked_for(run, tmp_path):
    run()
    edit(tmp_path)
    ended = run("--stale", "run", value=0.75)
    assert (ended.status, ended.ran) == (0, MINE)
    assert "| Mine | **75.00 ± 0.00** |" in ended.out and "another version" not in ended.out
    assert run("--stale", "run").ran == run().ran == []
    edit(tmp_path, BEFORE)
    assert run("--only", "seed=0", "--stale", "run").ran == MINE[:1]
    # the other one, of the same row, is of another code
    assert_names(run("--status").out, "seed 1", "another version of my_own_method")


def test_a_report_has_their_new_results(run, report, tmp_path):
    run()
    edit(tmp_path)
    run("--stale", "run", value=0.75)
    files = report(root=tmp_path / "runs")
    assert (files["runs.csv"].count(",test/accuracy,0.75,"), files["runs.csv"].count(",test/accuracy,0.5,")) == (2, 2)


def test_a_cell_that_fails_again_does_not_get_its_old_number_back(run, bench, tmp_path):
    run("--save", "saved")
    edit(tmp_path)
    assert bench("suite.yaml", "--stale", "run", answer=lambda *_: {"failed": "a bug"}).status == 1
    ended = run()
    assert (ended.status, ended.ran) == (1, []) and "| Mine | failed" in ended.out
    assert run("--retry", value=0.75).ran == MINE


def test_they_are_kept_with_a_footnote_where_that_is_asked_for(run, tmp_path):
    run()
    edit(tmp_path)
    ended = run("--stale", "keep", "--save", "saved")
    assert (ended.status, ended.ran) == (0, []) and NOTE in ended.out
    for form in ("md", "tex", "csv"):
        assert NOTE in next((tmp_path / "saved").glob(f"*.table.{form}")).read_text().replace("\\", "")
    assert run("--seeds", 3, "--stale", "keep", value=0.6).ran == ["method=FedAvg,seed=2", "method=Mine,seed=2"]
    assert f"seeds 0, 1: {NOTE}" in run("--seeds", 3, "--status").out


def test_code_survives_the_file_of_cells(run, tmp_path):
    run("--save", "saved")
    file = next((tmp_path / "saved").glob("*.cells.csv"))
    edit(tmp_path)
    ended = run("--load", file, "--output", "here")
    assert_names(ended.err, "error: --stale=None", "my_own_method")
    assert (ended.status, ended.ran) == (2, []) and not (tmp_path / "here").exists()
    assert run("--load", file, "--output", "here", "--stale", "run").ran == MINE
    ended = run("--load", file, "--output", "there", "--stale", "keep")
    assert (ended.status, ended.ran) == (0, []) and NOTE in ended.out


def test_the_code_of_cells_of_former_versions_is_unknown(run, tmp_path):
    """But for those that have no class of the user's."""
    ended = run("--save", "saved", known=False)
    assert ended.out.count("seeds 0, 1: run with an unknown version of my_own_method") == 1
    edit(tmp_path)
    file = next((tmp_path / "saved").glob("*.cells.csv"))
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    with file.open("w") as lines:  # as former versions wrote it
        writer = csv.DictWriter(lines, [name for name in rows[0] if name != "code"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    assert run().ran == run("--load", file, "--output", "here").ran == []
