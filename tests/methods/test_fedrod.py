"""FedRoD trains a generic head on the balanced softmax, and a personal head in addition."""

import pytest
import torch
from helpers.runs import assert_same_bits, differs, small_model
from helpers.softmax_regression import V, W, assert_printed, fit
from helpers.tiny import TinyData, TinyModule, clients
from torch.nn.functional import cross_entropy

from fl_lightning.callbacks import Callback, PersonalAccuracy
from fl_lightning.methods import FedRoD

GENERIC, PERSONAL = "head.weight", "fedrod.head.weight"


def without_own(state):
    return {name: value for name, value in state.items() if not name.startswith("fedrod.")}


def own(trainer, k=0):
    return trainer.client.memories().own_entries(k)


class Begins(FedRoD):
    """Its personal head begins at V."""

    def on_client_start(self, client):
        client.live[PERSONAL].data.copy_(V)


def test_the_worked_example(tmp_path):
    """One step on A; two more examples of label 0 make the counts (3, 0, 1) and are in no step."""
    trainer = fit(tmp_path, [Begins()], added=([[0, 0], [0, 0]], [0, 0]), sizes=[4], local_steps=1)
    assert_printed(trainer.server.state[GENERIC], 0.13350981, 0.16663218, 0, -0.1, 0.26649019, 0.03336782)
    assert_printed(own(trainer)[PERSONAL], 0.04304552, 0.09738084, 0.19112695, -0.01983010, -0.13417247, 0.32244926)
    # the log has single precision
    assert trainer.metrics["train/loss"] == pytest.approx(0.96646973, rel=1e-7)
    assert trainer.metrics["train/fedrod"] == pytest.approx(1.05157977, rel=1e-7)


def test_the_personal_head_has_no_effect_on_what_is_sent_and_without_counts_it_is_fedavg(run, fedavg):
    states = [without_own(run([FedRoD(head_init=head)])[0]) for head in ("copy", "zero")]
    assert_same_bits(*states)
    assert differs(states[0], fedavg["mlp"])
    assert_same_bits(without_own(run([FedRoD(gamma=0)])[0]), fedavg["mlp"])
    assert differs(without_own(run([FedRoD(gamma=0, joint=True)])[0]), fedavg["mlp"])


class Balanced(TinyData):
    """Each client has two examples of each class."""

    def __init__(self):
        super().__init__(train=12, batch_size=3)


def test_equal_counts_train_the_generic_model_of_fedavg(run):
    def state(*methods):
        torch.manual_seed(0)
        taps = {"logits": "head", "representation": "body"}
        return run(methods, data=clients(Balanced(), 6, 6), model=TinyModule(), taps=taps)[0]

    adjusted, plain = state(FedRoD()), state()
    for name, value in plain.items():
        torch.testing.assert_close(adjusted[name], value)


class Sees(Callback):
    """The generic and the personal model of each client, and its logits."""

    def __init__(self):
        self.logits = {}

    def on_last_round_end(self, trainer):
        for k in range(trainer.data.num_clients):
            for name, state in {"generic": None, "personal": trainer.personal_state(k)}.items():
                batches = trainer.representations(state, ("logits", "representation"))
                self.logits[k, name] = torch.cat([taps["logits"] for *_, taps in batches])
            z = torch.cat([taps["representation"] for *_, taps in trainer.representations(None, ("representation",))])
            entries = own(trainer, k)
            if entries:
                self.logits[k, "H"] = torch.nn.functional.linear(
                    z, entries["fedrod.head.weight"], entries["fedrod.head.bias"]
                )


@pytest.mark.parametrize("joint", [False, True])
def test_a_client_uses_both_heads_and_a_new_client_the_generic_one(run, joint):
    sees = Sees()
    _, trainer = run([FedRoD(joint=joint)], callbacks=[sees, PersonalAccuracy(fine_tune_steps=0)], cohort_size=1)
    trained = [k for k in range(4) if own(trainer, k)]
    assert 0 < len(trained) < 4
    for k in range(4):
        expected = sees.logits[k, "generic"] * (k not in trained or not joint) + sees.logits.get((k, "H"), 0)
        torch.testing.assert_close(sees.logits[k, "personal"], expected)
    assert "personal/accuracy" in trainer.metrics and "test/accuracy" in trainer.metrics


@pytest.mark.parametrize(("head_init", "factor"), [("copy", 2), ("zero", 1)])
def test_the_personal_head_begins_as_the_generic_one_that_the_first_visit_receives_or_at_zero(run, head_init, factor):
    seen = {}

    class Watch(Callback):
        def on_client_end(self, trainer, client):
            seen.setdefault(client.info.id, client.received["classifier.weight"].clone())

    _, trainer = run([Slow(head_init=head_init)], callbacks=[Watch()], max_rounds=3, cohort_size=1)
    first, *others = seen.values()
    assert any(not torch.equal(first, one) for one in others)
    for k, received in seen.items():
        torch.testing.assert_close(own(trainer, k)["fedrod.head.weight"], (factor - 1) * received)


class Slow(FedRoD):
    """Its personal heads do not train."""

    def on_before_optimizer_step(self, client, optimizer):
        for name in self.entries.values():
            client.live[name].grad = None


def test_a_class_that_a_client_lacks_gets_no_gradient_from_it(tmp_path):
    """Labels are 0 and 2: the row of class 1 keeps every bit, in the generic head alone."""
    trainer = fit(tmp_path, [FedRoD()], local_epochs=3)
    assert torch.equal(trainer.server.state[GENERIC][1], W[1])
    assert not torch.equal(own(trainer)[PERSONAL][1], W[1])


def test_the_personal_head_learns_the_clients_own_shares_of_the_classes(run):
    def loss(state, model, trainer, k):
        model.load_state_dict({name: state[name] for name in model.state_dict()})
        x, y = next(iter(trainer.data.train_dataloader(k)))
        return cross_entropy(model.eval()(x), y)

    sees = Personal()
    _, trainer = run([FedRoD()], callbacks=[sees], local_epochs=5)
    model = small_model()
    for k, state in sees.states.items():
        assert loss(state, model, trainer, k) < loss(trainer.server.state, model, trainer, k)


class Personal(Callback):
    def on_last_round_end(self, trainer):
        self.states = {k: trainer.personal_state(k) for k in range(4)}
