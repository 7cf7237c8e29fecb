"""What a method declares, and how a list of methods composes."""

from functools import partial
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.errors import assert_names, refused, warned
from helpers.runs import assert_same_bits, differs, history, plain_sgd_model, small_data
from torch.optim import SGD

from fl_lightning import Method, Server, ServerValue, Weighted, methods
from fl_lightning.core.method import MethodList
from fl_lightning.methods import (
    IFCA,
    SCAFFOLD,
    CenteredClipping,
    DeCov,
    DPFedAvg,
    FedAMP,
    FedDyn,
    FedExP,
    FedNova,
    FedProto,
    FedProx,
    LogitAdjustment,
    StructuredDeCov,
)
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.utilities.errors import ClientError, UsageError


@pytest.fixture
def run(run):
    """Trains on fewer digits."""
    given = {"data": small_data(train_size=120, test_size=50), "checkpoint_every_n_rounds": 3}
    return lambda methods, **options: run(methods, **given, **options)


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


# ---------------------------------------------------------------- what goes down to the clients
class Drifts(Method):
    """Sends a number up, and a number down."""

    mean = ServerValue(lambda server: 0.0)

    def on_client_end(self, client):
        return {"drift": Weighted.of(client.drift - self.mean)}


P, CLASSES, WIDTH, CLIENTS = 64 * 16 + 16 + 16 * 10 + 10, 10, 16, 4
# of a method, the numbers that a round sends down to a client and up from it
NUMBERS = {
    "FedAvg": ([], P, P),
    "SCAFFOLD": ([SCAFFOLD()], 2 * P, 2 * P),
    "FedDyn": ([FedDyn()], P, P + 1),
    "FedDyn, all": ([FedDyn(reported="all")], 2 * P, 2 * P + 1),
    "FedExP": ([FedExP()], P, P + 1),
    "LogitAdjustment": ([LogitAdjustment(when="post_hoc")], P, P),
    "DPFedAvg": ([DPFedAvg(noise=0.0)], P, P + 1),
    # and whether each class has a prototype, in a byte
    "FedProto": ([FedProto()], CLASSES * WIDTH + CLASSES / 4, CLASSES * WIDTH),
    "CenteredClipping": ([CenteredClipping()], P, P),
    "FedAMP": ([FedAMP()], P, P),
    # the second model, and the choice
    "IFCA": ([IFCA(2)], 2 * P, P + 1),
    "a number": ([Drifts()], P + 1, P + 1),
}


def plain_model():
    return ImageClassifier(MLP(64, [WIDTH]), optimizer=partial(SGD, lr=0.1))


@pytest.mark.parametrize("name", NUMBERS)
def test_the_bytes_of_a_round_are_those_of_the_model_and_of_the_values_that_travel(run, name):
    listed, down, up = NUMBERS[name]
    for precision, size in (("32-true", 4), ("64-true", 8)):
        _, trainer = run(listed, model=plain_model(), max_rounds=2, precision=precision)
        assert trainer.metrics["bytes/up"] == CLIENTS * size * up
        flags = name == "FedProto" and (size - 4) / 4 * CLASSES  # which have a byte in any precision
        assert trainer.metrics["bytes/down"] == CLIENTS * (size * down - flags)


def test_a_client_is_sent_no_prototypes_before_there_are_some(run):
    _, trainer = run([FedProto()], model=plain_model(), max_rounds=1)
    assert trainer.metrics["bytes/down"] == 0


DECLARED = [
    (kind, name)
    for kind in vars(methods).values()
    if isinstance(kind, type) and issubclass(kind, Method)
    for name, value in vars(kind).items()
    if isinstance(value, ServerValue)
]


@pytest.mark.parametrize(("kind", "value"), DECLARED, ids=lambda part: getattr(part, "__name__", part))
def test_exactly_those_values_travel_that_a_client_hook_reads(run, monkeypatch, kind, value):
    runs = [listed for listed, *_ in NUMBERS.values() if kind in map(type, listed)]
    travels = vars(kind)[value].travels
    monkeypatch.setattr(vars(kind)[value], "travels", False)
    reads = []
    for listed in runs:
        try:
            run(listed, model=plain_model(), max_rounds=2)
        except UsageError as error:
            assert_names(str(error), f"method={kind.__name__}", value, "travels=True")
            reads.append(listed)
    assert runs and bool(reads) == travels


