"""FedAS aligns the received body with the client's last one, and weights clients by Fisher information."""

from functools import partial

import pytest
import torch
from helpers.runs import assert_same_bits, differs, plain_sgd_model, small_data, small_trainer
from helpers.softmax_regression import Softmax, assert_printed, fit
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning import Method
from fl_lightning.methods import FedAS, FedPer

TAPS = {"representation": "body", "logits": "head"}
data_of_clients = partial(small_data, train_size=120, test_size=50)


def test_the_worked_example_of_a_weight(tmp_path):
    """The batches are A and B, and the model stays at W."""
    seen = []

    class Watch(Method):
        requires = ("logits",)

        def on_client_end(self, client):
            seen.append(FedAS().client_weight(client))

    model = Softmax()
    model.optimizer = partial(torch.optim.SGD, lr=0.0)
    fit(tmp_path, [Watch()], names="AB", sizes=[4], model=model)
    assert_printed(torch.tensor(seen), 0.87342959)


def test_without_alignment_and_fisher_weights_it_is_fedper_bit_for_bit(run):
    plain, of_plain = run([FedPer()], model=plain_sgd_model(), data=data_of_clients())
    same, trainer = run([FedAS(0, weighting="examples")], model=plain_sgd_model(), data=data_of_clients())
    assert_same_bits(plain, same)
    for k, memory in of_plain.client.memories().items():
        assert_same_bits(memory["state"], trainer.client.memories()[k]["state"])


def test_the_first_visit_has_no_alignment_and_the_second_has(run):
    how = {"model": plain_sgd_model, "data": data_of_clients}
    for rounds, moves in ((1, False), (2, True)):
        states = [
            run([method], max_rounds=rounds, **{name: make() for name, make in how.items()})[0]
            for method in (FedPer(), FedAS(alignment_rate=1.0, weighting="examples"))
        ]
        assert differs(*states) == moves


def tiny(seed=0):
    torch.manual_seed(seed)
    return TinyModule(partial(torch.optim.SGD, lr=0.0))


class Been(FedAS):
    """Clients have been at another model; their local steps move nothing."""

    def __init__(self, last, **given):
        super().__init__(**given)
        self.given = last

    def initial_memory(self, client):
        return {"last": {name: value.detach().clone() for name, value in self.given.items()}}


def started(folder, method, size=6, batch_size=4, **kwargs):
    """The state in which a client's visit starts after the alignment."""
    seen = []

    class Watch(Method):
        def on_client_start(self, client):
            seen.append((client.state(), {name: value.clone() for name, value in client.received.items()}))

    trainer = small_trainer(folder, taps=TAPS, precision="64-true", max_rounds=1, **kwargs)
    trainer.fit(tiny(), clients(TinyData(size, batch_size=batch_size)), [method, Watch()])
    return seen[-1]


def test_the_alignment_is_a_pass_of_sgd_on_the_distances_to_the_last_prototypes(tmp_path):
    other = tiny(1).double()
    state, received = started(tmp_path, Been(other.state_dict(), alignment_rate=0.5))
    x, y = (part for part in TinyData(6).rows(6, 1).tensors)
    x = x.double()
    last = other.body(x).detach()
    means = torch.stack([last[y == c].mean(0) for c in range(3)])
    weight, bias = (received[f"body.0.{name}"].clone() for name in ("weight", "bias"))
    for part in (slice(0, 4), slice(4, 6)):
        leaves = [weight.requires_grad_(), bias.requires_grad_()]
        z = torch.tanh(x[part] @ weight.T + bias)
        classes = [(z[y[part] == c], means[c]) for c in set(y[part].tolist())]
        loss = sum((own - mean).square().mean() for own, mean in classes)
        steps = torch.autograd.grad(loss, leaves)
        weight, bias = (leaf.detach() - 0.5 * step for leaf, step in zip(leaves, steps, strict=True))
    torch.testing.assert_close(state["body.0.weight"], weight, rtol=0, atol=1e-12)
    torch.testing.assert_close(state["body.0.bias"], bias, rtol=0, atol=1e-12)
    assert torch.equal(state["head.weight"], received["head.weight"])


def test_representations_that_are_at_their_prototypes_do_not_move(tmp_path):
    """The received body is the last one, and each class has one example."""
    state, received = started(tmp_path, Been(tiny().double().state_dict(), alignment_rate=5.0), size=3)
    for name, value in received.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-14)


class Weights(Method):
    """Notes the weights of the clients and their models."""

    def __init__(self, seen):
        self.note = seen.append

    def on_client_end(self, client):
        self.note((client.weight, client.state()))


def test_the_mean_has_the_weights_and_they_are_the_squared_gradients_after_training(run):
    seen, model = [], plain_sgd_model()
    state, _ = run([FedAS(), Weights(seen)], model=model, data=data_of_clients(batch_size=200), max_rounds=1)
    total = sum(weight for weight, _ in seen)
    for name in (name for name, value in state.items() if value.is_floating_point() and "classifier" not in name):
        mean = sum(weight / total * own[name].double() for weight, own in seen)
        torch.testing.assert_close(state[name].double(), mean, rtol=1e-5, atol=1e-7)
    data = data_of_clients(batch_size=200)
    data.setup()
    for k, (weight, own) in enumerate(seen):
        ((x, y),) = data.train_dataloader(k)
        model.load_state_dict(own)
        model.eval().zero_grad()
        cross_entropy(model(x), y).backward()
        squares = sum(p.grad.double().square().sum() for p in model.parameters())
        assert weight == pytest.approx(squares.item(), rel=1e-4)


def test_equal_clients_have_equal_weights(tmp_path):
    seen = []
    trainer = small_trainer(tmp_path, taps=TAPS, max_rounds=1)
    both = clients(TinyData(12), 6, 6)
    rows = both.datamodule.rows
    both.datamodule.rows = lambda number, seed: rows(number // 2, seed) + rows(number // 2, seed)
    trainer.fit(tiny(), both, [FedAS(), Weights(seen)])
    assert seen[0][0] == seen[1][0] > 0


class OneClass(TinyModule):
    """Has one logit, whose likelihood is 1, so that the gradient is 0."""

    def build(self):
        self.head = nn.Linear(6, 1)

    def loss(self, batch):
        return self(batch[0]).square().mean()


class Zeros(TinyData):
    def rows(self, number, seed):
        x, y = super().rows(number, seed).tensors
        return torch.utils.data.TensorDataset(x, 0 * y)


def test_where_all_traces_are_0_the_weights_are_numbers_of_examples(tmp_path):
    seen = []
    trainer = small_trainer(tmp_path, taps=TAPS, max_rounds=1)
    trainer.fit(OneClass(), clients(Zeros(8), 2, 6), [FedAS(), Weights(seen)])
    (one, _), (other, _) = seen
    assert other / one == pytest.approx(3) and 0 < other < 1e-10
