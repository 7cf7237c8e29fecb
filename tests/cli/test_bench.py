"""``bench``: what it runs, prints and refuses."""

import re
import signal
import sqlite3
import sys
from contextlib import closing
from functools import partial

import pytest
import yaml
from helpers.benches import TOY, FakeRunner, outcome, quick_database, toy_suite
from helpers.errors import assert_names
from test_cells import BASE

from fl_lightning.bench import load_suite
from fl_lightning.bench.cells_csv import cells_csv
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.runner import Interrupt
from fl_lightning.cli import bench as command
from fl_lightning.cli import main


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cli.py"])


@pytest.fixture
def toy(tmp_path):
    return str(toy_suite(tmp_path).path)


@pytest.fixture
def fake(monkeypatch):
    """``fake(answer)`` lets runners answer without training; it is the list of the runners."""
    runners = []

    def use(answer=lambda cell, on_round: outcome()):
        def made(job=0):
            runners.append(FakeRunner(job, answer))
            return runners[-1]

        monkeypatch.setattr(command, "Driver", partial(command.Driver, runner=made))
        monkeypatch.setattr(command, "open_database", quick_database)
        monkeypatch.setattr(command, "Runner", lambda: FakeRunner())
        return runners

    return use


def status(*args):
    try:
        main(["bench", *map(str, args)])
    except SystemExit as ended:
        return ended.code
    return 0


def test_a_suite_is_run_and_its_table_is_printed(toy, fake, tmp_path, capsys):
    runners = fake()
    assert status(toy, "--jobs", 2) == 0
    said = capsys.readouterr().out
    assert "(4 of 4 done)" in said and "Toy" in said
    assert len(runners) == 2 and sum(len(one.ran) for one in runners) == 4
    assert (tmp_path / "runs" / load_suite(toy).name / "study.db").is_file()


def test_half_of_the_cells_without_data_fail_and_the_rest_runs(toy, fake, capsys):
    def answer(cell, on_round):
        return {"failed": "data.root='nowhere': not found"} if "lr=0.2" in cell["name"] else outcome()

    runners = fake(answer)
    assert status(toy) == 1
    said = capsys.readouterr()
    # a line for each cell, and a footnote of the table
    assert said.out.count("failed: data.root='nowhere': not found") == 2 + 1
    assert said.err.startswith("error: ")
    assert_names(said.err, "2 of 4 cells", "--retry")
    assert status(toy) == 1 and not runners[1].ran
    fake()
    assert status(toy, "--retry") == 0 and len(runners[2].ran) == 2


def test_the_status_says_how_far_it_is_and_runs_nothing(toy, fake, tmp_path, capsys):
    runners = fake()
    before = list(tmp_path.iterdir())
    assert status(toy, "--status") == 0
    assert list(tmp_path.iterdir()) == before
    status(toy, "--only", "lr=0.1")
    capsys.readouterr()
    assert status(toy, "--status") == 0
    assert len(runners) == 1 and "Toy" in capsys.readouterr().out


def test_only_some_cells_and_seeds_are_run(toy, fake):
    runners = fake()
    assert status(toy, "--seeds", 3, "--only", "method=FedProx,lr=0.1", "seed=2") == 0
    wanted = {"method=FedProx,lr=0.1"} | {f"method={m},lr={lr}" for m in ("FedAvg", "FedProx") for lr in (0.1, 0.2)}
    expected = [f"method=FedProx,lr=0.1,seed={seed}" for seed in (0, 1)]
    expected += [f"{one},seed=2" for one in wanted]
    assert sorted(runners[0].ran) == sorted(expected)


def test_a_config_comes_after_the_suite_in_all_cells(toy, fake, tmp_path):
    told = []
    fake(lambda cell, on_round: told.append(cell) or outcome())
    (tmp_path / "mine.yaml").write_text("data: {init_args: {root: here}}")
    assert status(toy, "--config", tmp_path / "mine.yaml", "--only", "lr=0.1,method=FedAvg") == 0
    assert told[0]["fragments"][-2:] == ({"data": {"init_args": {"root": "here"}}}, {"seed_everything": 0})


