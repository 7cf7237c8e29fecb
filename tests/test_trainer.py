"""The loop: users' own modules, logging, buffers, cohorts, failures, and the files of a run."""

import copy
import pickle
from functools import partial

import pytest
import torch
from helpers.errors import refused, warned
from helpers.quadratics import Quadratic, quadratic_data
from helpers.runs import assert_same_bits, differs, small_data, small_model, small_trainer
from helpers.theirs import TheirData, Theirs
from helpers.tiny import Sizes, TinyData, TinyModule, clients
from torch.utils.data import DataLoader, Subset

from fl_lightning import Method, Partitioned
from fl_lightning.callbacks import Callback, EarlyStopping
from fl_lightning.data import Dirichlet, FederatedDataModule
from fl_lightning.methods import SCAFFOLD, FedLC
from fl_lightning.utilities.errors import ClientError


# ---------------------------------------------------------------- users' own modules and data
def test_a_users_module_and_data_module_federate_unchanged(run):
    state, trainer = run(model=Theirs(), data=Partitioned(TheirData(), Dirichlet(0.5), 4), max_rounds=8)
    assert trainer.history[-1]["test/hits"] > 0.6  # a third is chance
    assert trainer.history[-1]["train_loss"] < trainer.history[0]["train_loss"]
    assert state["net.1.num_batches_tracked"].dtype == torch.int64


def test_after_fit_the_module_holds_the_global_model_and_is_as_it_came(run):
    model = Theirs()
    state, _ = run(model=model, data=Partitioned(TheirData(), num_clients=3))
    assert_same_bits(dict(model.state_dict()), state)
    assert "log" not in vars(model)
    assert model._fabric is None
    assert not model.net[-1]._forward_hooks


def test_a_refused_fit_leaves_the_module_as_it_came(run):
    model, fresh = small_model(), small_model()
    with refused("SCAFFOLD"):
        run([FedLC(), SCAFFOLD()], model=model)
    assert "log" not in vars(model)
    assert model._fabric is None
    assert not any(part._forward_hooks for part in model.modules())
    assert_same_bits(run(model=model)[0], run(model=fresh)[0])


def test_the_same_run_has_the_same_bits_and_another_seed_others(run, monkeypatch):
    def once():
        torch.manual_seed(1)
        return run(model=Theirs(), data=Partitioned(TheirData(), num_clients=3), max_rounds=1)[0]  # it has dropout

    first = once()
    torch.rand(5)
    assert_same_bits(first, once())
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert differs(first, once())


def test_the_client_lr_scheduler_multiplies_every_rate_once_a_round(run):
    rates = []

    class Rates(Method):
        def on_before_optimizer_step(self, client, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    halve = {"client_lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
    run([Rates()], model=Quadratic(), data=quadratic_data([1.0]), max_rounds=3, local_epochs=2, **halve)
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])


class Full(TinyData):
    """Drops a last batch that is not full."""

    def loader(self, *args):
        return DataLoader(self.rows(29, 1), 8, drop_last=True)


class Own(FederatedDataModule):
    """Builds its own loaders for its clients, without :class:`Partitioned`."""

    def __init__(self, *sizes):
        super().__init__(len(sizes), Sizes(*sizes))

    def setup(self, stage=None):
        self.rows = Full().rows(29, 1)
        self.plan = self.partition(self.rows.tensors[1].numpy(), 3)

    def train_dataloader(self, k=0):
        return DataLoader(Subset(self.rows, self.plan.parts[k].tolist()), 8, drop_last=True)


class Visits(Method):
    """Counts a client's visits in its memory."""

    def on_client_end(self, client):
        client.memory(self)["visits"] = client.memory(self).get("visits", 0) + 1


@pytest.mark.parametrize("data", [partial(clients, Full()), Own], ids=["divided", "own"])
def test_a_client_without_a_step_has_weight_0_and_keeps_its_memory(run, data):
    with warned("data", "1 of 2 clients", "(0)", "drop_last"):
        _, trainer = run([Visits()], model=TinyModule(), data=data(5, 24), max_rounds=2)
    assert [row["clients"] for row in trainer.history] == [1, 1]
    assert [row["drift/global"] for row in trainer.history] == [row["drift/client"] for row in trainer.history]
    assert [*trainer.client.memories()] == [1]


