"""Runs of methods, on fewer digits than elsewhere."""

import pytest
from helpers.runs import small_data, train


def train_on_few(folder, methods=(), kind="mlp", data=None, max_rounds=2, **kwargs):
    data = data or small_data(kind, train_size=120, test_size=50)
    how = {"max_rounds": max_rounds, "checkpoint_every_n_rounds": max(max_rounds, 1), **kwargs}
    return train(folder, methods, kind, data, **how)


@pytest.fixture
def run(tmp_path):
    """``run(methods)`` trains and returns (final global state, trainer)."""
    return lambda *args, **kwargs: train_on_few(tmp_path, *args, **kwargs)


@pytest.fixture(scope="package")
def fedavg(tmp_path_factory):
    """The final state of FedAvg by the kind of model."""
    folder = tmp_path_factory.mktemp("fedavg")
    return {kind: train_on_few(folder, [], kind)[0] for kind in ("mlp", "cnn")}
