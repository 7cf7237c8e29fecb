"""A suite can be tried without its data set, by tiny runs that stay apart from its results."""

import os

import pytest
from helpers.benches import toy_suite, train
from helpers.errors import assert_names
from test_suites import SUITES, suite_of

from fl_lightning.bench.suite import Suite, without_data
from fl_lightning.bench.worker_client import PROGRAM, answer_of

pytest_plugins = ["helpers.bench_fixtures"]

DATA = {
    "class_path": "CIFAR10",
    "init_args": {
        **{"num_clients": 100, "batch_size": 128, "train_size": None, "val_fraction": 0.1, "drop_last": True},
        "partitioner": {"class_path": "Dirichlet", "init_args": {"alpha": 0.1, "min_size": 50, "repair": "redraw"}},
    },
}
TOY = {
    "base": {
        "weights": "nowhere.pt",
        "data": DATA,
        "trainer": {"max_rounds": 100, "local_epochs": 10, "client_lr_scheduler": {"init_args": {"T_max": 100}}},
    },
    "axes": {"method": {"FedAvg": {}, "FedProx": {"method": [{"class_path": "FedProx"}]}}},
    "seeds": 3,
    "tables": [{"caption": "Table 1", "page": 1, "published": {"FedAvg": 60, "FedProx": 61}}],
}


def config_of(folder, **base):
    """The config of an offline cell."""
    return without_data(toy_suite(folder, {**TOY, "base": {**TOY["base"], **base}})).cells()[0].config


def test_data_clients_least_sizes_batches_and_rounds_shrink_together(tmp_path):
    config = config_of(tmp_path)
    data, trainer = config["data"]["init_args"], config["trainer"]
    partitioner = data["partitioner"]["init_args"]
    assert data["offline"] is True and config["weights"] is None
    batch = partitioner["min_size"]
    assert data["batch_size"] == batch and partitioner["alpha"] == 0.1
    assert data["num_clients"] == 4 and data["train_size"] * (1 - data["val_fraction"]) > data["num_clients"] * batch
    rounds = trainer["max_rounds"]
    assert (rounds, trainer["local_epochs"], trainer["client_lr_scheduler"]["init_args"]["T_max"]) == (2, 1, rounds)


def test_generated_and_embedded_data_stay(tmp_path):
    synthetic = config_of(tmp_path, data={"class_path": "Synthetic", "init_args": {"num_clients": 30}})
    assert synthetic["data"]["init_args"] == {"num_clients": 4, "batch_size": 4, "largest": 20}
    digits = config_of(tmp_path, data={"class_path": "fl_lightning.data.Digits", "init_args": {"num_clients": 3}})
    assert "offline" not in digits["data"]["init_args"] and digits["data"]["init_args"]["num_clients"] == 3


@pytest.mark.parametrize(("f", "clients"), [(0, 4), (2, 7)])
def test_robust_rules_have_the_clients_that_they_need(tmp_path, f, clients):
    config = config_of(tmp_path, method=["FedAvg", {"class_path": "MultiKrum", "init_args": {"f": f}}])
    assert config["data"]["init_args"]["num_clients"] == clients


def test_numbers_are_said_to_mean_nothing_and_stay_apart_from_results(bench, tmp_path):
    suite = toy_suite(tmp_path, TOY)
    assert bench(suite.path, "--seeds", 1).status == 0
    before = bench(suite.path, "--status").out
    ended = bench(suite.path, "--offline")
    assert ended.status == 0 and len(ended.ran) == 2
    *_, sentence, files = ended.out.splitlines()
    assert_names(sentence, "offline", "mean nothing")
    tables = list((tmp_path / "runs" / f"{suite.name}-offline").glob("*-offline.table.*"))
    assert len(tables) == 3 and all(str(path.name) in files for path in tables)
    assert all("numbers without meaning" in path.read_text() and "61" not in path.read_text() for path in tables)
    assert bench(suite.path, "--status").out == before
    ended = bench(suite.path, "--offline", "--output", "runs/" + suite.name)
    assert ended.status == 2
    assert_names(ended.err, "--output", f"{suite.name}-offline")
    ended = bench(suite.path, "--load", *tmp_path.rglob("*-offline.cells.csv"))
    assert ended.status == 2
    assert_names(ended.err, "--load")


@pytest.mark.parametrize("given", [["--scale", 0.5], ["--until-decided"]])
def test_what_changes_the_runs_of_results_is_refused(bench, tmp_path, given):
    ended = bench(toy_suite(tmp_path, TOY).path, "--offline", *given)
    assert ended.status == 2
    assert_names(ended.err, given[0], "--offline")


def test_a_paper_s_suite_runs_without_its_data_set(bench, monkeypatch, one_parser, undrawn):
    only = ["--only", "data=CIFAR-10,skew=C_2,method=SCAFFOLD"]
    ended = bench(SUITES["niid_bench/label_skew"], "--offline", *only, answer=train)
    assert ended.status == 0 and "1 cells: 1 done." in ended.out


def cells_with_every_label(suite: Suite):
    """Some cells in which every label occurs, but for methods, which have tests of their own."""
    seen = set()
    for cell in suite.cells():
        labels = {pair for pair in cell.labels.items() if pair[0] != "method"} or {()}
        if not labels <= seen:
            seen |= labels
            yield cell


@pytest.mark.thorough
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_runs_without_its_data_set(tmp_path, monkeypatch, one_parser, undrawn, name):
    monkeypatch.chdir(tmp_path)
    suite, told = without_data(suite_of(name)), {}
    for cell in cells_with_every_label(suite):
        task = {"name": cell.name, "fragments": cell.fragments, "metric": suite.metric, "log": os.devnull}
        task |= {"output": str(tmp_path), "folder": cell.digest}
        told[cell.name] = answer_of(PROGRAM, "run_cell", task, lambda *round_: None).get("failed")
    assert told and set(told.values()) == {None}, {name: why for name, why in told.items() if why}
