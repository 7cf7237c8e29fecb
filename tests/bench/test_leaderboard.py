"""``bench --add`` runs the added rows alone, and says where they stand among the finished ones."""

import gzip
import math
import os
import signal

import pandas as pd
import pytest
import yaml
from helpers.benches import outcome, toy_suite
from helpers.errors import assert_names, refused

from fl_lightning.bench import Cell, load_suite

pytest_plugins = ["helpers.bench_fixtures"]
pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")

PROX = {"class_path": "FedProx", "init_args": {"mu": 0.1}}
MINE = {"class_path": "Mine", "init_args": {"mu": 0.1}}
ACCURACIES = {"FedAvg": 0.5, "FedProx": 0.7, "FedLC": 0.55, "IID": 0.9, "mine": 0.6, "Same": 0.7, "Own": 0.8}
SUITE = {
    "base": {
        "model": {"class_path": "M"},
        "data": {"class_path": "D"},
        "trainer": {"max_rounds": 2, "callbacks": [{"class_path": "PersonalAccuracy"}]},
    },
    "axes": {
        "data": {"A": {"data": {"init_args": {"n": 1}}}, "B": {"data": {"init_args": {"n": 2}}}},
        "method": {
            "FedAvg": {},
            "FedProx": {"method": [PROX]},
            "FedLC": {"method": ["FedLC"]},
            "IID": {"data": {"init_args": {"iid": True}}},
        },
    },
    "seeds": 3,
    "tables": [{"show": "last", "k": 2}, {"show": "fair"}],
    "tune": {"search": {"FedProx": {"mu": [1]}}, "seeds": [7]},
}


# the axis of the folders of tuned values is not the first
LATER_AXIS = {"data": SUITE["axes"]["data"], "method": SUITE["axes"]["method"]}
BEHIND_ONE_LABEL = {"axes": {"rate": {"key": "model.lr", "values": [1]}, **LATER_AXIS}}
BEHIND_A_FIXED_AXIS = {
    "axes": {"rate": {"key": "model.lr", "values": [1, 2]}, **LATER_AXIS},
    "tune": {"search": {"FedProx": {"mu": [1]}}, "at": {"rate": 1}},
}


def answer(cell, on_round):
    """Each method has its accuracy, less in setting B, more in later seeds; a tuned coefficient counts, too."""
    config = Cell({}, 0, tuple(cell["fragments"])).config
    (method,) = [part.partition("=")[2] for part in cell["name"].split(",") if part.startswith("method=")]
    mu = config["method"][-1]["init_args"].get("mu", 0.1) if method == "mine" else 0.1
    of_seed = 0.01 * (config["seed_everything"] % 7) * (1 if method != "mine" else 2)
    value = ACCURACIES[method] + of_seed - 0.1 * config["data"]["init_args"]["n"] - abs(math.log10(mu) + 1) / 100
    metrics = {"bytes/up": 4e6, "test/accuracy": value}
    metrics |= {"personal/accuracy": value / 2, "personal/worst_tenth": value / 4}
    plan = "iid" if method == "IID" else f"{config['data']} {config['seed_everything']}"
    for round_ in range(2):
        on_round(round_, value)
    warned = ["1 of 2 entries of the state stay with each client: metrics are means over the clients' own models"]
    return outcome((value, value), metrics=metrics, plan=plan, warnings=warned if method == "Own" else [])


@pytest.fixture
def suite(bench, tmp_path):
    """The path of a suite whose rows are finished in a compressed file beside it."""
    path = toy_suite(tmp_path, SUITE).path
    assert bench(path, "--output", "all", answer=answer).status == 0
    (cells,) = (tmp_path / "all").glob("*.cells.csv")
    (tmp_path / "cells.csv.gz").write_bytes(gzip.compress(cells.read_bytes()))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"method+": [MINE]}))
    toy_suite(tmp_path, {**SUITE, "finished": "cells.csv.gz"})
    return path


