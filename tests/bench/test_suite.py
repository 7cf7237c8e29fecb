"""What a suite makes of its configs."""

import pytest
from helpers.benches import TOY, toy_suite

from fl_lightning.bench.fragments import digest, merged, nested
from fl_lightning.bench.suite import scaled
from fl_lightning.errors import UsageError


def over(rounds, most):
    """A config whose clients' rates fall by a cosine over some rounds."""
    return {"trainer": {"max_rounds": most, "client_lr_scheduler": {"init_args": {"T_max": rounds}}}}


@pytest.mark.parametrize(("scale", "rounds"), [(1.0, 100), (0.125, 50), (1e-9, 1)])
def test_a_cosine_over_all_rounds_ends_with_the_fewer_ones(scale, rounds):
    trainer = scaled(over(100, 100), scale)["trainer"]
    assert trainer["max_rounds"] == trainer["client_lr_scheduler"]["init_args"]["T_max"] == rounds


def test_another_schedule_stays_as_it_is():
    assert scaled(over(60, 6), 0.125)["trainer"] == {"max_rounds": 3, "local_epochs": 1}
    assert scaled({}, 0.125)["trainer"] == {"max_rounds": 5, "local_epochs": 1}


# ---------------------------------------------------------------- what a cell is known by
def test_a_digest_leaves_out_where_files_are_and_how_a_run_is_carried_out():
    """Not every key of such a name: the ``name`` of a user's network, or the ``path`` of a plan, decides what runs."""
    plain = {"model": {"init_args": {"name": "resnet18"}}, "trainer": {"max_rounds": 3}, "data": {"init_args": {}}}
    moved = merged([plain, {"trainer": {"name": "a", "devices": 2}}, nested("data.init_args.source.root", "/there")])
    assert digest(moved) == digest(merged([plain, nested("data.init_args.source", {})]))
    for key in ("model.init_args.name", "data.init_args.partitioner.init_args.path", "trainer.precision"):
        assert digest(merged([plain, nested(key, "other")])) != digest(plain)


def test_cells_that_one_result_would_stand_for_are_refused(tmp_path):
    two_roots = "values: [0.1, 0.2]}\n  data: {A: {data: {root: a}}, B: {data: {root: b}}}"
    suite = toy_suite(tmp_path, TOY.replace("values: [0.1, 0.2]}", two_roots))
    with pytest.raises(UsageError, match=r"data=A,seed=0 and .*data=B,seed=0': these cells differ only in") as refused:
        suite.cells()
    assert len(str(refused.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(("size", "share"), [(1000, 500), (3, 1), (None, 0.1), (0.5, 0.25)])
def test_examples_shrink_with_the_scale_to_at_least_one(size, share):
    scale = 0.125 if size in (1000, 0.5) else 0.001
    config = {"data": {"init_args": {"train_size": size}}}
    assert scaled(config, scale)["data"]["init_args"]["train_size"] == pytest.approx(share)


@pytest.mark.parametrize("values", ["[0.1, '0.1']", "['a b', a_b]"])
def test_labels_of_one_name_are_refused(tmp_path, values):
    with pytest.raises(UsageError, match=r"axes.lr=.*give labels whose letters and digits differ"):
        toy_suite(tmp_path, TOY.replace("[0.1, 0.2]", values))
