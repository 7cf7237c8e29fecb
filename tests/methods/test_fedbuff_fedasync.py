"""FedBuff and FedAsync: the worked schedules of four clients of one number, and laws of their rules."""

from functools import partial

import pytest
import torch
from helpers.quadratics import Quadratic, repeated_rows
from helpers.runs import assert_same_bits, differs, plain_sgd_model, small_data, small_trainer

from fl_lightning import Method
from fl_lightning.core.clock import Buffered, Clock
from fl_lightning.core.sampling import Sampler
from fl_lightning.data.partitioners import IID
from fl_lightning.methods import FedAsync, FedBuff, FedProx, TrimmedMean

FEDBUFF = [1.5, 2.3624368670764584, 2.2137693885489362, 3.035327041411702, 3.0902074291505057]
FEDBUFF_PLAIN = [1.5, 2.875, 2.78125, 4.8359375, 4.908203125]
FEDASYNC = [0.7, 1.4636753236814712, 0.9911828996322962, 0.6938280297426074, 1.7151311408885879]
FEDASYNC_HINGE = [0.7, 1.78, 0.922, 0.6454, 2.95816]
SPEED = {0: 1.0, 1: 2.0, 2: 3.5, 3: 5.0}
# clients 0 and 1 begin with the first state, and the update of client 1 is one step old
TURNS = {"asynchronous": Buffered(2, 1), "speed": {0: 1.0, 1: 1.5, 2: 99.0, 3: 99.0}}


class Lowest(Sampler):
    """Draws the first of the idle clients."""

    def choose(self, rng, round_, num_clients, cohort_size):
        return range(cohort_size)


class Path(Method):
    """Records the number of the model after each step, and the simulated seconds."""

    def __init__(self):
        self.values, self.times = [], []

    def on_round_end(self, server, payload):
        self.values.append(float(server.state["y"]))
        self.times.append(server.time)


def path(folder, methods, asynchronous, speed=SPEED, steps=5, **how):
    """The number and the seconds after each step, of clients with the optima 0, 4, 8 and 12, from 1."""
    recorded = Path()
    clock, how = Clock(speed=speed), {"local_steps": 1, "sampler": Lowest(), "precision": "64-true", **how}
    trainer = small_trainer(folder, max_rounds=steps, clock=clock, asynchronous=asynchronous, clients_per_step=1, **how)
    trainer.fit(Quadratic(1.0, lr=0.5), repeated_rows([[0.0], [4.0], [8.0], [12.0]]), [*methods, recorded])
    return recorded.values, recorded.times


def weights(folder, methods, model=plain_sgd_model, num_clients=4, **how):
    trainer, trained = small_trainer(folder, max_rounds=3, clients_per_step=1, **how), model()
    trainer.fit(trained, small_data(num_clients=num_clients, partitioner=IID()), [*methods])
    return trained.state_dict()


# ------------------------------------------------------------------ laws
def test_fedbuff_of_fresh_updates_is_uniform_fedavg_bit_for_bit(tmp_path):
    uniform = weights(tmp_path / "fedavg", [], weighting="uniform")
    assert_same_bits(uniform, weights(tmp_path / "fedbuff", [FedBuff(2.0)]))
    how = {"clock": Clock(), "asynchronous": Buffered(4, 4)}
    assert_same_bits(uniform, weights(tmp_path / "asynchronous", [FedBuff(2.0)], **how))


def test_fedbuff_of_power_0_is_the_plain_mean_bit_for_bit(tmp_path):
    how = {"clock": Clock(spread=0.7), "asynchronous": Buffered(3, 2)}
    plain = weights(tmp_path / "plain", [], weighting="uniform", **how)
    assert_same_bits(plain, weights(tmp_path / "power", [FedBuff(0.0)], **how))
    assert differs(plain, weights(tmp_path / "stale", [FedBuff(1.0)], **how))


def test_equally_stale_updates_move_the_model_less(tmp_path):
    scaled, _ = path(tmp_path / "scaled", [FedBuff(1.0)], steps=2, **TURNS)
    plain, _ = path(tmp_path / "plain", [FedBuff(0.0)], steps=2, **TURNS)
    assert scaled[0] == plain[0] and scaled[1] - scaled[0] == (plain[1] - plain[0]) / 2


