"""``bench``: what it runs, prints and refuses."""

import sqlite3
import sys
from contextlib import closing

import pytest
import yaml
from helpers.benches import TOY, FakeWorkerClient, outcome, toy_suite
from helpers.errors import assert_names

from fl_lightning.bench import load_suite
from fl_lightning.bench.cells_csv import cells_csv
from fl_lightning.bench.results import CellResult

pytest_plugins = ["helpers.bench_fixtures"]

DECIDING = TOY.replace("seeds: 1", "seeds: 5") + "decide: {margin: 1, max_seeds: 6}\n"


@pytest.fixture
def toy(tmp_path):
    return str(toy_suite(tmp_path).path)


def test_the_status_says_how_far_it_is_and_runs_nothing(bench, toy, tmp_path):
    before = list(tmp_path.iterdir())
    ended = bench(toy, "--status")
    assert (ended.status, ended.ran) == (0, []) and "4 waiting" in ended.out
    assert list(tmp_path.iterdir()) == before
    bench(toy, "--only", "lr=0.1")
    assert "4 cells: 2 done, 2 waiting" in bench(toy, "--status").out


def test_only_some_cells_and_seeds_are_run(bench, toy):
    ended = bench(toy, "--seeds", 3, "--only", "method=FedProx,lr=0.1", "seed=2")
    expected = [f"method=FedProx,lr=0.1,seed={seed}" for seed in (0, 1)]
    expected += [f"method={method},lr={lr},seed=2" for method in ("FedAvg", "FedProx") for lr in (0.1, 0.2)]
    assert ended.status == 0 and sorted(ended.ran) == sorted(expected)


def test_a_run_ends_with_its_conclusion_and_the_paths_of_its_tables(bench, toy, tmp_path):
    def answer(cell, on_round):
        return outcome(values=(0.5, 0.75 if "FedProx" in cell["name"] else 0.5))

    *_, sentence, output, save = bench(toy, "--save", "saved", answer=answer).out.splitlines()
    assert_names(sentence, "FedProx has the best", "2 of 2 columns", "75.00 over 1 seed", "+25.00", "FedAvg")
    for line, folder in ((output, next((tmp_path / "runs").iterdir())), (save, tmp_path / "saved")):
        assert_names(line, str(folder.relative_to(tmp_path)))
        assert all(path.name in line for path in folder.glob("*.table.*"))
    assert bench(toy, "--status").out.splitlines()[-1] == sentence


def test_a_config_comes_after_the_suite_in_all_cells(bench, toy, tmp_path):
    told = []
    (tmp_path / "mine.yaml").write_text("data: {init_args: {root: here}}")
    only = ["--only", "lr=0.1,method=FedAvg"]
    bench(toy, "--config", "mine.yaml", *only, answer=lambda cell, on_round: told.append(cell) or outcome())
    assert told[0]["fragments"][-2:] == ({"data": {"init_args": {"root": "here"}}}, {"seed_everything": 0})


def test_a_dry_run_groups_kinds_and_makes_up_no_time(bench, toy, tmp_path):
    before = list(tmp_path.iterdir())
    ended = bench(toy, "--dry-run", "--seeds", 5)
    first, last = ended.out.splitlines()
    assert first.startswith("method=FedAvg,lr=0.1; method=FedAvg,lr=0.2; ") and first.endswith("5 to run, 3 rounds")
    assert_names(last, "20 cells", "0 done", "0 failed", "no time estimate for 20")
    assert not ended.ran and list(tmp_path.iterdir()) == before


def test_a_dry_run_takes_the_seconds_of_finished_cells(bench, toy):
    bench(toy)
    ended = bench(toy, "--dry-run", "--seeds", 2)
    assert "8 cells, 4 done, 0 failed; the rounds of the others take about 6 s" in ended.out and not ended.ran


@pytest.mark.parametrize("args", [[], ["--dry-run"]])
def test_configs_that_cannot_be_built_are_refused_before_any_cell_runs(bench, toy, tmp_path, monkeypatch, args):
    reason = "FedProx.nu: is no argument"

    def check(client, metric, configs):
        assert metric == "test/accuracy"
        return {name: reason for name in configs if "FedProx" in name}

    monkeypatch.setattr(FakeWorkerClient, "check", check)
    ended = bench(toy, *args, "--seeds", 2)
    assert ended.status == 2 and not ended.out and not ended.ran and not (tmp_path / "runs").exists()
    assert ended.err == (
        f"error: method=FedProx,lr=0.1; method=FedProx,lr=0.2: {reason}\n"
        "error: 2 of 4 can run: --only method=FedAvg,lr=0.1 method=FedAvg,lr=0.2\n"
    )
    assert bench(toy, "--only", "method=FedAvg").status == 0  # the others are not asked for


