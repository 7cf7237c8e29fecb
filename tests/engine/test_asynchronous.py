"""An asynchronous run: its server steps after each few updates, of clients that began with older states."""

from functools import partial

import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, differs, small_data, small_model, small_trainer

from fl_lightning import Method, ServerValue
from fl_lightning.core.clock import Buffered, Clock
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.data.partitioners import IID
from fl_lightning.methods import FedBuff, FedProx

CLOCK = Clock(spread=0.7, jitter=0.2)


def run(folder, methods=(), clock=CLOCK, asynchronous=Buffered(4, 2), max_rounds=8, ckpt_path=None, **how):
    """The weights and the history of a run of six equal clients."""
    how = {"clients_per_step": 1, **how}
    trainer = small_trainer(folder, max_rounds=max_rounds, clock=clock, asynchronous=asynchronous, **how)
    model = small_model()
    result = trainer.fit(model, small_data(num_clients=6, partitioner=IID()), [*methods], ckpt_path=ckpt_path)
    return model.state_dict(), result.history


def test_with_all_clients_and_equal_durations_it_is_fedavg(tmp_path):
    clock = Clock(step_seconds=0.5)
    synchronous, history = run(tmp_path / "rounds", clock=clock, asynchronous=None, max_rounds=3)
    weights, steps = run(tmp_path / "steps", clock=clock, asynchronous=Buffered(6, 6), max_rounds=3)
    assert_same_bits(synchronous, weights)
    for row, step in zip(history, steps, strict=True):
        assert row["clock/seconds"] == step["clock/seconds"] and step["staleness/max"] == 0
        assert row["test/accuracy"] == step["test/accuracy"]


def test_workers_and_a_resume_at_any_step_change_no_bit(tmp_path):
    methods = partial(lambda: [FedBuff(), FedProx(0.1)])
    weights, history = run(tmp_path / "alone", methods())
    together, by_two = run(tmp_path / "two", methods(), devices=2)
    assert_same_bits(weights, together)
    assert max(row["staleness/max"] for row in history) >= 2
    for step in (1, 3, 6):
        run(tmp_path / str(step), methods(), max_rounds=step)
        resumed, rest = run(tmp_path / str(step), methods(), ckpt_path="last")
        assert_same_bits(weights, resumed)
    for tag in ("clock/seconds", "staleness/mean", "clients/in_flight", "train/fedprox", "bytes/down"):
        values = [row[tag] for row in history]
        assert values == [row[tag] for row in by_two] == [row[tag] for row in rest]
