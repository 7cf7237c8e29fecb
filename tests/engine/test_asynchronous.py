"""An asynchronous run: its server steps after each few updates, of clients that began with older states."""

from functools import partial

import pytest
import torch
from helpers.errors import refused, warned
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


def test_side_by_side_clients_of_one_version_share_a_group(tmp_path):
    how = {"asynchronous": Buffered(6, 4), "precision": "64-true"}
    weights, history = run(tmp_path / "alone", [FedBuff()], **how)
    grouped, rows = run(tmp_path / "groups", [FedBuff()], clients_per_step=4, **how)
    for name, value in weights.items():
        torch.testing.assert_close(grouped[name], value, rtol=1e-8, atol=1e-8)
    assert [row["staleness/mean"] for row in rows] == [row["staleness/mean"] for row in history]


class Records(Method):
    """Records what each client has received, and changes a server value in each step."""

    number = ServerValue(lambda server: torch.zeros(()))

    def __init__(self):
        self.states = []

    def on_round_start(self, server):
        self.states.append({name: value.clone() for name, value in server.state.items()})

    def on_client_start(self, client):
        if not self.states:  # the trial of two clients side by side
            return
        assert client.round - client.staleness == client.version
        assert_same_bits(dict(client.received), self.states[client.version])
        assert_same_bits(client.state(), self.states[client.version])
        assert float(self.number) == client.version
        visits.append((client.round, client.info.id, client.version))

    def on_round_end(self, server, payload):
        self.number += 1
        times.append(server.time)


visits, times = [], []


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_a_client_receives_the_state_and_the_values_of_its_version(tmp_path, clients_per_step):
    visits.clear(), times.clear()
    _, history = run(tmp_path, [Records()], asynchronous=Buffered(6, 4), clients_per_step=clients_per_step)
    steps = [[r - version for r, _, version in visits if r == step] for step in range(8)]
    assert [sum(step) / len(step) for step in steps] == [row["staleness/mean"] for row in history]
    assert [max(step) for step in steps] == [row["staleness/max"] for row in history]
    assert times == [row["clock/seconds"] for row in history] == sorted(times)
    assert max(map(max, steps)) >= 1 and {len(step) for step in steps} == {4}


def test_fedprox_pulls_to_the_received_state(tmp_path):
    class FirstPull(FedProx):
        def penalty(self, client, step):
            term = super().penalty(client, step)
            if not client.num_steps:
                assert term is None or float(term) == 0
                stale.append(client.staleness)
            return term

    stale = []
    run(tmp_path, [FedBuff(), FirstPull(1.0)])
    assert max(stale) >= 2


class Fails(Method):
    """Client 1 fails from the fourth server step on."""

    def on_client_start(self, client):
        if client.info.id == 1 and client.round >= 3:
            raise ValueError("no disk")


def test_the_place_of_a_client_that_fails_stays_empty(tmp_path):
    def skipping(name, **how):
        with warned("skipped: client 1"):
            return run(tmp_path / name, [FedBuff(), FedProx(0.1), Fails()], on_client_error="skip", **how)

    weights, history = skipping("alone")
    together, by_two = skipping("two", devices=2)
    skipping("resumed", max_rounds=5)
    resumed, _ = skipping("resumed", ckpt_path="last")
    assert_same_bits(weights, together)
    assert_same_bits(weights, resumed)
    failed = [row.get("clients/failed", 0) for row in history]
    assert sum(failed) >= 1 and [row["clients"] + failed for row, failed in zip(history, failed, strict=True)] == [2] * 8
    others, _ = run(tmp_path / "others", [FedBuff(), FedProx(0.1)])
    assert differs(weights, others)
