"""FedAvg, the empty list of methods, averages the clients; Local leaves each alone."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.errors import warned
from helpers.runs import assert_same_bits, small_data, train_by_hand
from torch.optim import SGD

from fl_lightning.data import IID, Dirichlet
from fl_lightning.methods import Local
from fl_lightning.models import MLP, ImageClassifier


def test_one_client_with_full_participation_is_central_training(run):
    """Three rounds of one client are three epochs of a plain loop over the same batches, bit for bit."""
    model = ImageClassifier(MLP(64, [32]), optimizer=partial(SGD, lr=0.1))
    central = copy.deepcopy(model)
    data = small_data(num_clients=1, partitioner=IID())
    state, trainer = run(model=model, data=data, max_rounds=3)
    for round_ in range(3):
        train_by_hand(central, data, trainer.seed, round_, 0)
    assert_same_bits(state, central.state_dict())


def test_the_global_state_is_the_mean_of_the_clients_by_examples(run, tmp_path):
    """FedAvg of three clients is sum n_k y_k / n, rounded once."""
    model = ImageClassifier(MLP(64, [16]), optimizer=partial(SGD, lr=0.1))
    start = copy.deepcopy(model)
    data = small_data(num_clients=3, partitioner=Dirichlet(0.5))
    state, trainer = run(model=model, data=data, max_rounds=1)
    total = 0.0
    for k in range(3):
        local = copy.deepcopy(start)
        train_by_hand(local, data, trainer.seed, 0, k)
        total = total + data.info(k).num_examples * local.classifier.weight.detach().double()
    assert torch.equal(state["classifier.weight"], (total / 400).float())


def test_local_models_never_hear_of_each_other_and_metrics_are_their_mean(run):
    data = small_data()
    model = ImageClassifier(MLP(64, [16]), optimizer=partial(SGD, lr=0.1))
    start = copy.deepcopy(model)
    with warned("entries of the state"):
        state, trainer = run([Local()], model=model, data=data, max_rounds=2)
    assert_same_bits(state, dict(start.state_dict()))
    assert trainer.metrics["bytes/up"] == 0
    hits = []
    for k in range(4):
        own = copy.deepcopy(start)
        for round_ in range(2):
            train_by_hand(own, data, trainer.seed, round_, k)
        assert_same_bits(trainer.client.memories().own_entries(k), dict(own.state_dict()))
        x, y = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
        hits.append((own(x).argmax(1) == y).float().mean().item())
    assert trainer.metrics["test/accuracy"] == pytest.approx(np.mean(hits), abs=1e-6)
