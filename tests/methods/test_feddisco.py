"""FedDisco weights clients by their examples and by how even their labels are."""

from types import SimpleNamespace

import pytest
import torch
from helpers.errors import warned
from helpers.runs import plain_sgd_model
from helpers.softmax_regression import assert_printed
from helpers.tiny import variant

from fl_lightning import Method, Server
from fl_lightning.methods import FedDisco

COUNTS = torch.tensor([[8, 2], [5, 5], [0, 20]])


def weights_of(method, counts=COUNTS, cohort=None):
    """The weights of a cohort, whose sum is 1."""
    server = Server({}, [], label_counts=counts)
    server.begin_round(0, list(range(len(counts))) if cohort is None else cohort)
    method.on_round_start(server)
    weights = [method.client_weight(SimpleNamespace(info=SimpleNamespace(id=k))) for k in server.cohort]
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"distance": "l2"}, (0.18775055, 0.47663496, 0.33561449)),
        ({}, (0.30151787, 0.43750000, 0.26098213)),
        ({"normalise": False}, (0.29592956, 0.40837565, 0.29569479)),
    ],
    ids=["l2", "kl normalised", "kl"],
)
def test_the_worked_examples(options, weights):
    assert_printed(weights_of(FedDisco(**options)), *weights)


@pytest.mark.parametrize("distance", ["kl", "l2", "l1", "cosine"])
def test_laws_of_every_distance(distance):
    even = torch.tensor([[3, 3], [5, 5], [2, 2]])
    share = even.sum(1) / even.sum().double()
    torch.testing.assert_close(weights_of(FedDisco(distance=distance), even), (share + 0.1) / 1.3)
    found = weights_of(FedDisco(distance=distance))
    assert (found >= 0).all()
    torch.testing.assert_close(weights_of(FedDisco(distance=distance), 2 * COUNTS), found)
    assert weights_of(FedDisco(distance=distance), COUNTS[:1]).item() == 1
    assert weights_of(FedDisco(a=50.0, distance=distance, b=1.0))[1] == 1  # the others have none left
    torch.testing.assert_close(weights_of(FedDisco(0, 1e9, distance)), torch.full((3,), 1 / 3).double())


def test_the_cohort_alone_counts():
    torch.testing.assert_close(weights_of(FedDisco(), cohort=[2, 0]), weights_of(FedDisco(), COUNTS[[2, 0]]))


def test_without_a_positive_weight_examples_count_with_a_warning():
    with warned("FedDisco"):
        found = weights_of(FedDisco(b=-5.0))
    torch.testing.assert_close(found, torch.tensor([10, 10, 20]).double() / 40)


def test_parameters_and_buffers_have_these_weights(run):
    disco = FedDisco(distance="l1")

    same = variant(Method, client_weight=lambda self, client: weights[client.info.id].item())()

    state, trainer = run([disco], model=plain_sgd_model(), max_rounds=1)
    counts = torch.stack([trainer.data.info(k).label_counts for k in range(4)])
    weights = weights_of(disco, counts)
    wanted, _ = run([same], model=plain_sgd_model(), max_rounds=1)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)
