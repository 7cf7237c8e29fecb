"""Fixtures of all tests: one thread, one seed, and a small run on the embedded digits."""

import logging

import pytest
import torch
from helpers.runs import small_data, small_model, small_trainer


@pytest.fixture(autouse=True)
def _same_start(monkeypatch):
    torch.set_num_threads(1)  # several cost more than they gain on models of this size
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    torch.manual_seed(0)


@pytest.fixture
def run(tmp_path):
    """``run(methods)`` trains and gives (final global state, trainer)."""

    def train(methods=(), kind="mlp", data=None, model=None, **kwargs):
        trainer = small_trainer(tmp_path, **kwargs)
        trainer.fit(model or small_model(kind), data or small_data(kind), list(methods))
        return {name: value.clone() for name, value in trainer.server.state.items()}, trainer

    return train


@pytest.fixture
def said(caplog, monkeypatch):
    """What Lightning's logger said so far."""
    for name in ("lightning.fabric", "lightning.pytorch"):  # which of them it is depends on what was imported
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    return lambda: caplog.text