def test_only_the_added_row_runs_and_its_rank_and_differences_are_those_by_hand(bench, suite, tmp_path):
    ended = bench(suite, "--add", "mine.yaml", "--output", "out", answer=answer)
    assert ended.status == 0
    # two rounds of half a second in each cell
    assert ended.out.startswith("6 cells, 0 done, 0 failed; the rounds of the others take about 6 s with --jobs 1")
    assert ended.ran == [f"data={data},method=mine,seed={seed}" for seed in range(3) for data in "AB"]
    assert "A, global model: mine: 52.00 over 3 seeds, rank 2 of 4" in ended.out
    # the differences in the seeds are 10, 11, 12: Student's 97.5 % quantile with 2 degrees is 4.303
    assert "+11.00 (+8.52 to +13.48) against FedAvg, the baseline" in ended.out
    assert "+6.00 (+3.52 to +8.48) against FedLC, the nearest mean" in ended.out
    assert "-9.00 (-11.48 to -6.52) against FedProx, the best other mean" in ended.out
    (table,) = (tmp_path / "out").glob("*.leaderboard.csv")
    frames = {part: of.set_index("method") for part, of in pd.read_csv(table).groupby(["setting", "endpoint"])}
    of_a = frames["A", "global model"]
    assert [*of_a.index] == ["FedProx", "mine", "FedLC", "FedAvg", "IID"]
    assert [*of_a["rank"].head(4)] == [1, 2, 3, 4] and math.isnan(of_a["rank"]["IID"])
    assert of_a["difference"]["FedProx"] == pytest.approx(20) and math.isnan(of_a["difference"]["IID"])
    # the clients' accuracy is half of it
    assert frames["B", "clients' models"]["mean"]["mine"] == pytest.approx(21)
    names = {path.suffix for path in (tmp_path / "out").glob("*.leaderboard.*")}
    assert names == {".md", ".tex", ".csv", ".svg", ".png"}


def test_a_method_without_a_shared_model_is_ranked_by_the_clients_models_alone(bench, suite, tmp_path):
    (tmp_path / "Own.yaml").write_text(yaml.safe_dump({"method": [{**MINE, "class_path": "Own"}]}))
    ended = bench(suite, "--add", "Own.yaml", "--output", "out", answer=answer)
    assert "A, clients' models: Own: 35.50 over 3 seeds, rank 1 of 4" in ended.out
    assert "global model: Own" not in ended.out
    (table,) = (tmp_path / "out").glob("*.leaderboard.csv")
    frame = pd.read_csv(table).set_index("method")
    assert frame["worst tenth of the clients"]["Own"].tolist() == pytest.approx([17.75, 15.25])


def test_equal_cells_share_a_rank_and_repeating_the_command_runs_nothing(bench, suite, tmp_path):
    (tmp_path / "Same.yaml").write_text(yaml.safe_dump({"method": [{**MINE, "class_path": "Same"}]}))
    first = bench(suite, "--add", "Same.yaml", "--output", "out", answer=answer)
    again = bench(suite, "--add", "Same.yaml", "--output", "out", answer=answer)
    assert len(first.ran) == 6 and again.ran == []
    assert again.out.startswith("6 cells, 6 done")
    for ended in (first, again):
        assert "rank 1 of 4" in ended.out and "+0.00 against FedProx, the best other mean" in ended.out


@pytest.mark.parametrize("seeds", [2, 5])
def test_a_row_of_other_seeds_is_compared_over_those_that_the_baseline_has_too(bench, suite, tmp_path, seeds):
    (tmp_path / "Same.yaml").write_text(yaml.safe_dump({"method": [{**MINE, "class_path": "Same"}]}))
    ended = bench(suite, "--add", "Same.yaml", "--seeds", seeds, "--output", "out", answer=answer)
    assert len(ended.ran) == 2 * seeds and f"over {min(seeds, 3)} seeds" in ended.out
    assert "rank 1 of 4" in ended.out and "+0.00 against FedProx, the best other mean" in ended.out


def test_a_rank_by_cells_of_changed_code_says_so(bench, suite):
    def with_code(cell, on_round):
        message = answer(cell, on_round)
        return {"done": {**message["done"], "code": {"my_method": "digest"}}}

    bench(suite, "--add", "mine.yaml", "--output", "out", answer=with_code)
    ended = bench(suite, "--add", "mine.yaml", "--stale", "keep", "--output", "out")
    assert "rank 2 of 4" in ended.out and "another version of my_method" in ended.out