def test_a_value_that_stays_on_the_server_is_for_its_hooks_alone(tmp_path, run):
    class Reads(Method):
        rounds = ServerValue(lambda server: 0, travels=False)

        def on_round_start(self, server):
            self.rounds += 1

    class Peeks(Reads):
        def penalty(self, client, step):
            return None if hasattr(self, "rounds") else step.taps["logits"].sum()

    method = Reads()
    run([method])
    assert method.rounds == 2
    with refused("method=Peeks", "penalty", "rounds", "travels=True"):
        run([Peeks()])
    assert not list(tmp_path.rglob("metrics.csv"))[1:]  # before round 0


class Adds(Method):
    def __init__(self, name, value):
        self._name, self.value = name, value

    @property
    def name(self):
        return self._name

    @property
    def proximal(self):
        return self.value

    def on_after_clipping(self, client, optimizer):
        optimizer.append(self.name)

    def transform_client_update(self, client, delta):
        return {name: 10 * old + self.value for name, old in delta.items()}

    def transform_update(self, server, delta, payload):
        return {name: 10 * old + self.value + payload.get("shift", 0) for name, old in delta.items()}

    def on_client_end(self, client):
        return {"shift": Weighted.of(self.value)} if self.value > 1 else None


def test_a_list_passes_hooks_and_transforms_on_in_order_and_each_method_sees_its_own_payload():
    methods, steps = MethodList([Adds("a", 1), Adds("b", 2)]), []
    methods.call("on_after_clipping", CLIENT, steps)
    assert steps == ["a", "b"]
    assert methods.transform_client_update(CLIENT, {"w": torch.tensor(3)}) == {"w": 10 * 31 + 2}
    sent = methods.on_client_end(CLIENT)
    assert sent["a"] == {} and {name: float(value.mean()) for name, value in sent["b"].items()} == {"shift": 2}
    assert methods.transform_update(server(), {"w": torch.tensor(3)}, {"b": {"shift": 100}}) == {"w": 10 * 31 + 2 + 100}
    assert methods.proximal == 3
    assert MethodList([]).proximal == 0


def test_fednova_counts_the_coefficient_of_a_users_own_proximal_method(run):
    """It asks the list, so that it knows no other method by its class."""

    kinds = [FedProx, type("Mine", (FedProx,), {}), type("Unknown", (FedProx,), {"proximal": 0.0})]
    states = [run([FedNova(), kind(0.5)], model=plain_sgd_model())[0] for kind in kinds]
    assert_same_bits(states[0], states[1])
    assert differs(states[0], states[2])


def test_a_subclass_keeps_its_parents_name_unless_it_says_otherwise():
    class Late(FedProx):
        def __init__(self):
            super().__init__()
            self.name = "late"

    mine, named = type("Mine", (FedProx,), {}), type("Named", (FedProx,), {"name": "mine"})
    kinds = (FedProx, mine, type("Younger", (mine,), {}), named, Late, More, DeCov, StructuredDeCov)
    names = ["fedprox", "fedprox", "fedprox", "mine", "late", "counts", "decov", "structureddecov"]
    assert [kind().name for kind in kinds] == names
    MethodList([FedProx(), named()])
    with refused("fedprox", "name = 'myfedprox'"):
        MethodList([FedProx(), mine()])


def test_a_subclass_logs_sends_and_remembers_as_its_parent(run):
    kind = SCAFFOLD
    runs = [run([one()], model=plain_sgd_model())[1] for one in (kind, type("Mine", (kind,), {}))]
    assert history(runs[0]) == history(runs[1])
    assert {name for trainer in runs for name in trainer.client.memories().get(0, {})} <= {kind.name}


# ---------------------------------------------------------------- what hooks return
def returning(hook, value):
    """A method whose ``hook`` returns ``value``."""
    return type("Mine", (Method,), {hook: lambda self, *args: value})()