def test_a_dry_run_groups_kinds_and_makes_up_no_time(toy, fake, tmp_path, capsys):
    runners, before = fake(), list(tmp_path.iterdir())
    assert status(toy, "--dry-run", "--seeds", 5) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("method=FedAvg,lr=0.1; method=FedAvg,lr=0.2; ") and first.endswith("5 to run, 3 rounds")
    assert last.startswith("20 cells, 0 done, 0 failed; nothing is known of the time of 20,")
    assert not any(runner.ran for runner in runners) and list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("args", [[], ["--dry-run"]])
def test_configs_that_cannot_be_built_are_refused_before_any_cell_runs(toy, fake, tmp_path, capsys, monkeypatch, args):
    runners, reason = fake(), "FedProx.nu: is no argument"

    def check(runner, metric, configs):
        assert metric == "test/accuracy"
        return {name: reason for name in configs if "FedProx" in name}

    monkeypatch.setattr(FakeRunner, "check", check)
    assert status(toy, *args, "--seeds", 2) == 2
    ended = capsys.readouterr()
    assert ended.err == f"error: method=FedProx,lr=0.1; method=FedProx,lr=0.2: {reason}\n" and not ended.out
    assert not any(runner.ran for runner in runners) and not (tmp_path / "runs").exists()
    assert status(toy, "--only", "method=FedAvg") == 0  # the others are not asked for


def test_a_warning_of_cells_is_told_once_and_is_a_footnote_of_all(toy, fake, tmp_path, capsys):
    fake(lambda cell, on_round: outcome(warnings=["no such client"] if "FedProx" in cell["name"] else []))
    assert status(toy, "--save", "saved") == 0
    said = capsys.readouterr().out
    assert said.count("lr=0.1,seed=0: warning: no such client") == 1 == said.count("warning: ")
    assert said.count("no such client") == 2  # and below the table
    (file,) = (tmp_path / "saved").glob("*.cells.csv")
    assert status(toy, "--load", file, "--output", "here", "--status") == 0
    assert "no such client" in capsys.readouterr().out


def test_the_margin_is_fixed_once_a_cell_has_run(fake, tmp_path, capsys):
    fake()
    assert status(toy_suite(tmp_path, DECIDING).path, "--only", "method=FedAvg") == 0
    capsys.readouterr()
    other = toy_suite(tmp_path, DECIDING.replace("margin: 1", "margin: 2")).path
    for args in ([], ["--status"]):
        assert status(other, *args) == 2
        assert_names(capsys.readouterr().err, "decide.margin=2", "1", "--output")
    assert status(other, "--output", "other", "--only", "method=FedAvg") == 0
    assert status(toy_suite(tmp_path, DECIDING).path, "--status") == 0


def test_a_dry_run_takes_the_seconds_of_finished_cells(toy, fake, capsys):
    runners = fake()
    status(toy)
    assert status(toy, "--dry-run", "--seeds", 2) == 0
    assert sum(len(runner.ran) for runner in runners) == 4
    assert "8 cells, 4 done, 0 failed; the others take about 6 s" in capsys.readouterr().out


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
        ([], ("SUITE",)),
        (["{toy}", "--load", "{toy}"], ("toy.yaml",)),
    ],
)
def test_bad_input_is_one_line(toy, args, named, fake, capsys, tmp_path, monkeypatch):
    fake()
    monkeypatch.setattr("fl_lightning.bench.study.time.sleep", lambda seconds: None)
    (tmp_path / "run.yaml").write_text("seed_everything: 0\ntrainer: {max_rounds: 1}\n")  # a config is no suite
    before = list(tmp_path.iterdir())
    assert status(*(arg.format(toy=toy) for arg in args)) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1 and len(line) < 300
    assert_names(line, *named)
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
        ("overrides: [{when: {method: FedAvg}, confg: {}}]", "confg={}"),
        ("metric: 3", "metric=3"),
    ],
)
def test_a_suite_with_an_unknown_name_or_value_is_refused(change, named, tmp_path, capsys):
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({**yaml.safe_load(TOY), **yaml.safe_load(change)}))
    assert status("toy.yaml") == 2
    assert_names(capsys.readouterr().err, "error: ", named)


