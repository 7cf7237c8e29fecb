"""Server optimizers follow their published recurrences."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.runs import assert_finite, assert_same_bits, differs
from torch.optim import SGD

from fl_lightning import Server
from fl_lightning.methods import FedDecorr
from fl_lightning.optim import FedAdagrad, FedAdam, FedAvgM, FedYogi


def recurrence(kind, deltas, lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3, v=0.0, correct="none", dampening=0.0):
    """The published recurrences, in float64 NumPy."""
    w, m, v = np.zeros(deltas.shape[1]), np.zeros(deltas.shape[1]), np.full(deltas.shape[1], v)
    for t, delta in enumerate(deltas, 1):
        if kind is FedAvgM:
            m = beta1 * m + (1 - dampening) * delta
            w = w + lr * m
            continue
        m, square = beta1 * m + (1 - beta1) * delta, delta**2
        if kind is FedAdagrad:
            v = v + square
        elif kind is FedAdam:
            v = beta2 * v + (1 - beta2) * square
        else:
            v = v - (1 - beta2) * square * np.sign(v - square)
        power = t + (correct == "flower")
        factor = 1 if correct == "none" else np.sqrt(1 - beta2**power) / (1 - beta1**power)
        w = w + lr * factor * m / (np.sqrt(v) + tau)
    return w


@pytest.mark.parametrize(
    ("kind", "options", "terms"),
    [
        (FedAvgM, {"momentum": 0.9}, {}),
        (FedAvgM, {"momentum": 0.9, "dampening": 0.9}, {"dampening": 0.9}),
        (FedAdagrad, {}, {"beta1": 0.0}),
        (FedAdagrad, {"beta1": 0.9, "initial_v": 1e-6}, {"v": 1e-6}),
        (FedAdam, {}, {}),
        (FedAdam, {"bias_correction": "adam"}, {"correct": "adam"}),
        (FedAdam, {"bias_correction": "flower", "tau": 1e-9}, {"correct": "flower", "tau": 1e-9}),
        (FedYogi, {}, {}),
        (FedYogi, {"initial_v": 1e-6, "bias_correction": "adam"}, {"v": 1e-6, "correct": "adam"}),
    ],
)
def test_server_optimizers_follow_their_recurrences(kind, options, terms):
    deltas = np.random.default_rng(0).normal(scale=0.1, size=(12, 5))
    server = Server({"w": torch.zeros(5, dtype=torch.float64)}, ["w"], partial(kind, lr=0.1, **options))
    server._round = lambda name: server.state[name].copy_(server.parameters[name].detach())
    for delta in deltas:
        server.step({"w": torch.from_numpy(delta)}, {})
    np.testing.assert_allclose(server.state["w"].numpy(), recurrence(kind, deltas, **terms), rtol=1e-10)


def test_fedavgm_dampened_is_hsus_form_with_a_smaller_rate_and_torchs_dampening_is_not():
    deltas = torch.randn(6, 3).double()

    def follow(build):
        server = Server({"w": torch.zeros(3)}, ["w"], build)
        for delta in deltas:
            server.step({"w": delta}, {})
        return server.state["w"]

    dampened = follow(partial(FedAvgM, lr=1.0, momentum=0.9, dampening=0.9))
    torch.testing.assert_close(dampened, follow(partial(SGD, lr=0.1, momentum=0.9)))
    assert not torch.allclose(dampened, follow(partial(SGD, lr=1.0, momentum=0.9, dampening=0.9)))


def test_fedavgm_without_momentum_is_fedavg(run):
    assert_same_bits(run(server_optimizer=partial(FedAvgM, momentum=0.0))[0], run()[0])


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedAvgM, FedYogi])
def test_server_optimizers_with_a_method(run, kind):
    state, trainer = run([FedDecorr()], server_optimizer=partial(kind, lr=0.01))
    assert_finite(state, trainer)


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedAvgM, FedYogi])
def test_the_server_optimizer_can_take_the_buffers_too_as_some_codes_do(run, kind):
    usual, _ = run(server_optimizer=partial(kind, lr=0.01))
    wide, _ = run(server_optimizer=partial(kind, lr=0.01), server_optimizer_scope="all_float")
    name = "projector.layers.1.running_var"
    assert differs({name: usual[name]}, {name: wide[name]})
    counter = "projector.layers.1.num_batches_tracked"
    assert torch.equal(usual[counter], wide[counter])
