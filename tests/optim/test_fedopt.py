"""Server optimizers follow their published recurrences."""

from functools import partial

import make_reference_values as reference
import numpy as np
import pytest
import torch
from helpers.runs import assert_same_bits, differs
from torch.optim import SGD

from fl_lightning import Server
from fl_lightning.optim import FedAdagrad, FedAdam, FedAvgM, FedYogi

VALUES = reference.load("optimizers")
OPTIMIZERS = {
    "FedAvgM": partial(FedAvgM, momentum=0.9),
    "FedAvgM dampened": partial(FedAvgM, momentum=0.9, dampening=0.9),
    "FedAdagrad": FedAdagrad,
    "FedAdagrad with momentum": partial(FedAdagrad, beta1=0.9, initial_v=1e-6),
    "FedAdam": FedAdam,
    "FedAdam corrected": partial(FedAdam, bias_correction="adam"),
    "FedAdam as in Flower": partial(FedAdam, bias_correction="flower", tau=1e-9),
    "FedYogi": FedYogi,
    "FedYogi corrected": partial(FedYogi, initial_v=1e-6, bias_correction="adam"),
}


def follow(build, deltas):
    server = Server({"w": torch.zeros(deltas.shape[1], dtype=deltas.dtype)}, ["w"], build)
    for delta in deltas:
        server.step({"w": delta}, {})
    return server.state["w"]


@pytest.mark.parametrize("name", VALUES)
def test_server_optimizers_follow_their_recurrences(name):
    found = follow(partial(OPTIMIZERS[name], lr=0.1), torch.from_numpy(reference.DELTAS))
    np.testing.assert_allclose(found.numpy(), VALUES[name], rtol=1e-10)


def test_fedavgm_dampened_is_hsus_form_with_a_smaller_rate_and_torchs_dampening_is_not():
    deltas = torch.randn(6, 3).double()
    dampened = follow(partial(FedAvgM, lr=1.0, momentum=0.9, dampening=0.9), deltas)
    torch.testing.assert_close(dampened, follow(partial(SGD, lr=0.1, momentum=0.9), deltas))
    assert not torch.allclose(dampened, follow(partial(SGD, lr=1.0, momentum=0.9, dampening=0.9), deltas))


def test_fedavgm_without_momentum_is_fedavg(run):
    assert_same_bits(run(server_optimizer=partial(FedAvgM, momentum=0.0))[0], run()[0])


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedAvgM, FedYogi])
def test_the_server_optimizer_can_take_the_buffers_too_as_some_codes_do(run, kind):
    usual, _ = run(server_optimizer=partial(kind, lr=0.01))
    wide, _ = run(server_optimizer=partial(kind, lr=0.01), server_optimizer_scope="all_float")
    name = "projector.layers.1.running_var"
    assert differs({name: usual[name]}, {name: wide[name]})
    counter = "projector.layers.1.num_batches_tracked"
    assert torch.equal(usual[counter], wide[counter])