def test_a_warning_of_cells_is_told_once_and_is_a_footnote_of_all(bench, toy, tmp_path):
    def answer(cell, on_round):
        return outcome(warnings=["no such client"] if "FedProx" in cell["name"] else [])

    said = bench(toy, "--save", "saved", answer=answer).out
    assert said.count("lr=0.1,seed=0: warning: no such client") == 1 == said.count("warning: ")
    assert said.count("no such client") == 2  # and below the table
    (file,) = (tmp_path / "saved").glob("*.cells.csv")
    assert "no such client" in bench(toy, "--load", file, "--output", "here", "--status").out


def test_the_margin_is_fixed_once_a_cell_has_run(bench, tmp_path):
    assert bench(toy_suite(tmp_path, DECIDING).path, "--only", "method=FedAvg").status == 0
    other = toy_suite(tmp_path, DECIDING.replace("margin: 1", "margin: 2")).path
    for args in ([], ["--status"]):
        ended = bench(other, *args)
        assert ended.status == 2
        assert_names(ended.err, "decide.margin=2", "1", "--output")
    assert bench(other, "--output", "other", "--only", "method=FedAvg").status == 0
    assert bench(toy_suite(tmp_path, DECIDING).path, "--status").status == 0


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["nowhere.yaml"], ("nowhere.yaml",)),
        (["run.yaml"], ("run.yaml", "fit --config run.yaml")),
        (["{toy}", "--jobs", "0"], ("--jobs=0",)),
        (["{toy}", "--seeds", "0"], ("--seeds=0",)),
        (["{toy}", "--scale", "2"], ("--scale=2.0",)),
        (["{toy}", "--only", "method=MOON"], ("--only='method=MOON'",)),
        (["{toy}", "--storage", "sqlite:////nowhere/study.db"], ("--storage='sqlite:////nowhere/study.db'",)),
        (["{toy}", "--output", "/proc/here"], ("--output='/proc/here'",)),
        ([], ("SUITE: ", "add it")),
        (["{toy}", "--nothing"], ("--nothing: ", "remove it")),
        (["{toy}", "--stale", "x"], ("--stale='x': ", "run", "keep")),
        (["{toy}", "--jobs", "x"], ("--jobs='x': ", "int")),
        (["{toy}", "--jobs"], ("--jobs: ", "one value")),
        (["{toy}", "--load", "{toy}"], ("toy.yaml",)),
        (["bad.yaml"], ("bad.yaml, line 2",)),
        (["{toy}", "--config", "bad.yaml"], ("bad.yaml, line 2",)),
    ],
)
def test_bad_input_is_one_line(bench, toy, args, named, tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.bench.study.time.sleep", lambda seconds: None)
    (tmp_path / "run.yaml").write_text("seed_everything: 0\ntrainer: {max_rounds: 1}\n")  # a config is no suite
    (tmp_path / "bad.yaml").write_text("a: 1\na: 2\n")
    before = list(tmp_path.iterdir())
    ended = bench(*(arg.format(toy=toy) for arg in args))
    assert ended.status == 2 and ended.err.startswith("error: ") and ended.err.count("\n") == 1 and len(ended.err) < 300
    assert_names(ended.err, *named)
    assert [path for path in tmp_path.iterdir() if path.name != "runs"] == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("tables: [{rows: [metod]}]", "'metod'"),
        ("tables: {show: final}", "tables={'show': 'final'}"),
        ("baseline: {method: FedNothing}", "FedNothing"),
        ("baseline: FedAvg", "baseline='FedAvg'"),
        ("axes: {}", "axes={}"),
        ("axes: {lr: {key: lr, values: 0.1}}", "axes.lr.values=0.1"),
        ("axes: {lr: {key: lr, values: [1, 1]}}", "axes.lr=['1', '1']"),
        ("seeds: [1, 1]", "seeds=[1, 1]"),
        ("exclude: {lr: 0.1}", "exclude={'lr': 0.1}"),
        ("overrides: [{config: {}}]", "overrides.when=None"),
        ("overrides: [{when: {method: FedAvg}, confg: {}}]", "overrides.confg={}"),
        ("metric: 3", "metric=3"),
    ],
)
def test_a_suite_with_an_unknown_name_or_value_is_refused(bench, change, named, tmp_path):
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({**yaml.safe_load(TOY), **yaml.safe_load(change)}))
    ended = bench("toy.yaml")
    assert ended.status == 2
    assert_names(ended.err, "error: ", named)


