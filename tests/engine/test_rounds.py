"""What a round does when clients fail, train nothing or compute nan: it says so, and nothing of theirs is left."""

import math
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.errors import refused, warned
from helpers.quadratics import Curved, curved_data
from helpers.runs import assert_same_bits, small_data, small_model, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from helpers.workers import together
from torch import nn

from fl_lightning import Method, Weighted
from fl_lightning.callbacks import Callback
from fl_lightning.core.seeding import numpy_rng
from fl_lightning.core.state import checksums
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.engine import rounds
from fl_lightning.engine.cohort_training import VISIT_PHASES
from fl_lightning.methods import SCAFFOLD, FedDyn, FedNova
from fl_lightning.models import MLP, ImageClassifier, Projector
from fl_lightning.utilities.errors import ClientError

# ---------------------------------------------------------------- a visit that fails leaves nothing behind
CLIENTS = 8


# where a visit may fail: before the methods remember anything of it, and after
EARLY = [
    "on_client_start",
    "penalty",
    "nan",
    "on_before_optimizer_step",
    "on_after_clipping",
    "on_after_optimizer_step",
    "client_weight",
]
LATE = ["on_client_end", "payload", "transform_client_update", "infinite", "shape", "callback"]


def strikes(places, round_, k):
    """The place at which this visit fails, in a quarter of all visits, though not in all of a round; else None."""
    rng = numpy_rng(24, "strikes", round_, k)
    return rng.choice(places) if rng.random() < 0.25 else None


class Fails(Method):
    """Fails at one of these places in some visits."""

    def __init__(self, places):
        self.places, self.round = places, 0

    def on_round_start(self, server):
        self.round = server.round

    def due(self, place, client):
        return strikes(self.places, self.round, client.info.id) == place

    def strike(self, place, client):
        if self.due(place, client):
            raise RuntimeError(f"struck at {place}")

    def on_client_start(self, client):
        self.strike("on_client_start", client)

    def penalty(self, client, step):
        self.strike("penalty", client)
        return torch.tensor(math.nan, requires_grad=True) if self.due("nan", client) else None

    def on_before_optimizer_step(self, client, optimizer):
        self.strike("on_before_optimizer_step", client)

    def on_after_clipping(self, client, optimizer):
        self.strike("on_after_clipping", client)

    def on_after_optimizer_step(self, client, optimizer):
        self.strike("on_after_optimizer_step", client)

    def on_client_end(self, client):
        self.strike("on_client_end", client)
        if self.due("payload", client):
            return {"sent": 1.0}
        # the first client of a round decides on the shape
        return {"sent": Weighted.of(torch.zeros(2 + self.due("shape", client)))}

    def transform_client_update(self, client, delta):
        self.strike("transform_client_update", client)
        return {n: v * math.inf for n, v in delta.items()} if self.due("infinite", client) else delta

    def client_weight(self, client):
        if client.num_steps:
            self.strike("client_weight", client)


class CallbackFails(Callback):
    def __init__(self, places):
        self.places = places

    def on_client_end(self, trainer, client):
        if strikes(self.places, trainer.server.round, client.info.id) == "callback":
            raise TypeError("struck in a callback")


def play(tmp_path, methods, **kwargs):
    a, b = [1.0 + k % 3 for k in range(CLIENTS)], [float(k) for k in range(CLIENTS)]
    given = {"max_rounds": 25, "cohort_size": 3, "local_steps": 1, "checkpoint_every_n_rounds": 50}
    trainer = small_trainer(tmp_path, enable_progress_bar=False, **{**given, **kwargs})
    trainer.fit(Curved(lr=0.05), curved_data(a, b, [1 + k % 2 for k in range(CLIENTS)]), methods)
    return trainer


def apart(trainer, scaffold, feddyn):
    """How far the mean of what the clients keep is from what the server keeps, relative to the clients' values."""
    memories = trainer.client.memories()
    found = []
    for name, key, whole in (("scaffold", "variate", scaffold.global_variate), ("feddyn", "g", feddyn.mean_g)):
        kept = torch.stack([memories[k][name][key]["y"].double() for k in memories if name in memories[k]])
        found.append(float((kept.sum(0) / CLIENTS - whole["y"]).abs() / kept.abs().mean()))
    return max(found)