def test_a_row_of_which_a_run_failed_has_no_rank(bench, suite):
    def failing(cell, on_round):
        return {"failed": "loss is nan"} if "method=mine,seed=1" in cell["name"] else answer(cell, on_round)

    ended = bench(suite, "--add", "mine.yaml", "--output", "out", answer=failing)
    assert ended.status == 1 and "mine: 52.00 over 2 seeds, without a rank" in ended.out
    assert "| 1 | FedProx | 61.00 ± 1.00" in ended.out


def test_settings_of_an_added_row_that_are_not_the_baselines_are_named(bench, suite, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"method": [MINE], "trainer": {"local_epochs": 9}}))
    ended = bench(suite, "--add", "mine.yaml", "--rerun", "FedAvg", "--dry-run", "--output", "out")
    assert "12 cells, 0 done, 0 failed; the rounds of the others take about 12 s" in ended.out
    assert_names(ended.err, "warning: mine", "FedAvg", "trainer.local_epochs 9")


@pytest.mark.parametrize("option", [("--offline",), ("--scale", "0.5")])
def test_runs_that_no_other_row_has_are_not_ranked(bench, suite, tmp_path, option):
    ended = bench(suite, "--add", "mine.yaml", *option, "--output", "out", answer=answer)
    assert ended.status == 0 and "rank" not in ended.out and not [*(tmp_path / "out").glob("*.leaderboard.*")]


@pytest.mark.parametrize("answers", [answer, lambda *_: {"failed": "no data"}])
def test_a_row_without_a_number_is_not_ranked(bench, tmp_path, answers):
    path = toy_suite(tmp_path, SUITE).path
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"method": [MINE]}))
    before = bench(path, "--add", "mine.yaml", "--status", "--output", "out")
    assert before.status == 0 and "no added row has a number" in before.out
    ended = bench(path, "--add", "mine.yaml", "--output", "out", answer=answers)
    assert (ended.status, "rank 1 of 1" in ended.out) == ((0, True) if answers is answer else (1, False))


def test_numbers_have_the_decimals_of_their_table(bench, tmp_path):
    path = toy_suite(tmp_path, {**SUITE, "percent": False, "minimize": True, "metric": "test/loss"}).path
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"method": [MINE]}))
    ended = bench(path, "--add", "mine.yaml", "--rerun", "FedAvg", "--seeds", "2", "--output", "out", answer=answer)
    # differences of 0.10 and 0.11
    assert "A, global model: mine: 0.5100 over 2 seeds, rank 2 of 2; +0.1050 (+0.0415 to +0.1685)" in ended.out


def test_only_restricts_added_rows_and_their_tuning(bench, suite):
    arguments = ("--add", "mine.yaml", "--tune", "mu=0.1", "mu=1", "--only", "data=A", "--output", "out")
    assert "without" not in bench(suite, *arguments, "--status").out
    ended = bench(suite, *arguments, answer=answer)
    assert ended.status == 0 and len(ended.ran) == 2 + 3
    assert all("data=A" in name for name in ended.ran)
    status = bench(suite, *arguments, "--status")
    assert status.ran == [] and "mine: 52.00 over 3 seeds, rank 2 of 4" in status.out


