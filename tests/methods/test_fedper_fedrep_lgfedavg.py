"""FedPer and FedRep keep the last layers with each client, LG-FedAvg keeps the others."""

from functools import partial

import pytest
import torch
from helpers.quadratics import curved_data
from helpers.runs import assert_same_bits, differs, small_data, small_model
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD

from fl_lightning import Method
from fl_lightning.callbacks import Callback
from fl_lightning.data import Pooled
from fl_lightning.methods import FedBABU, FedBN, FedPer, FedRep, LGFedAvg, Local

HEAD = {"classifier.weight", "classifier.bias"}
# layers of the small model: two of the encoder, two of the projector, and the classifier
LAYERS = 5


def own_models(trainer):
    """The entries that stay with each client, in order of the clients."""
    return [trainer.client.memories().own_entries(k) for k in range(trainer.data.num_clients)]


class Product(LightningModule):
    """o = h b x with the loss (o - y)^2 / 2, from examples (x, y); h is the head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = (nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2))
        self.body.weight.data.fill_(1.0)
        self.head.weight.data.fill_(0.5)
        self.taps = {"logits": "head"}

    def training_step(self, batch, batch_idx):
        x, y = batch[0].T[..., None]
        return 0.5 * (self.head(self.body(x)) - y).square().mean()

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("method", "epochs", "averaged", "kept"),
    [
        (FedPer(), 1, {"body": 1.0375}, [0.65, 0.5]),
        (LGFedAvg(), 1, {"head": 0.575}, [1.075, 1.0]),
        (FedRep(), 3, {"body": 1.04768875}, [0.785, 0.5]),
    ],
    ids=["fedper", "lg", "fedrep"],
)
def test_two_clients_of_two_numbers_by_hand(run, method, epochs, averaged, kept):
    data = curved_data([1.0, 2.0], [2.0, 1.0])
    state, trainer = run([method], model=Product(), data=data, max_rounds=1, local_epochs=epochs, precision="64-true")
    expected = {"body": 1.0, "head": 0.5} | averaged
    assert {name.split(".")[0]: value.item() for name, value in state.items()} == pytest.approx(expected, abs=1e-12)
    assert [value.item() for own in own_models(trainer) for value in own.values()] == pytest.approx(kept, abs=1e-12)


@pytest.mark.parametrize("method", [FedPer(LAYERS), LGFedAvg(0)], ids=["fedper", "lg"])
def test_with_personal_entries_alone_it_is_local_bit_for_bit(run, method):
    runs = [run([one])[1] for one in (method, Local())]
    for mine, local in zip(*map(own_models, runs), strict=True):
        assert_same_bits(mine, local)
    assert runs[0].metrics["bytes/up"] == 0


@pytest.mark.parametrize("method", [FedPer(), LGFedAvg()], ids=["fedper", "lg"])
def test_one_client_trains_as_without_federation(run, method):
    data = partial(small_data, num_clients=1, partitioner=Pooled(), train_size=120, test_size=50)
    state, trainer = run([method], data=data(), local_epochs=2)
    assert_same_bits(state | own_models(trainer)[0], run([], data=data(), local_epochs=2)[0])


def test_fedrep_without_epochs_for_the_head_is_fedbabu_bit_for_bit_with_a_warning(run):
    with pytest.warns(UserWarning, match="body_epochs=2"):
        state, trainer = run([FedRep(2)], local_epochs=2)
    assert_same_bits(state, run([FedBABU()], local_epochs=2)[0])
    for own in own_models(trainer):
        assert own.keys() == HEAD and not differs(own, {name: small_model().state_dict()[name] for name in HEAD})


def test_fedrep_trains_the_head_then_the_body_and_the_other_part_keeps_every_bit(run):
    moved = []

    class Watch(Method):
        def on_before_optimizer_step(self, client, optimizer):
            client.scratch(self).before = {name: value.detach().clone() for name, value in client.live.items()}

        def on_after_optimizer_step(self, client, optimizer):
            before = client.scratch(self).before
            trained = {name for name in client.trainable if not torch.equal(client.live[name], before[name])}
            moved.append((client.epoch, trained))

    model = small_model()
    model.optimizer = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
    run([FedRep(body_epochs=2), Watch()], model=model, local_epochs=5)
    body = {name for name, _ in model.named_parameters()} - HEAD
    assert {epoch for epoch, _ in moved} == set(range(5))
    for epoch, trained in moved:
        assert trained == (body if epoch >= 3 else HEAD)


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (FedPer(1), ("classifier.",)),
        (FedPer(2), ("classifier.", "projector.layers.3.", "projector.layers.4.")),
        (LGFedAvg(2), ("encoder.", "projector.layers.0.", "projector.layers.1.")),
        (FedRep(), ("classifier.",)),
    ],
    ids=["fedper", "fedper of two layers", "lg of two layers", "fedrep"],
)
def test_a_layer_stays_with_its_normalisation_and_the_rest_alone_travels(run, method, kept):
    state, trainer = run([method], local_epochs=2)
    names = {name for name in state if name.startswith(kept)}
    owns = own_models(trainer)
    assert all(own.keys() == names for own in owns) and differs(owns[0], owns[1])
    start = small_model().state_dict()
    assert_same_bits({n: state[n] for n in names}, {n: start[n] for n in names})
    sent = sum(value.nbytes for name, value in state.items() if name not in names)
    assert trainer.metrics["bytes/up"] == trainer.metrics["bytes/down"] == 4 * sent


@pytest.mark.parametrize("method", [FedPer(), FedRep(), LGFedAvg()], ids=lambda method: method.name)
def test_a_client_begins_with_its_own_entries_of_its_last_visit_and_is_evaluated_with_them(run, method):
    left = {}

    class Watch(Callback):
        def on_client_end(self, trainer, client):
            k = client.info.id
            if k in left:
                assert_same_bits({name: client.received[name] for name in left[k]}, left[k])
            left[k] = {name: client.state()[name] for name in client.kept}

    data = small_data(train_size=120, test_size=50)
    state, trainer = run([method], data=data, local_epochs=2, max_rounds=3, participation=0.5, callbacks=[Watch()])
    x, y = map(torch.cat, zip(*data.test_dataloader(), strict=True))
    model, hits = small_model().eval(), []
    for own in left.values():
        model.load_state_dict(state | own)
        hits.append((model(x).argmax(1) == y).float().mean().item())
    assert trainer.metrics["test/accuracy"] == pytest.approx(sum(hits) / len(hits))


def test_fedbn_beside_it_keeps_normalisation_too(run):
    _, trainer = run([FedPer(), FedBN()])
    layers = ("classifier.", "projector.layers.1.", "projector.layers.4.")
    assert all(name.startswith(layers) for name in own_models(trainer)[0]) and len(own_models(trainer)[0]) == 12