@pytest.mark.parametrize("places", [*([late] for late in LATE), [*EARLY, *LATE]], ids=lambda places: places[-1])
def test_what_clients_remember_adds_up_to_the_server_wherever_visits_fail(tmp_path, places):
    scaffold, feddyn = SCAFFOLD(), FedDyn(alpha=0.1)
    how = {"on_client_error": "skip", "callbacks": [CallbackFails(places)]}
    trainer = play(tmp_path, [scaffold, feddyn, Fails(places)], **how)
    assert sum(row.get("clients/failed", 0) for row in trainer.history) > 5
    assert apart(trainer, scaffold, feddyn) < 1e-6


def test_what_clients_remember_adds_up_to_the_server_where_they_drop_out(tmp_path):
    scaffold, feddyn = SCAFFOLD(), FedDyn(alpha=0.1)
    trainer = play(tmp_path, [scaffold, feddyn], systems=SystemsHeterogeneity(dropout_before=0.1, dropout_after=0.2))
    assert sum(row["clients/dropped"] for row in trainer.history) > 5
    assert apart(trainer, scaffold, feddyn) < 1e-6


class FailsAlways(Fails):
    def due(self, place, client):
        return client.info.id == 2 and place in self.places


class Absent(SystemsHeterogeneity):
    def outcomes(self, *args):
        return {k: one for k, one in super().outcomes(*args).items() if k != 2}


@pytest.mark.parametrize("place", ["on_client_end", "transform_client_update"])
def test_a_run_in_which_a_client_always_fails_is_that_of_a_cohort_without_it(tmp_path, place):
    how = {"max_rounds": 4, "cohort_size": None}
    with warned("client.info.id"):  # which a step of clients side by side cannot read
        failed = play(tmp_path, [SCAFFOLD(), FailsAlways([place])], on_client_error="skip", min_clients=7, **how)
    without = play(tmp_path, [SCAFFOLD(), Fails(["nowhere"])], systems=Absent(), **how)
    assert_same_bits(failed.server.state, without.server.state)
    assert sorted(failed.client.memories()) == sorted(without.client.memories()) == [0, 1, 3, 4, 5, 6, 7]
    records = sorted(path.name for path in (failed.run_dir / "failures").iterdir())
    assert records == [f"round-{round_}-client-2.pt" for round_ in range(4)]


def test_a_callback_that_fails_ends_a_run_that_skips_nothing(tmp_path):
    with pytest.raises(TypeError, match="struck in a callback"):
        play(tmp_path, [], callbacks=[CallbackFails(["callback"])])


class Exhausts(Method):
    """A client for which there is not enough memory."""

    def __init__(self, error):
        self.error = error

    def on_client_end(self, client):
        raise self.error


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_lack_of_memory_ends_a_run_that_skips_clients(tmp_path, error):
    with refused("client 0", "round 0", kind=ClientError) as caught:
        play(tmp_path, [Exhausts(error)], on_client_error="skip", cohort_size=None)
    assert caught.value.__cause__ is error


def test_what_is_written_in_place_is_undone_as_well(tmp_path):
    class Counts(Method):
        memory_keys: ClassVar = {"n": "visits"}

        def on_client_end(self, client):
            memory = client.memory(self)
            if "n" not in memory:
                memory["n"] = torch.zeros(1)
            memory["n"] += 1
            return {}

    trainer = play(tmp_path, [Counts(), Fails(["on_client_end"])], on_client_error="skip", max_rounds=10)
    memories = trainer.client.memories()
    counted = sum(memories[k]["counts"]["n"].item() for k in memories)
    assert counted == sum(row["clients"] for row in trainer.history) < 30


@pytest.mark.parametrize("when", ["dropout_before", "dropout_after"])
def test_a_round_in_which_all_drop_out_leaves_everything_as_it_is_and_warns(tmp_path, when):
    for method in (SCAFFOLD(), FedDyn(), FedNova()):
        with warned("round 1", "global model"):
            trainer = play(tmp_path, [method], systems=SystemsHeterogeneity(**{when: 1.0}), max_rounds=2)
        assert trainer.server.state["y"].item() == 0.0
        assert trainer.history[0]["clients"] == 0
        assert trainer.history[0]["clients/dropped"] == 3
    assert len(trainer.client.memories()) == 0


