"""What a method declares, and how a list of methods composes."""

from types import SimpleNamespace

import pytest
import torch
from helpers.runs import assert_same_bits, differs, history, plain_sgd_model, small_model

from fl_lightning import Method, Server, ServerValue, Weighted, methods
from fl_lightning.errors import UsageError
from fl_lightning.method import MethodList
from fl_lightning.methods import MOON, SCAFFOLD, DeCov, FedNova, FedProx, StructuredDeCov


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

    class Mine(FedProx):
        pass

    class Unknown(FedProx):
        proximal = 0.0

    given = {"max_rounds": 2, "local_epochs": 2}
    states = [run([FedNova(), kind(0.5)], model=plain_sgd_model(), **given)[0] for kind in (FedProx, Mine, Unknown)]
    assert_same_bits(states[0], states[1])
    assert differs(states[0], states[2])


def test_a_subclass_keeps_its_parents_name_unless_it_says_otherwise():
    class Mine(FedProx):
        pass

    class Younger(Mine):
        pass

    class Named(FedProx):
        name = "mine"

    class Late(FedProx):
        def __init__(self):
            super().__init__()
            self.name = "late"

    class Both(Mine, MOON):
        pass

    class Noise:
        pass

    class Mixed(Noise, FedProx):
        pass

    kinds = (FedProx, Mine, Younger, Named, Late, Both, Mixed, More, DeCov, StructuredDeCov)
    names = [kind().name for kind in kinds]
    assert names == ["fedprox"] * 3 + ["mine", "late", "fedprox", "fedprox", "counts", "decov", "structureddecov"]
    MethodList([FedProx(), Named()])
    message = r"fedprox stands twice in the list; keep one of them, or give one .* another name: name = 'myfedprox'"
    with pytest.raises(UsageError, match=message):
        MethodList([FedProx(), Mine()])


@pytest.mark.parametrize("kind", [MOON, FedProx, SCAFFOLD])
def test_a_subclass_logs_sends_and_remembers_as_its_parent(run, kind):
    runs = [run([one()], model=plain_sgd_model())[1] for one in (kind, type("Mine", (kind,), {}))]
    assert history(runs[0]) == history(runs[1])
    assert {name for trainer in runs for name in trainer.client.memories().get(0, {})} <= {kind.name}


# house methods, with all that each may remember
HOUSE = [(getattr(methods, name), {}) for name in methods.__all__] + [(methods.FedDyn, {"reported": "all"})]


@pytest.mark.parametrize(("kind", "options"), HOUSE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_keys_of_a_clients_memory_are_those_that_the_method_declares(run, kind, options):
    cnn = kind is methods.FedCKA
    method = kind(**options)
    _, trainer = run([method], "cnn" if cnn else "mlp", model=None if cnn else plain_sgd_model())
    used = {key for memory in trainer.client.memories().values() for key in memory.get(method.name, {})}
    unused = {"latest"} if kind is methods.FedDyn and not options else set()
    assert used == set(kind.remembers) - unused
    assert all(isinstance(meaning, str) and meaning for meaning in kind.remembers.values())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_subclass_gives_each_client_a_first_pool(run, workers):
    """It is contrasted with in the first visit, and leaves the pool like any other model."""
    start = {name: value for name, value in small_model().state_dict().items() if value.is_floating_point()}
    pools = {k: {name: value + 0.01 * (k + 1) for name, value in start.items()} for k in range(4)}

    class Warm(MOON):
        def initial_memory(self, client):
            return {"pool": [pools[client.info.id]]}

        def on_client_start(self, client):
            visit = client.memory(self).get("visit", 0)
            super().on_client_start(client)
            oldest = client.references.models[self._names[-1]].state_dict()
            given = all(torch.equal(oldest[name], value) for name, value in pools[client.info.id].items())
            assert given == (visit < 2)
            client.memory(self)["visit"] = visit + 1

    _, trainer = run([Warm(pool_size=2)], devices=workers, max_rounds=3)
    assert trainer.history[0]["train/moon"] > 0


class FirstModel(Method):
    """Gives each client a first model of its own."""

    def __init__(self, *entries):
        self.entries = entries

    def initial_state(self, client):
        return {name: torch.full((10,), float(client.info.id)) for name in self.entries}


class OwnHead(FirstModel):
    name = "ownhead"

    def exchanges(self, key):
        return not key.startswith("classifier")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_method_gives_each_client_a_first_model(run, workers):
    class Spy(OwnHead):
        def on_client_start(self, client):
            visits = client.memory(self).get("visits", 0)
            bias = client.live["classifier.bias"]
            assert torch.equal(client.received["classifier.bias"], bias)
            assert torch.equal(bias, torch.full((10,), float(client.info.id))) == (visits == 0)
            assert torch.equal(client.live["classifier.weight"], plain_sgd_model().classifier.weight) == (visits == 0)
            client.memory(self)["visits"] = visits + 1

    _, trainer = run([Spy("classifier.bias")], model=plain_sgd_model(), max_rounds=3, devices=workers)
    assert all(memory["ownhead"]["visits"] == 3 for memory in trainer.client.memories().values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([OwnHead("encoder")], r"OwnHead.initial_state='encoder': no such entry stays with the clients"),
        ([OwnHead(), FirstModel("encoder.0.bias")], r"FirstModel.initial_state='encoder.0.bias': no such entry stays"),
        (
            [OwnHead("classifier.bias"), FirstModel("classifier.bias")],
            r"FirstModel.initial_state='classifier.bias': another method gives it too",
        ),
        ([OwnHead("classifier.weight")], r"initial_state: classifier.weight=\(10,\): give the shape \(10, 16\)"),
    ],
)
def test_a_first_model_that_does_not_fit_is_refused(run, given, message):
    with pytest.raises(UsageError, match=message):
        run(given)


def test_a_list_passes_the_hooks_on_in_order():
    calls = []

    class One(Method):
        def __init__(self, name):
            self.name = name

        def on_after_clipping(self, client, optimizer):
            calls.append((self.name, client, optimizer))

        def check_data(self, data):
            calls.append((self.name, data))

    given = MethodList([One("a"), One("b")])
    given.on_after_clipping("client", "optimizer")
    given.check_data("data")
    assert calls == [("a", "client", "optimizer"), ("b", "client", "optimizer"), ("a", "data"), ("b", "data")]


class OwnMOON(MOON):
    def initial_memory(self, client):
        return {"pool": [{name: value + client.info.id for name, value in client.received.items()}]}


@pytest.mark.parametrize(
    "given",
    [
        lambda: [OwnMOON(), FirstModel("classifier.bias"), OwnHead()],
        lambda: [SCAFFOLD(variate="gradients"), methods.FedRS(use_bias=False)],
    ],
    ids=["first models", "clipped gradients"],
)
def test_two_workers_give_the_same_bits(run, given):
    how = {"max_rounds": 3, "participation": 0.5, "gradient_clip_val": 0.5, "threads_per_worker": 1}
    runs = [run(given(), model=plain_sgd_model(), devices=workers, **how) for workers in (1, 2)]
    assert_same_bits(*(state for state, _ in runs))
    logged = [
        [{k: v for k, v in row.items() if k.startswith(("train/", "test/"))} for row in history(t)] for _, t in runs
    ]
    assert logged[0] == logged[1]
