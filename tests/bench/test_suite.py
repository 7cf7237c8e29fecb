"""What a suite makes of its configs."""

from pathlib import Path

import pytest
from helpers.benches import TOY, toy_suite
from helpers.errors import refused

from fl_lightning.bench.fragments import config_digest, fragments_of, merged_config, nested_config, of_result
from fl_lightning.bench.suite import scaled_work, selected_cells
from fl_lightning.bench.suite_file import load_suite
from fl_lightning.errors import UsageError
from fl_lightning.yaml_files import read_yaml

PAPERS = Path(__file__).resolve().parents[2] / "experiments" / "papers"


def over(rounds, most):
    """A config whose clients' rates fall by a cosine over some rounds."""
    return {"trainer": {"max_rounds": most, "client_lr_scheduler": {"init_args": {"T_max": rounds}}}}


@pytest.mark.parametrize(("scale", "rounds"), [(1.0, 100), (0.125, 50), (1e-9, 1)])
def test_a_cosine_over_all_rounds_ends_with_the_fewer_ones(scale, rounds):
    trainer = scaled_work(over(100, 100), scale)["trainer"]
    assert trainer["max_rounds"] == trainer["client_lr_scheduler"]["init_args"]["T_max"] == rounds


def test_another_schedule_stays_as_it_is():
    assert scaled_work(over(60, 6), 0.125)["trainer"] == {"max_rounds": 3, "local_epochs": 1}
    assert scaled_work({}, 0.125)["trainer"] == {"max_rounds": 5, "local_epochs": 1}


# ---------------------------------------------------------------- fragments in files
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("- inner.yaml", "inner.yaml: config='inner.yaml': the file names itself"),
        ("- between.yaml", "between.yaml: config='inner.yaml': the file names itself"),
        ("3: 4", "inner.yaml: config=3: is no key of a config"),
        ("trainer: {}\ntrainer: {}", "inner.yaml, line 2, column 1: the key trainer stands in line 1"),
    ],
)
def test_a_fragment_that_is_no_config_is_refused(tmp_path, content, why):
    (tmp_path / "inner.yaml").write_text(content)
    (tmp_path / "between.yaml").write_text("- inner.yaml")
    with pytest.raises(UsageError) as refused:
        list(fragments_of("inner.yaml", tmp_path / "suite.yaml"))
    assert str(refused.value).startswith(str(tmp_path / why))


def test_a_file_may_be_named_twice_and_a_mapping_within_a_fragment_may_have_numbers_as_keys(tmp_path):
    (tmp_path / "inner.yaml").write_text("model: {init_args: {weights: {0: 1, 1: 2}}}")
    parts = list(fragments_of(["inner.yaml", "inner.yaml"], tmp_path / "suite.yaml"))
    assert len(parts) == 2
    assert merged_config(parts) == {"model": {"init_args": {"weights": {0: 1, 1: 2}}}}


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


def test_a_suite_that_names_no_config_is_refused_with_its_file_the_label_and_names_that_are_near(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text("base: {}\naxes: {method: {FedProx: methods/fedprx}}")
    with refused(f"{path}: axes.method.FedProx='methods/fedprx'", "no such file beside suite.yaml", "methods/fedprox,"):
        load_suite(path)


# ---------------------------------------------------------------- what a cell is known by
def test_a_digest_leaves_out_where_files_are_and_how_a_run_is_carried_out():
    """Not every key of such a name: the ``name`` of a user's network, or the ``path`` of a plan, decides what runs."""
    plain = {"model": {"init_args": {"name": "resnet18"}}, "trainer": {"max_rounds": 3}, "data": {"init_args": {}}}
    moved = merged_config(
        [plain, {"trainer": {"name": "a", "devices": 2}}, nested_config("data.init_args.source.root", "/there")]
    )
    assert config_digest(moved) == config_digest(merged_config([plain, nested_config("data.init_args.source", {})]))
    for key in ("model.init_args.name", "data.init_args.partitioner.init_args.path", "trainer.precision"):
        assert config_digest(merged_config([plain, nested_config(key, "other")])) != config_digest(plain)


def test_cells_that_one_result_would_stand_for_are_refused(tmp_path):
    two_roots = "values: [0.1, 0.2]}\n  data: {A: {data: {root: a}}, B: {data: {root: b}}}"
    suite = toy_suite(tmp_path, TOY.replace("values: [0.1, 0.2]}", two_roots))
    with refused("axes=", "data=A,seed=0", "data=B,seed=0") as caught:
        suite.cells()
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(("size", "share"), [(1000, 500), (3, 1), (None, 0.1), (0.5, 0.25)])
def test_examples_shrink_with_the_scale_to_at_least_one(size, share):
    scale = 0.125 if size in (1000, 0.5) else 0.001
    config = {"data": {"init_args": {"train_size": size}}}
    assert scaled_work(config, scale)["data"]["init_args"]["train_size"] == pytest.approx(share)


@pytest.mark.parametrize("values", ["[0.1, '0.1']", "['a b', a_b]"])
def test_labels_of_one_name_are_refused(tmp_path, values):
    with refused("axes.lr="):
        toy_suite(tmp_path, TOY.replace("[0.1, 0.2]", values))


@pytest.mark.parametrize(
    "key",
    ["method.0.init_args.root", "model.init_args.cache_dir", "trainer.callbacks.download", "data.init_args.depth.root"],
)
def test_an_argument_of_such_a_name_counts_where_it_is_no_path_of_data(key):
    assert config_digest(nested_config(key, 1)) != config_digest(nested_config(key, 3))


def test_a_file_counts_by_what_it_holds_outside_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pt").write_text("one")
    (tmp_path / "b.pt").write_text("one")
    a, b, free = (
        nested_config("model.weights", "a.pt"),
        nested_config("model.weights", "b.pt"),
        nested_config("data.list", "a.pt"),
    )
    before = config_digest(a), config_digest(free)
    assert config_digest(b) == before[0] != config_digest(nested_config("model.weights", "nowhere.pt"))
    assert config_digest(of_result(a)) == before[0]
    (tmp_path / "a.pt").write_text("another")
    assert config_digest(a) != before[0] and config_digest(free) == before[1]


@pytest.mark.parametrize(
    ("suite", "patterns", "cells"),
    [
        ("fedcka/table4.yaml", ["network=7 layers", "network=7_layers"], 15),
        ("fedcka/table4.yaml", ["method=FedCKA,network=7 layers,seed=0", "seed=0,network=7_layers,method=FedCKA"], 1),
        ("fedlc/table4.yaml", ["data=Synthetic(0,0),method=FedAvg", "method=FedAvg,data=Synthetic_0_0"], 5),
    ],
)
def test_cells_are_selected_by_labels_as_the_suite_or_the_names_of_cells_have_them(suite, patterns, cells):
    all_cells = load_suite(PAPERS / suite).cells()
    one, other = (selected_cells(all_cells, [pattern]) for pattern in patterns)
    assert one == other and len(one) == cells