def test_min_clients_above_the_cohort_is_refused(tmp_path):
    with refused("trainer.min_clients=5"):
        play(tmp_path, [], min_clients=5)


# ---------------------------------------------------------------- what a round does
class Evaluates(Curved):
    def test_step(self, batch, batch_idx):
        self.log("y", self.y[0])


class Notes(Method):
    def on_round_end(self, server, payload):
        server.metrics["noted"] = server.round


def test_the_values_of_a_round_are_those_of_the_formulas(run, tmp_path):
    """f_k = a_k / 2 (y - b_k)^2: one step from 0 moves client k by ``lr a_k b_k``, and the mean weighs by examples."""
    data = curved_data([1.0, 4.0], [1.0, -1.0], sizes=[1, 3])
    data.datamodule.test_dataloader = data.datamodule.train_dataloader
    how = {"max_rounds": 5, "local_steps": 1, "eval_every_n_rounds": 2}
    _, trainer = run([Notes()], model=Evaluates(lr=0.05), data=data, **how)
    row = trainer.history[0]
    assert row["drift/global"] == pytest.approx(0.1375)  # (0.05 - 3 * 0.2) / 4
    assert row["drift/client"] == pytest.approx(0.1625)  # (0.05 + 3 * 0.2) / 4
    assert (row["clients"], row["bytes/up"], row["bytes/down"]) == (2, 8, 8)
    assert row["lr"] == 0.05
    assert ["test/y" in row for row in trainer.history] == [False, True, False, True, True]
    y = 0.0
    for row in trainer.history:
        y += 0.05 * ((1 - y) + 3 * 4 * (-1 - y)) / 4
        assert row.get("test/y", y) == pytest.approx(y, rel=1e-5)
        assert row["noted"] == row["round"]
        evaluated = ["evaluate"] if "test/y" in row else []
        assert all(row[f"time/{phase}"] >= 0 for phase in (*VISIT_PHASES, *evaluated, "server", "log", "round"))
        assert 0 < row["time/wait"] < sum(row[f"time/{phase}"] for phase in VISIT_PHASES) <= row["time/train"]