@pytest.mark.parametrize(
    ("trainer", "jobs", "most"),
    [({}, 5, 4), ({"threads_per_worker": 2}, 3, 2), ({"devices": 2, "threads_per_worker": 2}, 2, 1)],
)
def test_more_jobs_than_cores_are_refused(bench, tmp_path, trainer, jobs, most):
    """The helper has four cores."""
    path = toy_suite(tmp_path, {**yaml.safe_load(TOY), "base": {"trainer": trainer}}).path
    ended = bench(path, "--jobs", jobs)
    assert ended.status == 2 and not ended.ran
    assert_names(ended.err, f"--jobs={jobs}", "4 cores", f"at most {most}")
    assert bench(path, "--jobs", most).status == 0


def test_results_from_elsewhere_are_not_run_again(bench, toy, tmp_path):
    assert bench(toy, "--only", "method=FedAvg", "--output", "there", "--save", "saved").status == 0
    file = next((tmp_path / "saved").glob("*.cells.csv"))
    ended = bench(toy, "--load", file, "--output", "here", "--save", "again")
    assert "2 of 2 finished cells are new here" in ended.out
    assert len(ended.ran) == 2  # those of the other method
    lines, again = (path.read_text().splitlines() for path in (file, tmp_path / "again" / file.name))
    assert {line for line in lines if ",done," in line} < set(again)
    assert "0 of 2 finished cells are new here" in bench(toy, "--load", file, "--output", "here", "--status").out


def stored(toy, scale):
    """The text of a file of the cells of a suite that was run elsewhere."""
    suite = load_suite(toy)
    cells = suite.cells(scale)
    told = {**outcome()["done"], "state": "done"}
    return cells_csv(suite, cells, {one.digest: CellResult(one.name, one.digest, **told, scale=scale) for one in cells})


def test_results_of_other_configs_are_not_loaded(bench, toy, tmp_path):
    whole, scaled = stored(toy, 1.0), stored(toy, 0.5)
    (tmp_path / "both.csv").write_text(whole + scaled.partition("\n")[2])
    (tmp_path / "scaled.csv").write_text(scaled)
    ended = bench(toy, "--load", "scaled.csv", "--output", "here", "--status")
    assert ended.status == 2 and not (tmp_path / "here").exists()
    assert_names(ended.err, "error: ", "--load='scaled.csv'")
    ended = bench(toy, "--load", "both.csv", "--output", "here", "--status")
    assert ended.status == 0 and "4 of 8 finished cells are new here; 4 others" in ended.out


def test_a_storage_without_its_driver_names_the_one_that_sqlalchemy_imports(bench, toy, monkeypatch):
    monkeypatch.setattr("fl_lightning.bench.study.time.sleep", lambda seconds: None)
    for name in ("psycopg", "psycopg2"):
        monkeypatch.setitem(sys.modules, name, None)
    ended = bench(toy, "--storage", "postgresql://me@nowhere/bench")
    assert ended.status == 2
    assert_names(ended.err, "--storage='postgresql://me@nowhere/bench'", "psycopg[binary]")


def test_a_database_that_another_process_has_locked_is_refused(bench, toy, tmp_path, monkeypatch):
    assert bench(toy, "--only", "lr=0.1", "--output", "here").status == 0
    monkeypatch.setattr("fl_lightning.bench.study.PATIENCE", 0)
    with closing(sqlite3.connect(tmp_path / "here" / "study.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        ended = bench(toy, "--output", "here")
    assert ended.status == 2
    assert_names(ended.err, "error: --storage", "locked")


@pytest.mark.parametrize(
    ("text", "args", "keys"),
    [
        (TOY, ["--until-decided"], ["--until-decided", "decide"]),
        (DECIDING, ["--until-decided", "--seeds", 6], ["--seeds"]),
        (DECIDING, ["--until-decided", "--only", "seed=1"], ["--only", "seed"]),
    ],
)
def test_seeds_that_do_not_fit_the_suite_are_refused(bench, text, args, keys, tmp_path):
    ended = bench(toy_suite(tmp_path, text).path, *args)
    assert ended.status == 2 and not (tmp_path / "runs").exists()
    assert_names(ended.err, *keys)


def test_a_table_of_scores_without_their_callback_is_refused_before_the_run(bench, tmp_path):
    ended = bench(toy_suite(tmp_path, TOY + "tables: [{show: scores}]\n").path)
    assert ended.status == 2 and not ended.ran
    assert_names(ended.err, "tables.show", "callbacks+")
