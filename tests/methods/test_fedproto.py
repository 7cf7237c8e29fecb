"""FedProto's prototypes are means over the classes' owners, and representations are drawn to them."""

import copy
from functools import partial

import torch
from helpers.runs import small_data
from torch.optim import SGD

from fl_lightning import Weighted
from fl_lightning.methods import FedProto
from fl_lightning.models import MLP, ImageClassifier


def test_fedproto_keeps_the_prototypes_of_classes_that_nobody_held_this_round():
    method = FedProto()
    method.reset(None)
    for held, value in ((0, 2.0), (1, 5.0)):
        counts = torch.zeros(3, 1)
        counts[held] = 1
        method.on_round_end(None, {"prototypes": Weighted.of(torch.full((3, 2), value), counts)})
    assert method.prototypes.tolist() == [[2.0, 2.0], [5.0, 5.0], [0.0, 0.0]]
    assert method.known.tolist() == [True, True, False]


def test_fedproto_prototypes_are_the_plain_means_over_owners_of_class_means(run):
    """With learning rate 0 nothing moves while they are taken."""
    model = ImageClassifier(MLP(64, [12]), optimizer=partial(SGD, lr=0.0))
    encoder, data, method = copy.deepcopy(model.encoder), small_data(), FedProto()
    run([method], model=model, data=data, max_rounds=1, local_epochs=2)
    means: dict[int, list] = {}
    for k in range(4):
        x, y = (torch.cat(parts) for parts in zip(*data.train_dataloader(k), strict=True))
        z = encoder(x).detach().double()
        for c in y.unique().tolist():
            means.setdefault(c, []).append(z[y == c].mean(0))
    assert max(map(len, means.values())) > 1
    for c, found in means.items():
        torch.testing.assert_close(method.prototypes[c], torch.stack(found).mean(0), rtol=1e-5, atol=1e-6)
    assert method.known.tolist() == [c in means for c in range(10)]


def test_fedproto_takes_prototypes_from_the_last_local_epoch_alone(run):
    sums = {}

    class Spy(FedProto):
        name = "fedproto"

        def on_client_end(self, client):
            sums[client.info.id] = float(client.scratch(self).counts.sum())
            return super().on_client_end(client)

    data = small_data()
    run([Spy()], data=data, local_epochs=3, max_rounds=1)
    assert sums == {k: data.info(k).num_examples for k in range(4)}


def test_fedproto_draws_representations_to_the_prototypes_from_the_second_round_on(run):
    def fit(lambda_):
        given = {"data": small_data(test_size=50), "max_rounds": 6}
        return run([FedProto(lambda_=lambda_)], model=ImageClassifier(MLP(64, [12])), **given)[1]

    trainer, loose = fit(5.0), fit(1e-6)
    terms = [row.get("train/fedproto") for row in trainer.history]
    assert terms[0] is None
    assert terms[-1] / 5.0 < loose.history[-1]["train/fedproto"] / 1e-6
