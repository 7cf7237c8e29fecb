"""What a client logged in its visit is there for callbacks, client by client."""

import pytest

from fl_lightning.callbacks import Callback
from fl_lightning.methods import FedDecorr, FedProx


class Watch(Callback):
    def __init__(self):
        self.seen = {}

    def on_client_end(self, trainer, client):
        self.seen[client.info.id] = (client.info.num_examples, client.metrics)
        assert client.metrics == client.metrics


def test_the_metrics_of_a_visit_are_the_parts_of_the_rounds_mean(run):
    watch = Watch()
    _, trainer = run([FedDecorr(), FedProx()], callbacks=[watch], max_rounds=2, local_epochs=2)
    assert set(watch.seen) == {0, 1, 2, 3}
    total = sum(examples for examples, _ in watch.seen.values())
    for tag in ("train/loss", "train/accuracy", "train/feddecorr", "train/fedprox"):
        mean = sum(examples * metrics[tag] for examples, metrics in watch.seen.values()) / total
        assert trainer.metrics[tag] == pytest.approx(mean, rel=1e-5)
        assert len({metrics[tag] for _, metrics in watch.seen.values()}) == 4
