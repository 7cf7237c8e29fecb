"""The server steps by the mean change, or by its optimizer; what is no parameter takes the plain mean."""

from functools import partial

import make_reference_values as reference
import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, differs
from torch.optim import SGD, Adam

from fl_lightning import Server
from fl_lightning.optim import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fl_lightning.utilities.errors import ClientError


def state():
    return {
        "w": torch.tensor([1.0, 2.0]),
        "frozen": torch.nn.Parameter(torch.tensor([5.0]), requires_grad=False),
        "mean": torch.tensor([0.5]),
        "count": torch.tensor(3),
    }


def test_without_an_optimizer_the_mean_change_is_added_and_rounded_once():
    server = Server(state(), ["w"])
    delta = torch.tensor([0.1, 1e-9], dtype=torch.float64)
    server.step({"w": delta}, {})
    assert torch.equal(server.state["w"], (torch.tensor([1.0, 2.0]).double() + delta).float())


def test_two_steps_are_those_of_the_optimizer_on_minus_the_change():
    server = Server(state(), ["w"], partial(SGD, lr=0.5, momentum=0.9))
    for _ in range(2):
        server.step({"w": torch.tensor([1.0, -1.0])}, {})
    # v1 = 1, v2 = 1.9
    torch.testing.assert_close(server.state["w"], torch.tensor([1 + 0.5 * 2.9, 2 - 0.5 * 2.9]))


def test_buffers_take_the_mean_and_integers_its_whole_part_in_their_dtype():
    server = Server(state(), ["w"], partial(Adam, lr=0.1))
    server.step({"w": torch.ones(2)}, {"mean": torch.tensor([2.25]), "count": torch.tensor(7.9)})
    assert server.state["mean"].item() == 2.25
    assert server.state["count"].item() == 7
    assert server.state["count"].dtype == torch.int64
    assert server.state["frozen"].item() == 5


def test_all_float_entries_can_be_moved_by_the_optimizer_but_integers_never():
    server = Server(state(), ["w"], partial(SGD, lr=0.5), scope="all_float")
    server.step({"w": torch.zeros(2)}, {"mean": torch.tensor([2.5]), "count": torch.tensor(7)})
    assert server.state["mean"].item() == 1.5
    assert server.state["count"].item() == 7


def test_entries_that_nobody_sent_stay():
    server = Server(state(), ["w", "frozen"], partial(SGD, lr=1.0, weight_decay=0.1))
    server.step({"w": torch.ones(2)}, {})
    assert server.state["frozen"].item() == 5
    before = server.state["w"].clone()
    server.step({}, {})
    assert torch.equal(server.state["w"], before)


def test_what_it_gives_it_takes_back_with_the_optimizers_state():
    def stepped(server, times):
        for _ in range(times):
            server.step({"w": torch.tensor([0.3, -0.2])}, {})
        return server

    whole = stepped(Server(state(), ["w"], partial(Adam, lr=0.1)), 4)
    first = stepped(Server(state(), ["w"], partial(Adam, lr=0.1)), 2)
    first.begin_round(7, [1])
    first.step({}, {"mean": torch.tensor([2.0])})
    second = Server(state(), ["w"], partial(Adam, lr=0.1))
    second.load_state_dict(first.state_dict())
    assert second.round == 7
    assert not second.known
    assert torch.equal(stepped(second, 2).state["w"], whole.state["w"])
    with refused("count", kind=KeyError):
        Server({"w": torch.ones(2)}, ["w"]).load_state_dict(first.state_dict())


def test_assigned_entries_are_those_that_are_stepped():
    server = Server(state(), ["w"])
    server.assign({"w": torch.tensor([10.0, 20.0])})
    server.step({"w": torch.ones(2)}, {})
    assert server.state["w"].tolist() == [11, 21]
    for name, value in {"x": torch.zeros(2), "w": torch.zeros(())}.items():
        with refused("server.assign", name):
            server.assign({name: value})


def test_a_changed_frozen_parameter_is_new_to_a_client_until_it_has_been_sent_there():
    server = Server(state(), ["w"])
    assert server.news_for(0) == []
    server.assign({"w": torch.zeros(2), "frozen": torch.tensor([6.0])})
    server.note_sent([0, 2])
    again = Server(state(), ["w"])
    again.load_state_dict(server.state_dict())
    for one in (server, again):
        assert [one.news_for(k) for k in range(3)] == [[], ["frozen"], []]
        one.step({}, {"frozen": torch.tensor([7.0]), "mean": torch.ones(1)})
        assert one.news_for(0) == ["frozen"]


def test_zeros_have_the_shapes_of_what_it_moves_in_float64():
    zeros = Server(state(), ["w"]).zeros()
    assert zeros.keys() == {"w"}
    assert zeros["w"].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_parameter_is_rounded_to_its_own_dtype_and_no_other(dtype):
    start, delta = torch.tensor([1.0, 1 / 3], dtype=dtype), torch.tensor([0.1, 1e-3], dtype=torch.float64)
    server = Server({"w": start}, ["w"])
    expected = start
    for _ in range(3):
        expected = (expected.double() + delta).to(dtype)
        server.step({"w": delta}, {})
        assert server.state["w"].dtype == dtype
        assert torch.equal(server.state["w"], expected)


def test_an_optimizer_that_diverges_is_named_with_its_rate():
    server = Server(state(), ["w"], partial(SGD, lr=1e30))
    with refused("round 0", "SGD", "lr 1e+30", "w", kind=ClientError):
        server.step({"w": torch.full((2,), 1e30)}, {})


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