@pytest.mark.parametrize("arguments", [["bench", "bad.yaml"], ["bench", "toy.yaml", "--config", "bad.yaml"]])
def test_a_damaged_suite_or_config_is_refused_with_its_place(arguments, toy, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("a: 1\na: 2\n")
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: bad.yaml, line 2") and line.count("\n") == 1


def test_results_from_elsewhere_are_not_run_again(toy, fake, tmp_path, capsys):
    fake()
    only = ("--only", "method=FedAvg")
    assert status(toy, *only, "--output", "there", "--save", "saved") == 0
    file = next((tmp_path / "saved").glob("*.cells.csv"))
    runners = fake()
    del runners[:]
    capsys.readouterr()
    assert status(toy, "--load", file, "--output", "here", "--save", "again") == 0
    assert "2 of 2 finished cells are new here" in capsys.readouterr().out
    assert sum(len(one.ran) for one in runners) == 2  # those of the other method
    lines, again = (path.read_text().splitlines() for path in (file, tmp_path / "again" / file.name))
    assert {line for line in lines if ",done," in line} < set(again)
    assert status(toy, "--load", file, "--output", "here", "--status") == 0
    assert "0 of 2 finished cells are new here" in capsys.readouterr().out


def stored(toy, scale):
    """The text of a file of the cells of a suite that was run elsewhere."""
    suite = load_suite(toy)
    cells = suite.cells(scale)
    told = {**outcome()["done"], "state": "done"}
    return cells_csv(suite, cells, {one.digest: CellResult(one.name, one.digest, **told, scale=scale) for one in cells})


def test_results_of_other_configs_are_not_loaded(toy, tmp_path, capsys):
    whole, scaled = stored(toy, 1.0), stored(toy, 0.5)
    (tmp_path / "both.csv").write_text(whole + scaled.partition("\n")[2])
    (tmp_path / "scaled.csv").write_text(scaled)
    assert status(toy, "--load", "scaled.csv", "--output", "here", "--status") == 2
    assert_names(capsys.readouterr().err, "error: ", "--load='scaled.csv'")
    assert not (tmp_path / "here").exists()
    assert status(toy, "--load", "both.csv", "--output", "here", "--status") == 0
    assert "4 of 8 finished cells are new here; 4 others" in capsys.readouterr().out


def test_a_storage_without_its_driver_names_the_one_that_sqlalchemy_imports(toy, capsys, monkeypatch):
    monkeypatch.setattr("fl_lightning.bench.study.time.sleep", lambda seconds: None)
    for name in ("psycopg", "psycopg2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert status(toy, "--storage", "postgresql://me@nowhere/bench") == 2
    assert_names(capsys.readouterr().err, "--storage='postgresql://me@nowhere/bench'", "psycopg[binary]")


def test_a_database_that_another_process_has_locked_is_told(toy, fake, tmp_path, capsys, monkeypatch):
    fake()
    assert status(toy, "--only", "lr=0.1", "--output", "here") == 0
    capsys.readouterr()
    path = tmp_path / "here" / "study.db"
    with monkeypatch.context() as patch, closing(sqlite3.connect(path, isolation_level=None)) as other:
        patch.setattr("fl_lightning.bench.study.PATIENCE", 0)
        patch.setattr("fl_lightning.bench.study.MOMENT", 0)
        other.execute("BEGIN EXCLUSIVE")
        assert status(toy, "--output", "here") == 2
    warning, line = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ") and "study.db" in warning
    assert line.startswith("error: --storage") and "locked" in line
    assert status(toy, "--output", "here") == 0


def test_a_signal_ends_it_with_the_command_that_goes_on(toy, fake, capsys, monkeypatch):
    drivers = []

    def answer(cell, on_round):
        drivers[0]._catch(signal.SIGTERM, None)
        raise Interrupt

    runners = fake(answer)
    faked = command.Driver
    monkeypatch.setattr(command, "Driver", lambda *args, **how: drivers.append(faked(*args, **how)) or drivers[0])
    assert status(toy, "--jobs", "1") == 128 + signal.SIGTERM
    assert_names(capsys.readouterr().err, "SIGTERM", f"bench {toy} --jobs 1")
    assert len(runners[0].ran) == 1


@pytest.mark.thorough
def test_a_whole_bench_with_a_runner_process(tmp_path, capsys):
    """One cell trains, one lacks its data."""
    data = {"data": {"class_path": "NpyImages", "init_args": {"root": "nowhere"}}}
    axes = {"method": {"FedAvg": {}}, "data": {"Digits": {}, "Mine": data}}
    base = {**BASE, "trainer": {**BASE["trainer"], "max_rounds": 2}}
    (tmp_path / "real.yaml").write_text(yaml.safe_dump({"base": base, "axes": axes}, sort_keys=False))
    assert status("real.yaml", "--output", "out") == 1
    said = capsys.readouterr().out
    assert re.search(r"method=FedAvg,data=Digits,seed=0: test/accuracy \d+\.\d\d %, ", said)
    assert "method=FedAvg,data=Mine,seed=0: failed: data.root='nowhere'" in said
    runs = [path for path in (tmp_path / "out").iterdir() if path.name.startswith("method=FedAvg,data=Digits")]
    assert (runs[0] / "version_0" / "checkpoints" / "last.ckpt").is_file()


DECIDING = TOY.replace("seeds: 1", "seeds: 5") + "decide: {margin: 1, max_seeds: 6}\n"


def test_a_suite_is_run_until_decided(fake, tmp_path, capsys):
    """FedProx is better by 10 points with lr 0.1, and by more or less with 0.2, so that one pair needs more seeds."""
    suite = str(toy_suite(tmp_path, DECIDING).path)

    def answer(cell, on_round):
        seed = int(cell["name"].rpartition("=")[2])
        apart = (0.1 + 0.001 * seed if "lr=0.1" in cell["name"] else 0.2 * (-1) ** seed) * ("FedProx" in cell["name"])
        return outcome((0.25, 0.5 + apart), plan=str(seed))

    runners = fake(answer)
    assert status(suite, "--until-decided", "--save", tmp_path / "saved") == 0
    ran = [name for runner in runners for name in runner.ran]
    assert len(ran) == 2 * 5 + 2 * 6
    said = capsys.readouterr().out
    assert "| FedProx | 0.1 | +10.20 | " in said
    assert "| [+9.60, +10.80] | 5 | - | 0.056 | 50.00 | above |" in said
    assert "| 6 | [-22.99, +22.99] | 1.000 | 50.00 | undecided, about " in said
    (cells,) = (tmp_path / "saved").glob("*.cells.csv")
    assert len(cells.read_text().splitlines()) == 1 + len(ran)  # no cell that nobody asked for
    assert status(suite, "--until-decided") == 0
    assert sum(len(runner.ran) for runner in runners) == len(ran)
    assert status(suite, "--status") == 0
    assert "22 cells: 22 done." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "args", "keys"),
    [
        (TOY, ["--until-decided"], ["--until-decided", "decide"]),
        (DECIDING, ["--until-decided", "--seeds", 6], ["--seeds", "--max-seeds"]),
        (DECIDING, ["--until-decided", "--max-seeds", 4], ["--max-seeds", "decide.max_seeds"]),
        (DECIDING, ["--max-seeds", 6], ["--max-seeds", "--until-decided"]),
        (DECIDING, ["--until-decided", "--only", "seed=1"], ["--only", "seed"]),
        (TOY, ["--hours", 0], ["--hours"]),
    ],
)
def test_seeds_that_do_not_fit_the_suite_are_refused(text, args, keys, tmp_path, capsys):
    assert status(toy_suite(tmp_path, text).path, *args) == 2
    assert_names(capsys.readouterr().err, *keys)
    assert not (tmp_path / "runs").exists()


def test_a_table_of_scores_without_their_callback_is_refused_before_the_run(fake, tmp_path, capsys):
    runners = fake()
    text = TOY + "tables: [{show: scores}]\n"
    assert status(toy_suite(tmp_path, text).path) == 2
    assert_names(capsys.readouterr().err, "tables.show", "callbacks+")
    assert not runners
