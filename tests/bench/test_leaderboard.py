"""``bench --add`` runs the added rows alone, and says where they stand among the finished ones."""

import gzip
import math

import pandas as pd
import pytest
import yaml
from helpers.benches import outcome, toy_suite
from helpers.errors import assert_names

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
    assert ended.out.startswith("6 cells to run, about 6 s, if")
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
    for ended in (first, again):
        assert "rank 1 of 4" in ended.out and "+0.00 against FedProx, the best other mean" in ended.out


def test_a_row_of_fewer_seeds_is_compared_over_these(bench, suite, tmp_path):
    (tmp_path / "Same.yaml").write_text(yaml.safe_dump({"method": [{**MINE, "class_path": "Same"}]}))
    ended = bench(suite, "--add", "Same.yaml", "--seeds", "2", "--output", "out", answer=answer)
    assert len(ended.ran) == 4
    assert "rank 1 of 4" in ended.out and "+0.00 against FedProx, the best other mean" in ended.out


def test_only_restricts_added_rows_and_their_tuning(bench, suite):
    arguments = ("--add", "mine.yaml", "--tune", "mu=0.1,1", "--only", "data=A", "--output", "out")
    ended = bench(suite, *arguments, answer=answer)
    assert ended.status == 0 and len(ended.ran) == 2 + 3
    assert all("data=A" in name for name in ended.ran)


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


def test_a_folder_of_tuned_values_applies_to_its_settings_and_methods(suite, tmp_path):
    (tmp_path / "tuned" / "B").mkdir(parents=True)
    (tmp_path / "tuned" / "B" / "FedProx.yaml").write_text("method: [{class_path: FedProx, init_args: {mu: 5}}]")
    cells = load_suite(toy_suite(tmp_path, {**SUITE, "tuned": "tuned"}).path).cells()
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
        (["--add", "mine.yaml", "--rerun", "Nobody"], ["--rerun", "Nobody"]),
    ],
)
def test_bad_input_is_named(bench, suite, arguments, names):
    ended = bench(suite, *arguments, "--output", "out", answer=answer)
    assert ended.status == 2 and ended.ran == []
    assert_names(ended.err, *names)