def test_fedasync_that_takes_the_clients_model_is_fedavg_of_one_client_bit_for_bit(tmp_path):
    one_client = weights(tmp_path / "fedavg", [], cohort_size=1)
    takes_all = partial(FedAsync, 1.0, "constant")
    assert_same_bits(one_client, weights(tmp_path / "rounds", [takes_all()], cohort_size=1))
    how = {"clock": Clock(), "asynchronous": Buffered(1)}
    assert_same_bits(weights(tmp_path / "plain", [], **how), weights(tmp_path / "steps", [takes_all()], **how))


def test_fedasync_takes_the_model_of_a_stale_client_too(tmp_path):
    values, _ = path(tmp_path, [FedAsync(1.0, "constant")], **TURNS, steps=2)
    assert values == [0.5, 2.5]  # half way from 1 to 0, then half way from 1 to 4


def test_fedasync_of_a_small_alpha_hardly_moves(tmp_path):
    values, _ = path(tmp_path, [FedAsync(1e-9)], Buffered(3, 1))
    assert values == [pytest.approx(1.0, abs=1e-7)] * 5


def test_fedbuff_differs_from_fedasync_by_the_steps_that_a_client_has_missed(tmp_path):
    how = {"asynchronous": Buffered(3, 1), "steps": 2}
    rate = partial(torch.optim.SGD, lr=0.6)
    adds, _ = path(tmp_path / "adds", [FedBuff(0.0)], server_optimizer=rate, **how)
    mixes, _ = path(tmp_path / "mixes", [FedAsync(0.6, "constant")], **how)
    assert adds[0] == mixes[0]
    assert mixes[1] - adds[1] == pytest.approx(0.6 * (1.0 - adds[0]), abs=1e-12)


# ------------------------------------------------------------------ worked values
@pytest.mark.parametrize(
    ("method", "size", "wanted"),
    [
        (FedBuff(), 2, FEDBUFF),
        (FedBuff(0.0), 2, FEDBUFF_PLAIN),
        (FedAsync(), 1, FEDASYNC),
        (FedAsync(decay="hinge", power=10, after=4), 1, FEDASYNC_HINGE),
    ],
)
def test_the_worked_schedules(tmp_path, method, size, wanted):
    values, times = path(tmp_path, [method], Buffered(3, size))
    assert values == [pytest.approx(value, abs=1e-9) for value in wanted]
    assert times == ([2.0, 3.5, 5.0, 6.0, 8.0] if size == 2 else [1.0, 2.0, 2.0, 3.0, 3.5])


def test_one_factor_on_all_durations_changes_no_weight(tmp_path):
    values, times = path(tmp_path, [FedBuff()], Buffered(3, 2), speed={k: 3 * factor for k, factor in SPEED.items()})
    assert values == [pytest.approx(value, abs=1e-9) for value in FEDBUFF]
    assert times == [6.0, 10.5, 15.0, 18.0, 24.0]


# ------------------------------------------------------------------ with other methods
def test_fedprox_pulls_to_the_state_that_the_client_received(tmp_path):
    """Two local steps of f + (y - v)^2 / 2 from the version v; the first step has no pull."""
    values, _ = path(tmp_path, [FedBuff(0.0), FedProx(1.0)], **TURNS, steps=2, local_steps=2)

    def trained(start, optimum):
        y = start - 0.5 * (start - optimum)
        return y - 0.5 * ((y - optimum) + (y - start))

    first = trained(1.0, 0.0)
    assert values == [first, first + trained(1.0, 4.0) - 1.0]


def test_a_robust_rule_trims_a_buffer(tmp_path):
    how = {"clock": Clock(spread=0.7), "asynchronous": Buffered(4, 3)}
    plain = weights(tmp_path / "plain", [FedBuff()], **how)
    assert differs(plain, weights(tmp_path / "trimmed", [FedBuff(), TrimmedMean(1)], **how))
    assert_same_bits(plain, weights(tmp_path / "uniform", [FedBuff(), TrimmedMean(0)], **how))
