"""A clock gives synchronous runs simulated seconds, and loses late clients."""

from itertools import pairwise

import pytest
from helpers.errors import refused, warned
from helpers.quadratics import Quadratic, repeated_rows
from helpers.runs import assert_same_bits, ready, small_data, small_model, small_trainer
from helpers.tiny import variant

from fl_lightning import Method
from fl_lightning.core.clock import Clock
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.data.client_loaders import num_batches
from fl_lightning.data.partitioners import IID

SPEED = {0: 1.0, 1: 2.0, 2: 3.0, 3: 10.0}


def run(folder, clock=None, ckpt_path=None, max_rounds=3, **how):
    """The weights and the history of a run of four equal clients."""
    trainer, model = small_trainer(folder, max_rounds=max_rounds, clock=clock, **how), small_model()
    result = trainer.fit(model, small_data(num_clients=4, partitioner=IID()), ckpt_path=ckpt_path)
    return model.state_dict(), result.history


def seconds(history):
    return [row["clock/seconds"] for row in history]


def batches(k):
    return num_batches(ready(small_data(num_clients=4, partitioner=IID())), k)


def test_a_round_takes_as_long_as_its_slowest_client(tmp_path):
    _, history = run(tmp_path, Clock(step_seconds=0.5, speed=SPEED), local_epochs=2)
    round_seconds = 0.5 * 10.0 * 2 * batches(3)
    assert seconds(history) == [round_seconds, 2 * round_seconds, 3 * round_seconds]


def test_a_round_counts_the_steps_that_its_clients_take(tmp_path):
    steps = []

    class Steps(Method):
        def on_client_end(self, client):
            steps.append(client.num_steps)

    how = {"max_rounds": 1, "clients_per_step": 1, "clock": Clock(), "accumulate_grad_batches": 2}
    for options in ({}, {"local_epochs": 2}, {"local_steps": 3}):
        steps.clear()
        trainer = small_trainer(tmp_path, **how, **options)
        trainer.fit(small_model(), small_data(num_clients=4, partitioner=IID()), Steps())
        assert trainer.metrics["clock/seconds"] == max(steps) == min(steps)


def test_a_client_without_a_batch_takes_no_time(tmp_path):
    clock = Clock(speed={0: 1.0, 1: 50.0})
    data = repeated_rows([[1.0], [2.0]], [3, 0])
    trainer = small_trainer(tmp_path, max_rounds=1, local_steps=2, clock=clock)
    with warned("no training batch"):
        trainer.fit(Quadratic(), data)
    assert trainer.metrics["clock/seconds"] == 2.0


def test_a_run_may_get_a_clock_when_it_resumes(tmp_path):
    run(tmp_path, max_rounds=1)
    trainer = small_trainer(tmp_path, max_rounds=3, clock=Clock(latency=1.0), eval_every_seconds=1.0)
    data = small_data(num_clients=4, partitioner=IID())
    history = trainer.fit(small_model(), data, ckpt_path="last", allow_changes=True).history
    assert ["test/accuracy" in row for row in history] == [True] * 3


def test_latency_and_bytes_take_time(tmp_path):
    _, history = run(tmp_path, Clock(step_seconds=0.0, latency=3.0, bandwidth=1000.0), max_rounds=1)
    down = history[0]["bytes/down"] / 4
    assert seconds(history) == [pytest.approx(3.0 + 2 * down / 1000.0, abs=1e-6)]


def test_a_clock_changes_no_weight_and_nor_do_workers_or_a_resume(tmp_path):
    clock = Clock(spread=1.0, jitter=0.5)
    plain, _ = run(tmp_path / "plain")
    alone, history = run(tmp_path / "alone", clock)
    together, by_two = run(tmp_path / "two", clock, devices=2)
    run(tmp_path / "resumed", clock, max_rounds=1)
    resumed, continued = run(tmp_path / "resumed", clock, ckpt_path="last")
    for weights in (alone, together, resumed):
        assert_same_bits(plain, weights)
    assert seconds(history) == seconds(by_two) == seconds(continued)
    assert len({round(after - before, 6) for before, after in pairwise(seconds(history))}) == 2


def test_late_clients_are_lost_and_the_round_ends_at_the_deadline(tmp_path):
    longest = 3.0 * batches(2)
    late, history = run(tmp_path / "late", Clock(speed=SPEED, deadline=longest))
    assert seconds(history) == [longest, 2 * longest, 3 * longest]
    assert {row["clients/late"] for row in history} == {1} and {row["clients"] for row in history} == {3}

    class LosesTheLast(SystemsHeterogeneity):
        def outcomes(self, seed, round_, cohort, full_work):
            outcomes = super().outcomes(seed, round_, cohort, full_work)
            return outcomes | {3: type(outcomes[3])(lost="after")}

    lost, _ = run(tmp_path / "lost", systems=LosesTheLast())
    assert_same_bits(late, lost)


def test_methods_read_the_time(tmp_path):
    reads = variant(Method, on_round_start=lambda self, server: times.append(server.time))()

    times = []
    trainer = small_trainer(tmp_path, max_rounds=2, clock=Clock(step_seconds=0.0, latency=2.0))
    trainer.fit(small_model(), small_data(), method=[reads])
    assert times == [0.0, 2.0] and trainer.metrics["clock/seconds"] == 4.0


class SendsRates(Method):
    """Sends each client of a cohort a number that it draws up for the round."""

    has_personal_models = False

    def on_round_start(self, server):
        self.rates = {k: 0.1 * k for k in server.cohort}

    def sent_extras(self, server, k):
        return {"rate": self.rates[k]}


def test_the_clock_asks_for_what_is_sent_once_the_round_has_begun(tmp_path):
    trainer = small_trainer(tmp_path, max_rounds=1, clock=Clock(step_seconds=0.0, bandwidth=1.0), clients_per_step=1)
    history = trainer.fit(small_model(), small_data(num_clients=4, partitioner=IID()), SendsRates()).history
    assert seconds(history) == [pytest.approx(2 * history[0]["bytes/down"] / 4)]


def test_a_speed_of_an_unknown_client_is_refused_before_round_0(tmp_path):
    with refused("trainer.clock.speed=[4]", "0 to 3"):
        run(tmp_path, Clock(speed={4: 2.0}))
    assert not any(tmp_path.rglob("metrics.csv"))
