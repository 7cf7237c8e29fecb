"""FedAvg, the empty list of methods: the mean of the clients by examples, and central training for one client."""

import copy
from functools import partial

import torch
from helpers.runs import assert_same_bits, small_data
from torch.optim import SGD

from fl_lightning.data import IID, Dirichlet
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.seeding import address


def test_one_client_with_full_participation_is_central_training(run):
    """Three rounds of one client are three epochs of a plain loop over the same batches, bit for bit."""
    model = ImageClassifier(MLP(64, [32]), optimizer=partial(SGD, lr=0.1))
    central = copy.deepcopy(model)
    data = small_data(num_clients=1, partitioner=IID())
    state, trainer = run(model=model, data=data, max_rounds=3)
    optimizer = SGD(central.parameters(), lr=0.1)
    for round_ in range(3):
        loader = data.train_dataloader(0)
        loader.generator.manual_seed(address(trainer.seed, "batches", round_, 0))
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(central(x), y).backward()
            optimizer.step()
    assert_same_bits(state, central.state_dict())


def test_the_global_state_is_the_mean_of_the_clients_by_examples(run, tmp_path):
    """FedAvg of three clients is sum n_k y_k / n, rounded once."""
    model = ImageClassifier(MLP(64, [16]), optimizer=partial(SGD, lr=0.1))
    start = copy.deepcopy(model)
    data = small_data(num_clients=3, partitioner=Dirichlet(0.5))
    state, trainer = run(model=model, data=data, max_rounds=1)
    total = 0.0
    for k in range(3):
        local, loader = copy.deepcopy(start), data.train_dataloader(k)
        loader.generator.manual_seed(address(trainer.seed, "batches", 0, k))
        optimizer = SGD(local.parameters(), lr=0.1)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(local(x), y).backward()
            optimizer.step()
        total = total + data.info(k).num_examples * local.classifier.weight.detach().double()
    assert torch.equal(state["classifier.weight"], (total / 400).float())
