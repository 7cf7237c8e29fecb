"""What a method declares, and how a list of methods composes."""

from types import SimpleNamespace

import pytest
import torch

from fl_lightning import Method, Server, ServerValue, Weighted
from fl_lightning.method import MethodList


class Counts(Method):
    rounds = ServerValue(lambda server: 0)
    mean = ServerValue(Server.zeros)

    def on_round_end(self, server, payload):
        self.rounds += 1
        self.mean["w"] += payload["w"].mean()


class More(Counts):
    extra: ServerValue[str | None] = ServerValue(lambda server: None)


def server():
    return Server({"w": torch.ones(2)}, ["w"])


def test_a_server_value_begins_anew_in_every_fit_and_needs_no_other_line():
    method, methods = Counts(), MethodList([Counts()])
    with pytest.raises(AttributeError, match=r"Counts.rounds has no value before fit"):
        _ = method.rounds
    for _ in range(2):
        methods.on_fit_start(server())
        assert methods.methods[0].rounds == 0
        methods.on_round_end(server(), {"counts": {"w": Weighted.of(torch.ones(2))}})
        assert methods.methods[0].rounds == 1


def test_a_checkpoint_holds_every_server_value_also_of_a_base_class_by_copy():
    method = More()
    method.reset(server())
    saved = method.state_dict()
    assert saved.keys() == {"rounds", "mean", "extra"}
    method.on_round_end(server(), {"w": Weighted.of(torch.ones(2))})
    assert saved["mean"]["w"].tolist() == [0, 0]
    again = More()
    again.load_state_dict(method.state_dict())
    assert again.rounds == 1
    assert again.mean["w"].tolist() == [1, 1]
    assert Counts().state_dict.__func__ is Method.state_dict


def test_two_objects_of_a_class_have_values_of_their_own():
    first, second = Counts(), Counts()
    for method in (first, second):
        method.reset(server())
    first.rounds = 5
    assert second.rounds == 0


class Adds(Method):
    def __init__(self, name, value):
        self._name, self.value = name, value

    @property
    def name(self):
        return self._name

    @property
    def proximal(self):
        return self.value

    def transform_update(self, server, delta, payload):
        return {name: 10 * old + self.value + payload.get("shift", 0) for name, old in delta.items()}

    def on_client_end(self, client):
        return {"shift": self.value} if self.value > 1 else None


def test_transforms_compose_in_list_order_and_each_method_sees_its_own_payload():
    methods = MethodList([Adds("a", 1), Adds("b", 2)])
    assert methods.on_client_end(SimpleNamespace()) == {"a": {}, "b": {"shift": 2}}
    assert methods.transform_update(server(), {"w": 3}, {"b": {"shift": 100}}) == {"w": 10 * 31 + 2 + 100}
    assert methods.proximal == 3
    assert MethodList([]).proximal == 0


def test_fednova_counts_the_coefficient_of_a_users_own_proximal_method(run):
    """It asks the list, so that it knows no other method by its class."""
    from helpers.runs import assert_same_bits, differs, plain_sgd_model

    from fl_lightning.methods import FedNova, FedProx

    class Mine(FedProx):
        pass

    class Unknown(FedProx):
        proximal = 0.0

    given = {"max_rounds": 2, "local_epochs": 2}
    states = [run([FedNova(), kind(0.5)], model=plain_sgd_model(), **given)[0] for kind in (FedProx, Mine, Unknown)]
    assert_same_bits(states[0], states[1])
    assert differs(states[0], states[2])