class Moves(Curved):
    """Each step adds 1 to a frozen parameter and to a buffer."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.frozen.data += 1
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.log("steps", self.steps)


def moved(run, **kwargs):
    data = curved_data([1.0, 2.0], [1.0, -1.0], sizes=[1, 3], batch_size=1)
    data.datamodule.test_dataloader = data.datamodule.train_dataloader
    return run(model=Moves(), data=data, max_rounds=2, **kwargs)


def test_a_frozen_parameter_that_clients_change_moves_by_their_mean_change_and_is_sent_again(run):
    state, trainer = moved(run)
    assert state["frozen"].tolist() == pytest.approx([5.0, 5.0])  # (1 + 3 * 3) / 4 in each round
    assert [row["bytes/down"] for row in trainer.history] == [2 * 8, 2 * (8 + 8)]


def test_buffers_that_stay_with_clients_are_evaluated_there_and_their_metrics_averaged(run):
    with warned("own models"):
        _, trainer = moved(run, buffers="local")
    assert [row["test/steps"] for row in trainer.history] == [2.0, 4.0]  # (1 + 3) / 2 in each round


class Normalizes(TinyModule):
    def build(self):
        self.body.append(nn.BatchNorm1d(6))


def test_recalibration_sends_the_model_again_and_returns_a_count_and_two_sums_of_each_channel(run):
    state, trainer = run(model=Normalizes(), data=tiny(), buffers="recalibrate_once", max_rounds=1)
    size = sum(value.nbytes for value in state.values())
    assert trainer.metrics["bytes/up"] == 2 * (size + 8 * (2 * 6 + 1))
    assert trainer.metrics["bytes/down"] == 2 * 2 * size


# ---------------------------------------------------------------- training that trains nothing
def classifier(normalises=True, **kwargs):
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, [16]), Projector(8) if normalises else None, **kwargs)


def test_batches_of_one_are_refused_where_the_network_normalises_over_a_batch(run, tmp_path):
    with refused("data.batch_size=1", "ImageClassifier"):
        run(data=small_data(batch_size=1), model=classifier())
    assert not list(tmp_path.iterdir())
    run(data=small_data(batch_size=1, train_size=40), model=classifier(normalises=False), max_rounds=1)


def divided(*ends):
    """Digits dealt out at these places."""
    data = small_data(num_clients=len(ends) + 1, train_size=100)
    data.partitioner = lambda labels, k, rng: np.split(np.arange(100), ends)
    return data


def test_a_client_of_one_example_is_refused_and_a_last_batch_of_one_is_counted(run):
    with refused("examples='1'", "ImageClassifier", "min_size"):
        run(data=divided(50, 51), model=classifier())
    # 33 of 32 a batch, and 65
    _, trainer = run(data=divided(33, 35), model=classifier(), max_rounds=1, local_epochs=2)
    assert trainer.metrics["batches/skipped"] == 4
    _, trainer = run(data=divided(50), model=classifier(), max_rounds=1)
    assert "batches/skipped" not in trainer.metrics


class SkipsAll(Curved):
    def training_step(self, batch, batch_idx):
        return None


class EndsEpochs(Curved):
    def on_train_batch_start(self, batch, batch_idx):
        return -1


@pytest.mark.parametrize(("make", "why"), [(SkipsAll, "SkipsAll.training_step"), (EndsEpochs, "EndsEpochs")])
def test_a_round_without_a_step_fails_and_names_why(run, make, why):
    with refused("round 0", why, kind=ClientError):
        run(model=make(), data=curved_data([1.0, 2.0], [0.0, 1.0]))


def test_a_run_in_which_no_client_has_a_batch_is_refused(run, tmp_path):
    with warned("data"), refused("batch_size"):
        run(data=small_data(batch_size=300, drop_last=True))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variate", ["displacement", "gradients"])
def test_scaffold_at_a_rate_of_0_changes_nothing(run, variate):
    """Its displacement divides by the sum of the rates."""
    method = SCAFFOLD(variate=variate)
    rates = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda round_: float(round_ != 1))
    kwargs = {"data": curved_data([1.0, 2.0], [3.0, 1.0]), "local_steps": 2}
    one, _ = run([SCAFFOLD(variate=variate)], model=Curved(), max_rounds=1, **kwargs)
    state, _ = run([method], model=Curved(), max_rounds=2, client_lr_scheduler=rates, **kwargs)
    assert_same_bits(state, one)
    assert math.isfinite(method.global_variate["y"].item())


# ---------------------------------------------------------------- nan is never success
class Evaluated(TinyModule):
    def __init__(self, value=0.5, tag="loss", bad=None):
        self.value, self.tag, self.bad = value, tag, bad
        super().__init__()

    def build(self):
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.fixed = nn.Parameter(torch.zeros(2), requires_grad=False)

    def training_step(self, batch, batch_idx):
        if self.bad:
            getattr(self, self.bad).data[0] = math.nan
        return self.loss(batch)

    def test_step(self, batch, batch_idx):
        self.log(self.tag, self.value)


def tiny():
    return clients(TinyData(test=(4,)), 8, 6)


class Ruins(torch.optim.SGD):
    """Writes a number into what it steps."""

    def __init__(self, params, number):
        super().__init__(params, lr=1.0)
        self.number = number

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.fill_(self.number)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_server_optimizer_that_makes_nan_or_infinity_is_named(run, number):
    with refused("round 0", "trainer.server_optimizer", "Ruins", kind=ClientError):
        run(server_optimizer=partial(Ruins, number=number), model=Evaluated(), data=tiny())


def test_a_model_that_the_server_has_ruined_is_not_a_success(run):
    with refused("round 0", "test/loss", kind=ClientError):
        run(server_optimizer=partial(Ruins, number=1e30), max_rounds=1)


@pytest.mark.parametrize(("tag", "value"), [("loss", math.nan), ("val_loss", math.inf), ("loss_epoch", math.nan)])
def test_an_evaluation_whose_loss_is_no_number_fails(run, tmp_path, tag, value):
    with refused("round 0", f"test/{tag}", str(value), kind=ClientError):
        run(model=Evaluated(value, tag), data=tiny(), max_rounds=1)
    with refused(f"test/{tag}", str(value), kind=ClientError):
        small_trainer(tmp_path).test(Evaluated(value, tag), tiny())


def test_another_metric_that_is_no_number_is_named_once(run):
    with warned("round 0", "test/accuracy_class_7") as given:
        _, trainer = run(model=Evaluated(math.nan, "accuracy_class_7"), data=tiny(), max_rounds=3)
    assert sum("accuracy_class_7" in str(one.message) for one in given) == 1
    assert len(trainer.history) == 3


@pytest.mark.parametrize(("entry", "kind"), [("seen", "buffer"), ("fixed", "frozen parameter")])
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_client_whose_buffers_become_nan_is_named(run, entry, kind, buffers):
    with refused("client 0", "round 0", kind, entry, kind=ClientError):
        run(model=Evaluated(bad=entry), data=tiny(), buffers=buffers)


def test_a_mask_of_infinities_is_no_failure(run):
    state, _ = run(model=Evaluated(), data=tiny())
    assert state["mask"][0, 1].item() == -math.inf


# ---------------------------------------------------------------- workers that disagree
@pytest.mark.parametrize("ranks", [(0, 1), (1, 0, 2)])
def test_workers_that_disagree_are_named(ranks):
    def disagree(workers):
        state = {"a": torch.zeros(3), "weight": torch.arange(4.0)}
        if workers.rank == 1:
            state["weight"].view(torch.int32)[2] ^= 1 << 3  # a flipped bit
        return rounds.agree_to_stop(stand_in(workers, state))

    with refused("round 4", "weight", *(f"{rank} (" for rank in ranks), kind=ClientError):
        together(len(ranks), disagree)


def test_workers_that_agree_stop_together():
    state = {"a": torch.zeros(3), "n": torch.tensor(7), "half": torch.ones(2, dtype=torch.bfloat16)}
    told = together(2, lambda workers: rounds.agree_to_stop(stand_in(workers, state, should_stop=workers.rank == 1)))
    assert told == [True, True]


def stand_in(workers, state, should_stop=False):
    server = SimpleNamespace(state=state, round=4)
    return SimpleNamespace(workers=workers, server=server, trainer=SimpleNamespace(should_stop=should_stop))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_bit_of_a_state_counts_in_its_checksum(kind):
    one = torch.ones(5, 4).to(kind)
    image = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    other = one.clone()
    other.view(torch.uint8)[3, 1] ^= 1
    sums = checksums({"a": one, "b": other, "image": image, "scalar": torch.tensor(2.0)})
    assert sums["a"] != sums["b"]
    assert sums == checksums(
        {"a": one.clone(), "b": other.clone(), "image": image.contiguous(), "scalar": torch.tensor(2.0)}
    )


# ---------------------------------------------------------------- weights
class Weights(Method):
    def __init__(self, *weights):
        self.weights = weights

    def client_weight(self, client):
        return self.weights[client.info.id]


def weighted(tmp_path, *weights):
    trainer = small_trainer(tmp_path, max_rounds=1)
    trainer.fit(TinyModule(), clients(TinyData(), 5, 5, 4), Weights(*weights))
    return trainer


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, 1e-30, 1e300])
def test_a_weight_that_the_sums_would_round_is_refused_with_its_client_and_value(tmp_path, weight):
    with refused("client 1", "round 0", f"weight is {weight}", kind=ClientError) as caught:
        weighted(tmp_path, 1.0, weight, 1.0)
    assert caught.value.record.name == "round-0-client-1.pt"


def test_a_common_scale_of_the_weights_changes_no_bit(tmp_path):
    states = []
    for scale in (1.0, 2.0**-38, 2.0**90):
        torch.manual_seed(0)
        states.append(weighted(tmp_path, 8 * scale, 0.0, 3 * scale).server.state)
    assert_same_bits(states[0], states[1])
    assert_same_bits(states[0], states[2])


def test_weights_of_0_alone_leave_the_global_model_with_a_warning(tmp_path):
    with warned("round 0", "weight 0"):
        trainer = weighted(tmp_path, 0.0, 0.0, 0.0)
    assert trainer.metrics["drift/global"] == 0


def test_random_numbers_differ_between_rounds_and_clients(tmp_path):
    drawn = []

    class Draws(Method):
        def on_client_start(self, client):
            drawn.append(float(torch.rand(())))

    small_trainer(tmp_path, max_rounds=2).fit(small_model(), small_data(), [Draws()])
    assert len(set(drawn)) == len(drawn) >= 8