@pytest.mark.vectorized
@pytest.mark.parametrize("methods", [[], [Visits()]], ids=["at once", "one by one"])
def test_a_client_without_a_step_has_weight_0_beside_others(run, methods):
    states = []
    for beside in (1, 3):
        torch.manual_seed(0)
        how = {"model": TinyModule(), "data": clients(Full(), 5, 8, 16), "clients_per_step": beside}
        with warned("data"):
            state, trainer = run(methods, max_rounds=1, **how)
        assert trainer.metrics["clients"] == 2
        states.append(state)
    torch.testing.assert_close(*states)


class SkipsOnce(TinyModule):
    """Client 0 takes no step in the second round."""

    def training_step(self, batch, batch_idx):
        return None if self.current_epoch == 1 and len(batch[0]) == 3 else super().training_step(batch, batch_idx)


def test_what_a_client_remembers_is_of_its_last_visit_with_a_step(run):
    with warned("model=SkipsOnce", "None", "batches/skipped"):
        _, trainer = run([Visits()], model=SkipsOnce(), data=clients(TinyData(7), 3, 4), max_rounds=3)
    assert [row["clients"] for row in trainer.history] == [2, 1, 2]
    assert [memory["visits"]["visits"] for memory in trainer.client.memories().values()] == [2, 3]


# ---------------------------------------------------------------- logging


class Ends(Callback):
    """Ends the run after some rounds, and counts its last ones."""

    def __init__(self, rounds):
        self.rounds, self.ended = rounds, []

    def on_round_end(self, trainer):
        trainer.should_stop = trainer.server.round + 1 == self.rounds

    def on_last_round_end(self, trainer):
        self.ended.append(trainer.server.round)


def test_the_last_round_is_evaluated_also_where_a_callback_ends_the_run(run):
    class Tests(TinyModule):
        def test_step(self, batch, batch_idx):
            self.log("loss", self.loss(batch))

    def evaluated(ends, **kwargs):
        how = {"model": Tests(), "data": clients(TinyData(test=[4]), 8, 6), "callbacks": [ends]}
        _, trainer = run(max_rounds=5, **how, **kwargs)
        return ["test/loss" in row for row in trainer.history]

    for ends, rounds in ((Ends(2), [False, True]), (Ends(9), [False, False, True, False, True])):
        assert evaluated(ends, eval_every_n_rounds=3) == rounds
        assert ends.ended == [len(rounds) - 1]


# ---------------------------------------------------------------- server
class Counters(TinyModule):
    """Has integers that a float64 rounds; with ``changes``, clients add to them."""

    def __init__(self, changes=False):
        self.changes = changes
        super().__init__()

    def build(self):
        self.register_buffer("large", torch.tensor([2**53 + 1, -(2**62) + 1]))

    def training_step(self, batch, batch_idx):
        self.large += int(self.changes)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("clients_per_step", [1, pytest.param(2, marks=pytest.mark.vectorized)])
def test_integers_beyond_2_to_the_53_stay_as_they_are_and_are_refused_if_they_change(run, clients_per_step):
    data = clients(TinyData(15), 7, 8)
    state, _ = run(model=Counters(), data=data, clients_per_step=clients_per_step)
    assert state["large"].tolist() == [2**53 + 1, -(2**62) + 1]
    with refused("buffer", "large", "2^53", kind=ClientError):
        run(model=Counters(changes=True), data=data)