def test_an_interrupted_tuning_has_the_status_of_its_signal(bench, suite):
    arguments = ("--add", "mine.yaml", "--tune", "mu=0.1,1", "--output", "out")
    ended = bench(suite, *arguments, answer=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert ended.status == 128 + signal.SIGTERM and "error" not in ended.err


def test_without_added_rows_the_finished_cells_are_shown_at_once(bench, suite):
    ended = bench(suite, "--output", "out", answer=answer)
    assert ended.status == 0 and ended.ran == [] and "24 cells: 24 done." in ended.out


def test_rerun_runs_a_row_here(bench, suite):
    ended = bench(suite, "--add", "mine.yaml", "--rerun", "FedAvg", "--output", "out", answer=answer)
    assert len(ended.ran) == 12 and "data=A,method=FedAvg,seed=0" in ended.ran


def test_the_coefficient_is_tuned_in_each_setting_on_the_seeds_of_the_suite(bench, suite, tmp_path):
    ended = bench(suite, "--add", "mine.yaml", "--tune", "mu=0.01,0.1,1", "--output", "out", answer=answer)
    assert ended.status == 0 and len(ended.ran) == 2 * 3 + 6
    # a file of another command is no hindrance, nor is a folder that is not there yet
    (tmp_path / "out" / "tuned" / "A" / "Other.yaml").write_text("method: [Other]")
    assert bench(suite, "--add", "mine.yaml", "--tune", "mu=0.01,0.1,1", "--output", "out", answer=answer).status == 0
    (tmp_path / "equal.yaml").write_text(yaml.safe_dump({"method": [PROX]}))
    assert bench(suite, "--add", "equal.yaml", "--output", "new", answer=answer).ran == []
    for data in "AB":
        tuned = yaml.safe_load((tmp_path / "out" / "tuned" / data / "mine.yaml").read_text())
        assert tuned["method"][0]["init_args"] == {"mu": 0.1}


@pytest.mark.parametrize("keys", [{}, BEHIND_ONE_LABEL, BEHIND_A_FIXED_AXIS])
def test_a_folder_of_tuned_values_applies_to_its_settings_and_methods(suite, tmp_path, keys):
    (tmp_path / "tuned" / "B").mkdir(parents=True)
    (tmp_path / "tuned" / "B" / "FedProx.yaml").write_text("method: [{class_path: FedProx, init_args: {mu: 5}}]")
    cells = load_suite(toy_suite(tmp_path, {**SUITE, **keys, "tuned": "tuned"}).path).cells()
    mu = {cell.labels["data"]: cell.config["method"][0]["init_args"]["mu"] for cell in cells if "FedProx" in cell.name}
    assert mu == {"A": 0.1, "B": 5}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--add", "nothing.yaml"], ["nothing.yaml"]),
        (["--add", "my.FedAvg"], ["--add", "FedAvg"]),
        (["--add", "mine.yaml", "mine.yaml"], ["--add", "mine"]),
        (["--tune", "mu=1"], ["--tune", "--add"]),
        (["--add", "mine.yaml", "--tune", "mu"], ["--tune='mu'"]),
        (["--add", "mine.yaml", "--tune", "mu=["], ["--tune mu=["]),
        (["--add", "mine.yaml", "--tune", "mu=1", "--dry-run"], ["--dry-run", "--tune"]),
        (["--add", "mine.yaml", "--rerun", "Nobody"], ["--rerun", "Nobody"]),
        (["--rerun", "Nobody"], ["--rerun", "Nobody"]),
        (["--add", "mine.yaml", "--only", "method=FedAvg"], ["--only", "--add"]),
        (["--add", "seed.yaml"], ["--add seed.yaml.seed_everything=3"]),
        (["--config", "seed.yaml"], ["--config seed.yaml.seed_everything=3"]),
        (["--add", "方法.yaml"], ["--add", "方法"]),
    ],
)
def test_bad_input_is_named(bench, suite, tmp_path, arguments, names):
    for name in ("seed.yaml", "方法.yaml"):
        (tmp_path / name).write_text(yaml.safe_dump({"method": [MINE], "seed_everything": 3}))
    ended = bench(suite, *arguments, "--output", "out", answer=answer)
    assert ended.status == 2 and ended.ran == []
    assert_names(ended.err, *names)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"tables": []}, ["--add", "final"]),
        ({"tables": [{"show": "rounds_to", "target": 0.5}]}, ["--add", "final"]),
        ({"tables": [{"show": "last"}], "decide": {"margin": 1}}, ["--add", "decide"]),
        ({"axes": {"data": SUITE["axes"]["data"]}}, ["--add", "method"]),
    ],
)
def test_a_suite_that_cannot_rank_its_rows_takes_none(bench, tmp_path, keys, names):
    ended = bench(toy_suite(tmp_path, {**SUITE, **keys}).path, "--add", "my.Mine", "--output", "out", answer=answer)
    assert ended.status == 2 and ended.ran == []
    assert_names(ended.err, *names)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"tuned": "nowhere"}, "tuned="),
        ({"tune": None}, "tune=None"),
        ({"finished": "cells.csv", "tables": [{"show": "last"}], "decide": {"margin": 1}}, "finished='cells.csv'"),
    ],
)
def test_keys_without_an_effect_are_refused(tmp_path, keys, name):
    with refused(name):
        toy_suite(tmp_path, {**SUITE, **keys})


def test_a_folder_does_not_hide_a_suite_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaderboard").mkdir()
    assert "FedProx" in load_suite("leaderboard").axes["method"]
