"""Clients side by side have the gradients elsewhere that they have alone."""

import pytest
from helpers.beside import assert_near, assert_same_alone, normed, rows, trained
from helpers.errors import refused
from helpers.gradients import Ahead, Dropping, InStep
from helpers.tiny import TinyModule

from fl_lightning import Method
from fl_lightning.methods import FedBABU, FedDecorr, FedLC, FedProx

pytestmark = pytest.mark.usefixtures("undrawn")
TAPS = {"representation": "body", "logits": "head"}
ROUND = {"max_rounds": 1, "local_epochs": 1}


@pytest.mark.parametrize(
    ("others", "how"),
    [
        (list, {}),
        (lambda: [FedProx(0.1), FedLC(), FedDecorr()], {"model": TinyModule, "data": rows, "taps": TAPS}),
        (lambda: [FedBABU()], {"model": normed}),
    ],
    ids=["alone", "with corrections and penalties", "with BatchNorm"],
)
def test_side_by_side_a_method_has_the_gradients_that_it_has_alone(tmp_path, others, how):
    assert_same_alone(tmp_path, methods=lambda: [*others(), Ahead()], **ROUND, **how)


def test_side_by_side_too_the_dropout_masks_are_those_of_the_step(tmp_path):
    class Again(Method):
        replaces_gradients = True

        def on_before_optimizer_step(self, client, optimizer):
            for name, gradient in client.gradients().items():
                client.live[name].grad = gradient

    how = {"model": Dropping, "data": rows, "visits": False, **ROUND}
    plain, _ = trained(tmp_path / "plain", 4, **how)
    again, _ = trained(tmp_path / "again", 4, methods=lambda: [Again()], **how)
    assert_near(plain["state"], again["state"], 1e-10)


def test_a_start_that_moves_the_parameters_moves_those_of_its_client_alone_side_by_side_too(tmp_path):
    class Moves(Method):
        def on_client_start(self, client):
            batch = next(client.batches("moves"))
            gradient = client.gradients(batch=batch, loss="own")
            client.add_to_parameters(gradient, -0.1 * (1 + client.info.id))

    assert_same_alone(tmp_path, methods=lambda: [Moves()], model=normed, **ROUND)


def test_a_step_of_clients_side_by_side_cannot_read_batches(tmp_path):
    with refused("trainer.clients_per_step=4", "client.info.id"):
        trained(tmp_path / "number", 4, methods=lambda: [InStep()])
    trained(tmp_path / "alone", 1, methods=lambda: [InStep()], **ROUND)