VISIT = SimpleNamespace(written=lambda: None)
CLIENT = SimpleNamespace(visit=VISIT, kept=["w"], live={"w": torch.ones(2)}, trainable=["w"])
STATE, GRAPH = {"w": torch.ones(2)}, torch.ones((), requires_grad=True)
# how the list calls each hook, and what its result is then
CALLS = {
    "penalty": lambda methods: methods.penalties(CLIENT, None),
    "transform_logits": lambda methods: methods.transform_logits(CLIENT, torch.ones(4, 3)),
    "on_client_end": lambda methods: methods.on_client_end(CLIENT),
    "transform_client_update": lambda methods: methods.transform_client_update(CLIENT, STATE),
    "transform_update": lambda methods: methods.transform_update(server(), STATE, {}),
    "evaluated_state": lambda methods: methods.evaluated_state(server()),
    "client_weight": lambda methods: methods.client_weight(CLIENT),
    "exchanges": lambda methods: methods.exchanges("w"),
}
STATES = [None, [torch.ones(2)], {}, {"w": torch.ones(3)}, {"w": 1.0}, {"w": torch.ones(2), "v": torch.ones(2)}]
WRONG = {
    "penalty": [0.5, 1, True, "0.5", np.float32(0.5), torch.ones(3), torch.ones(0), 1j * GRAPH, torch.tensor(1)],
    "transform_logits": [None, torch.ones(4), torch.ones(4, 2), [[1.0] * 3] * 4],
    "on_client_end": [
        *(0, "norm", [], (1, 2), Weighted.of(1.0)),
        *({"norm": 0.5}, {"norm": GRAPH}, {1: Weighted.of(1.0)}, {"deep": {"norm": 0.5}}, {"n": Weighted(0.5, 1.0)}),
    ],
    "transform_client_update": STATES,
    "transform_update": STATES,
    "evaluated_state": STATES,
    "client_weight": [torch.tensor(1.0), "1", True, [1.0], 1j],
    "exchanges": [None, 1, "yes"],
}
RIGHT = {
    "penalty": [None, GRAPH * 2, GRAPH.reshape(1, 1), GRAPH.bfloat16()],
    "transform_logits": [torch.ones(4, 3), torch.ones(4, 3, dtype=torch.float64)],
    "on_client_end": [None, {}, {"norm": Weighted.of(1.0)}, {"deep": {"norm": Weighted.of(1.0)}}],
    "transform_client_update": [{"w": torch.zeros(2)}, MappingProxyType({"w": torch.zeros(2).double()})],
    "transform_update": [{"w": torch.zeros(2)}],
    "evaluated_state": [{"w": torch.zeros(2)}],
    "client_weight": [None, 0, 2, 1.5, np.float32(0.5), np.int64(3)],
    "exchanges": [True, False],
}


@pytest.mark.parametrize("hook", WRONG)
def test_what_a_hook_must_not_return_is_refused_by_the_names_of_method_and_hook(hook):
    for value in WRONG[hook]:
        with refused("method=Mine", hook) as caught:
            CALLS[hook](MethodList([returning(hook, value)]))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 290


@pytest.mark.parametrize("hook", RIGHT)
def test_what_a_hook_may_return_is_taken(hook):
    for value in RIGHT[hook]:
        CALLS[hook](MethodList([returning(hook, value)]))


def test_a_penalty_of_one_element_is_a_scalar():
    for shape in ((), (1,), (1, 1)):
        assert MethodList([returning("penalty", GRAPH.reshape(shape))]).penalties(CLIENT, None)[0]["mine"].shape == ()


def test_a_penalty_without_gradient_is_warned_of_once():
    methods = MethodList([returning("penalty", torch.tensor(0.5)), FedProx()])
    with warned("method=Mine") as caught:
        terms = [methods.penalties(CLIENT, None) for _ in range(3)]
    assert len(caught) == 1 and terms == 3 * [({"mine": torch.tensor(0.5)}, {})]


@pytest.mark.parametrize("taps", ["logits", None, {"logits"}, ("logits", 1)])
def test_requires_is_a_tuple_of_names(taps):
    with refused("method=Mine", "requires="):
        MethodList([type("Mine", (Method,), {"requires": taps})()])


def test_a_tap_that_no_method_requires_is_refused_by_name(run):
    class Mine(Method):
        def penalty(self, client, step):
            return step.taps["hidden"].mean()

    with refused("step.taps", "'hidden'", "requires"):
        run([Mine()])


def test_a_first_memory_that_is_no_dictionary_is_refused(run):
    class Mine(Method):
        def on_client_start(self, client):
            client.memory(self)

        def initial_memory(self, client):
            return None

    with refused("method=Mine", "initial_memory"):
        run([Mine()])


def test_a_weight_that_is_not_finite_names_client_round_and_method(run):
    class Mine(Method):
        def client_weight(self, client):
            return float("nan") if client.num_steps else 1.0

    with refused("client 0", "round 0", "Mine.client_weight", kind=ClientError):
        run([Mine()])
