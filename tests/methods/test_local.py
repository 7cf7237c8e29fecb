"""Local trains each client alone."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.errors import warned
from helpers.runs import assert_same_bits, small_data
from torch.optim import SGD

from fl_lightning.methods import Local
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.seeding import address


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
        optimizer = SGD(own.parameters(), lr=0.1)
        for round_ in range(2):
            loader = data.train_dataloader(k)
            loader.generator.manual_seed(address(trainer.seed, "batches", round_, k))
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(own(x), y).backward()
                optimizer.step()
        assert_same_bits(trainer.client.own_entries(k), dict(own.state_dict()))
        x, y = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
        hits.append((own(x).argmax(1) == y).float().mean().item())
    assert trainer.metrics["test/accuracy"] == pytest.approx(np.mean(hits), abs=1e-6)