class Drift(Quadratic):
    """Has buffers that each client sets to its own number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.mean.copy_(batch[0].mean())
        self.count += int(batch[0].mean())
        return super().training_step(batch, batch_idx)


def test_buffers_can_stay_with_the_server_or_with_the_client(run):
    kept, _ = run(model=Drift(), data=quadratic_data([1.0, 4.0]), buffers="keep")
    assert kept["mean"].item() == kept["count"].item() == 0
    _, trainer = run(model=Drift(), data=quadratic_data([1.0, 4.0]), buffers="local", max_rounds=3)
    memories = trainer.client.memories()
    assert sorted(memories[k]["state"]["count"].item() for k in range(2)) == [3, 12]
    assert trainer.server.state["count"].item() == 0


# ---------------------------------------------------------------- refusals before round 0


def test_data_without_clients_or_without_the_examples_of_a_command_are_refused(run, tmp_path):
    with refused("data='TheirData'", "Partitioned"):
        run(model=Theirs(), data=TheirData())
    with refused("val data"):
        small_trainer(tmp_path).validate(small_model(), small_data())


# ---------------------------------------------------------------- failures inside a run


def failing(run, methods, **kwargs):
    return run(methods, model=TinyModule(), data=clients(TinyData(24), 8, 8, 8), **kwargs)[1]


class NanAt(Method):
    def __init__(self, client, step):
        self.client, self.step = client, step

    def penalty(self, client, step):
        bad = client.info.id == self.client and client.num_steps == self.step
        return torch.tensor(float("nan") if bad else 0.0, requires_grad=True)


def test_a_nan_names_client_round_term_and_step(run):
    with refused("client 2", "round 0", "nanat", "local step 1", kind=ClientError):
        failing(run, [NanAt(2, 1)])


def test_an_exception_names_client_and_round_and_keeps_its_cause(run):
    class Breaks(Method):
        def on_client_start(self, client):
            if client.info.id == 1:
                raise ValueError("their own mistake")

    with refused(
        "client 1", "round 0", "ValueError", "test_trainer.py", "(on_client_start)", kind=ClientError
    ) as caught:
        failing(run, [Breaks()])
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_failing_client_can_be_skipped_and_is_counted(run):
    trainer = failing(run, [NanAt(2, 0)], on_client_error="skip", min_clients=2, max_rounds=1)
    assert trainer.metrics["clients/failed"] == 1
    assert trainer.metrics["clients"] == 2
    with refused("trainer.min_clients=3", kind=ClientError):
        failing(run, [NanAt(2, 0)], on_client_error="skip", min_clients=3)


# ---------------------------------------------------------------- results of a run


def test_fast_dev_run_takes_one_batch_a_client_and_writes_nothing(tmp_path):
    steps = []

    class Count(Callback):
        def on_client_end(self, trainer, client):
            steps.append(client.num_steps)

    small_trainer(tmp_path, fast_dev_run=True, max_rounds=9, callbacks=[Count()]).fit(small_model(), small_data())
    assert steps == [1] * 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("devices", [1, 2])
def test_a_trainer_is_pickled_after_a_fit_with_its_arguments_and_without_the_run(tmp_path, devices):
    trainer = small_trainer(
        tmp_path, devices=devices, local_epochs=2, callbacks=[EarlyStopping("test/loss")], logger=True
    )
    result = trainer.fit(small_model(), small_data(train_size=100))
    for again in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        assert (again.devices, again.local_epochs, again.history) == (devices, 2, [])
        assert again.fit(small_model(), small_data(train_size=100)).metrics["test/loss"] == result.metrics["test/loss"]
    assert pickle.loads(pickle.dumps(result)).metrics == result.metrics == trainer.metrics


@pytest.mark.parametrize(
    ("precision", "channels_last"), [("32-true", True), ("bf16-mixed", False), ("64-true", False), ("bf16-true", True)]
)
def test_precisions_and_memory_formats_train(run, precision, channels_last):
    dtypes = []

    class Watch(Method):
        requires = ("logits",)

        def penalty(self, client, step):
            dtypes.append(step.taps["logits"].dtype)
            assert step.batch[0].is_contiguous(
                memory_format=torch.channels_last if channels_last else torch.contiguous_format
            )

    data = small_data("cnn", train_size=60, test_size=30)
    state, _ = run([Watch()], "cnn", data=data, precision=precision, channels_last=channels_last, max_rounds=1)
    expected = {"32-true": torch.float32, "64-true": torch.float64}.get(precision, torch.bfloat16)
    assert set(dtypes) == {expected}
    assert all(torch.isfinite(value).all() for value in state.values())
    stored = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    assert {value.dtype for name, value in state.items() if name.endswith("weight")} == {stored}
