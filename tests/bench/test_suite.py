"""The cells of a suite: their configs, what they are known by, and how they are selected."""

from pathlib import Path

import pytest
from helpers.benches import TOY, toy_suite
from helpers.errors import refused

from fl_lightning.bench import Cell, load_suite
from fl_lightning.utilities.yaml_files import read_yaml

pytest_plugins = ["helpers.bench_fixtures"]

PAPERS = Path(__file__).resolve().parents[2] / "experiments" / "papers"


@pytest.mark.parametrize(
    ("scale", "rounds", "period", "size", "share"),
    [(1.0, 100, 100, 1000, 1000), (0.125, 50, 50, 1000, 500), (0.125, 50, 60, None, 0.5), (1e-9, 1, 1, 3, 1)],
)
def test_scale_shrinks_rounds_with_their_schedule_and_examples(tmp_path, scale, rounds, period, size, share):
    """A cosine over all rounds ends with the fewer ones; another schedule stays as it is."""
    schedule = {"init_args": {"T_max": 100 if period != 60 else 60}}
    base = {
        "trainer": {"max_rounds": 100, "client_lr_scheduler": schedule},
        "data": {"init_args": {"train_size": size}},
    }
    suite = toy_suite(tmp_path, {"base": base, "axes": {"method": {"FedAvg": {}}}})
    config = suite.cells(scale)[0].config
    assert config["trainer"]["max_rounds"] == rounds
    assert config["trainer"]["client_lr_scheduler"]["init_args"]["T_max"] == period
    assert config["data"]["init_args"]["train_size"] == pytest.approx(share)
    assert suite.cells(scale)[0].scale == scale


def test_however_small_the_scale_the_largest_client_has_a_batch(tmp_path):
    base = {"data": {"init_args": {"train_size": 1000, "batch_size": 32, "num_clients": 4}}}
    suite = toy_suite(tmp_path, {"base": base, "axes": {"method": {"FedAvg": {}}}})
    assert [suite.cells(scale)[0].config["data"]["init_args"]["train_size"] for scale in (1e-9, 0.125)] == [128, 500]


# ---------------------------------------------------------------- fragments in files
@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("- inner.yaml", ["inner.yaml", "config='inner.yaml'"]),
        ("- between.yaml", ["between.yaml", "config='inner.yaml'"]),
        ("3: 4", ["inner.yaml", "config=3"]),
        ("trainer: {}\ntrainer: {}", ["inner.yaml, line 2, column 1", "trainer"]),
    ],
)
def test_a_fragment_that_is_no_config_is_refused(tmp_path, content, named):
    (tmp_path / "inner.yaml").write_text(content)
    (tmp_path / "between.yaml").write_text("- inner.yaml")
    with refused(*named):
        toy_suite(tmp_path, "base: inner.yaml\naxes: {method: {FedAvg: {}}}")


def test_a_file_may_be_named_twice_and_hold_numbers_as_keys(tmp_path):
    (tmp_path / "inner.yaml").write_text("model: {init_args: {weights: {0: 1, 1: 2}}}")
    suite = toy_suite(tmp_path, "base: [inner.yaml, inner.yaml]\naxes: {method: {FedAvg: {}}}")
    assert suite.cells()[0].config["model"] == {"init_args": {"weights": {0: 1, 1: 2}}}


def test_a_suite_names_packaged_configs_as_a_command_does_and_a_file_beside_it_comes_first(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text("base: protocols/cifar10\naxes: {method: {FedProx: methods/fedprox, Own: own.yaml}}")
    (tmp_path / "own.yaml").write_text("[methods/fedprox.yaml]")
    axis = load_suite(path).axes["method"]
    assert axis["FedProx"] == axis["Own"] == (read_yaml(PAPERS.parent / "methods/fedprox.yaml"),)
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/fedprox.yaml").write_text("method: []")
    axis = load_suite(path).axes["method"]
    assert axis["Own"] == ({"method": []},) != axis["FedProx"]


def test_an_unknown_config_is_refused_with_names_that_are_near(tmp_path):
    with refused("toy.yaml", "axes.method.FedProx='methods/fedprx'", "methods/fedprox"):
        toy_suite(tmp_path, "base: {}\naxes: {method: {FedProx: methods/fedprx}}")


# ---------------------------------------------------------------- what a cell is known by
def digest(*fragments):
    """What a cell of this config is known by."""
    return Cell({"method": "FedAvg"}, 0, tuple(fragments)).digest


def nested(key, value):
    """A config with one value, at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def test_a_cell_is_known_by_its_config_without_paths_and_places(tmp_path):
    """Not every key of such a name: the ``name`` of a user's network, or the ``path`` of a plan, decides what runs."""
    plain = {"model": {"init_args": {"name": "resnet18"}}, "trainer": {"max_rounds": 3}}
    moved = nested("data.init_args.source.root", "/there"), {"trainer": {"name": "a", "devices": 2}}
    assert digest(plain, *moved) == digest(plain, nested("data.init_args.source", {}))
    for key in ("model.init_args.name", "data.init_args.partitioner.init_args.path", "trainer.precision"):
        assert digest(plain, nested(key, "other")) != digest(plain)
    for key in ("method.x.init_args.root", "model.init_args.cache_dir", "data.init_args.depth.root"):
        assert digest(nested(key, 1)) != digest(nested(key, 3))


def test_cells_that_one_result_would_stand_for_are_refused(tmp_path):
    two_roots = "values: [0.1, 0.2]}\n  data: {A: {data: {root: a}}, B: {data: {root: b}}}"
    suite = toy_suite(tmp_path, TOY.replace("values: [0.1, 0.2]}", two_roots))
    with refused("axes=", "data=A,seed=0", "data=B,seed=0") as caught:
        suite.cells()
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("values", ["[0.1, '0.1']", "['a b', a_b]"])
def test_labels_of_one_name_are_refused(tmp_path, values):
    with refused("axes.lr="):
        toy_suite(tmp_path, TOY.replace("[0.1, 0.2]", values))


def test_a_file_counts_by_its_contents_outside_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_text("one")
    a, b, free = nested("model.weights", "a.pt"), nested("model.weights", "b.pt"), nested("data.list", "a.pt")
    before = digest(a), digest(free)
    assert digest(b) == before[0] != digest(nested("model.weights", "nowhere.pt"))
    (tmp_path / "a.pt").write_text("another")
    assert digest(a) != before[0] and digest(free) == before[1]


@pytest.mark.parametrize(
    ("suite", "patterns", "cells"),
    [
        ("fedcka/table4.yaml", ["network=7 layers", "network=7_layers"], 15),
        ("fedcka/table4.yaml", ["method=FedCKA,network=7 layers,seed=0", "seed=0,network=7_layers,method=FedCKA"], 1),
        ("fedlc/table4.yaml", ["data=Synthetic(0,0),method=FedAvg", "method=FedAvg,data=Synthetic_0_0"], 5),
    ],
)
def test_cells_are_selected_by_labels_as_the_suite_or_the_names_of_cells_have_them(bench, suite, patterns, cells):
    one, other = (bench(PAPERS / suite, "--status", "--only", pattern).out for pattern in patterns)
    assert one == other and f"{cells} cells: {cells} waiting." in one
