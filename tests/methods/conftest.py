"""Runs of methods, on fewer digits than elsewhere."""

from pathlib import Path

import pytest
from helpers.runs import small_data, small_model, small_trainer


def train(folder, methods=(), kind="mlp", data=None, model=None, max_rounds=2, **kwargs):
    given = {"max_rounds": max_rounds, "checkpoint_every_n_rounds": max(max_rounds, 1), **kwargs}
    trainer = small_trainer(folder, **given)
    data = data or small_data(kind, train_size=120, test_size=50)
    trainer.fit(model or small_model(kind), data, list(methods))
    return {name: value.clone() for name, value in trainer.server.state.items()}, trainer


@pytest.fixture
def run(tmp_path):
    """``run(methods)`` trains and gives (final global state, trainer)."""
    return lambda *args, **kwargs: train(tmp_path, *args, **kwargs)


@pytest.fixture(scope="package")
def fedavg(tmp_path_factory):
    """The final state of FedAvg by the kind of model."""
    folder = Path(tmp_path_factory.mktemp("fedavg"))
    return {kind: train(folder, [], kind)[0] for kind in ("mlp", "cnn")}
