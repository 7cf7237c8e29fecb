"""An asynchronous run: its server steps after each few updates, of clients that began with older states."""

from itertools import pairwise

import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, differs, small_data, small_model, small_trainer

from fl_lightning import Method, ServerValue
from fl_lightning.callbacks.measurement import PeriodicCallback
from fl_lightning.core.clock import Buffered, Clock
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.data.partitioners import IID
from fl_lightning.engine.commands.doctor import as_text
from fl_lightning.methods import IFCA, SCAFFOLD, DPFedAvg, FedAsync, FedBuff, FedDyn, FedExP, FedProx
from fl_lightning.utilities.errors import ClientError

CLOCK = Clock(spread=0.7, jitter=0.2)
BY_TWO = Buffered(4, 2)


def run(folder, methods=(), clock=CLOCK, asynchronous=BY_TWO, max_rounds=8, ckpt_path=None, **how):
    """The weights and the history of a run of six equal clients."""
    how = {"clients_per_step": 1, **how}
    trainer = small_trainer(folder, max_rounds=max_rounds, clock=clock, asynchronous=asynchronous, **how)
    model = small_model()
    result = trainer.fit(model, small_data(num_clients=6, partitioner=IID()), [*methods], ckpt_path=ckpt_path)
    return model.state_dict(), result.history


def test_with_all_clients_and_equal_durations_it_is_fedavg(tmp_path):
    clock = Clock(step_seconds=0.5)
    synchronous, history = run(tmp_path / "rounds", clock=clock, asynchronous=None, max_rounds=3)
    weights, steps = run(tmp_path / "steps", clock=clock, asynchronous=Buffered(6, 6), max_rounds=3)
    assert_same_bits(synchronous, weights)
    for row, step in zip(history, steps, strict=True):
        assert row["clock/seconds"] == step["clock/seconds"] and step["staleness/max"] == 0
        assert row["test/accuracy"] == step["test/accuracy"]


LISTS = {"FedBuff and FedProx": lambda: [FedBuff(), FedProx(0.1)], "IFCA": lambda: [IFCA(init_std=0.1), FedBuff()]}


@pytest.mark.parametrize(("name", "resumed_after"), [("FedBuff and FedProx", (1, 3, 6)), ("IFCA", (3,))])
def test_workers_and_a_resume_at_any_step_change_no_bit(tmp_path, name, resumed_after):
    methods = LISTS[name]
    weights, history = run(tmp_path / "alone", methods())
    together, by_two = run(tmp_path / "two", methods(), devices=2)
    assert_same_bits(weights, together)
    assert max(row["staleness/max"] for row in history) >= 2
    for step in resumed_after:
        run(tmp_path / str(step), methods(), max_rounds=step)
        resumed, rest = run(tmp_path / str(step), methods(), ckpt_path="last")
        assert_same_bits(weights, resumed)
    of_method = "ifca/clients/1" if name == "IFCA" else "train/fedprox"
    assert max(row[of_method] for row in history) > 0
    for tag in ("clock/seconds", "staleness/mean", "clients/in_flight", "train/loss", of_method, "bytes/down"):
        values = [row[tag] for row in history]
        assert values == [row[tag] for row in by_two] == [row[tag] for row in rest]


class DecaysWithStaleness(Method):
    def penalty(self, client, step):
        return 0.01 * client.staleness * sum(client.live[name].square().sum() for name in client.sent)


def test_side_by_side_clients_of_one_version_share_a_group(tmp_path):
    how = {"asynchronous": Buffered(6, 4), "precision": "64-true"}
    weights, history = run(tmp_path / "alone", [FedBuff(), DecaysWithStaleness()], **how)
    grouped, rows = run(tmp_path / "groups", [FedBuff(), DecaysWithStaleness()], clients_per_step=4, **how)
    for name, value in weights.items():
        torch.testing.assert_close(grouped[name], value, rtol=1e-8, atol=1e-8)
    assert [row["staleness/mean"] for row in rows] == [row["staleness/mean"] for row in history]
    assert [row["train/decayswithstaleness"] > 0 for row in rows] == [row["staleness/mean"] > 0 for row in history]


class Records(Method):
    """Records what each client has received, and changes a server value in each step."""

    number = ServerValue(lambda server: torch.zeros(()))

    def __init__(self):
        self.states = []

    def on_round_start(self, server):
        self.states.append({name: value.clone() for name, value in server.state.items()})

    def on_client_start(self, client):
        if not self.states:  # the trial of two clients side by side
            return
        assert client.round - client.staleness == client.version
        assert_same_bits(dict(client.received), self.states[client.version])
        assert_same_bits(client.state(), self.states[client.version])
        assert float(self.number) == client.version
        visits.append((client.round, client.info.id, client.version))

    def on_round_end(self, server, payload):
        self.number += 1
        times.append(server.time)


visits, times = [], []


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_a_client_receives_the_state_and_the_values_of_its_version(tmp_path, clients_per_step):
    visits.clear(), times.clear()
    _, history = run(tmp_path, [Records()], asynchronous=Buffered(6, 4), clients_per_step=clients_per_step)
    steps = [[r - version for r, _, version in visits if r == step] for step in range(8)]
    assert [sum(step) / len(step) for step in steps] == [row["staleness/mean"] for row in history]
    assert [max(step) for step in steps] == [row["staleness/max"] for row in history]
    assert times == [row["clock/seconds"] for row in history] == sorted(times)
    assert max(map(max, steps)) >= 1 and {len(step) for step in steps} == {4}


def test_fedprox_pulls_to_the_received_state(tmp_path):
    class FirstPull(FedProx):
        def penalty(self, client, step):
            term = super().penalty(client, step)
            if not client.num_steps:
                assert term is None or float(term) == 0
                stale.append(client.staleness)
            return term

    stale = []
    run(tmp_path, [FedBuff(), FirstPull(1.0)])
    assert max(stale) >= 2


class Fails(Method):
    """Client 1 fails from the fourth server step on."""

    def on_client_start(self, client):
        if client.info.id == 1 and client.round >= 3:
            raise ValueError("no disk")


def test_the_place_of_a_client_that_fails_stays_empty(tmp_path):
    def skipping(name, **how):
        with warned("skipped: client 1"):
            return run(tmp_path / name, [FedBuff(), FedProx(0.1), Fails()], on_client_error="skip", **how)

    weights, history = skipping("alone")
    together, _ = skipping("two", devices=2)
    skipping("resumed", max_rounds=4)
    resumed, _ = skipping("resumed", ckpt_path="last")
    assert_same_bits(weights, together)
    assert_same_bits(weights, resumed)
    failed = [row.get("clients/failed", 0) for row in history]
    assert (
        sum(failed) >= 1 and [row["clients"] + failed for row, failed in zip(history, failed, strict=True)] == [2] * 8
    )
    others, _ = run(tmp_path / "others", [FedBuff(), FedProx(0.1)])
    assert differs(weights, others)


def test_a_visit_is_replayed_from_its_version(tmp_path):
    class FailsLate(Method):
        """The first client that is stale fails after its training."""

        def on_client_end(self, client):
            trained.append({name: value.clone() for name, value in client.live.items()})
            if client.staleness >= 2:
                raise ValueError("no disk")

    trained = []
    with refused("no disk", kind=ClientError):
        run(tmp_path, [FedBuff(), FedProx(0.1), FailsLate()])
    failed = trained.pop()
    (record,) = tmp_path.rglob("failures/*.pt")
    _, round_, _, client = record.stem.split("-")
    trainer = small_trainer(tmp_path, max_rounds=8, clock=CLOCK, asynchronous=Buffered(4, 2), clients_per_step=1)
    data, where = small_data(num_clients=6, partitioner=IID()), (int(round_), int(client))
    methods = [FedBuff(), FedProx(0.1), FailsLate()]
    with refused("no disk", kind=ClientError):
        trainer.replay(small_model(), data, *where, ckpt_path=record, method=methods)
    assert_same_bits(failed, trained.pop())


def test_a_visit_of_the_next_step_is_replayed_from_a_checkpoint(tmp_path):
    class Trained(Method):
        def on_client_end(self, client):
            trained[client.round, client.info.id] = client.staleness, client.state()

    trained = {}
    run(tmp_path, [FedBuff(), Trained()], max_rounds=8)
    in_run = dict(trained)
    stale = {where: staleness for where, (staleness, _) in in_run.items() if staleness}
    round_, client = max(stale, key=stale.get)
    run(tmp_path / "shorter", [FedBuff(), Trained()], max_rounds=round_)
    trained.clear()
    trainer = small_trainer(
        tmp_path / "shorter", clock=CLOCK, asynchronous=Buffered(4, 2), clients_per_step=1, max_rounds=8
    )
    data = small_data(num_clients=6, partitioner=IID())
    trainer.replay(small_model(), data, round_, client, ckpt_path="last", method=[FedBuff(), Trained()])
    assert [*trained] == [(round_, client)] and trained[round_, client][0] == stale[round_, client] >= 2
    assert_same_bits(trained[round_, client][1], in_run[round_, client][1])


def test_lost_visits_do_not_count_and_stragglers_do_less(tmp_path):
    systems = SystemsHeterogeneity(stragglers=0.5, least=1, most=1, dropout_after=0.3, available={"0": [[0, 1]]})
    visits.clear()
    weights, history = run(tmp_path / "alone", [Records()], systems=systems, local_epochs=2)
    again, _ = run(tmp_path / "two", [Records()], systems=systems, local_epochs=2, devices=2)
    assert_same_bits(weights, again)
    assert sum(row["clients/dropped"] for row in history) >= 2 <= sum(row["clients/stragglers"] for row in history)
    assert {row["clients"] for row in history} == {2}
    assert all(version <= 1 for _, k, version in visits if k == 0)


def test_stale_updates_are_left_out(tmp_path):
    _, history = run(tmp_path, asynchronous=Buffered(6, 1, max_staleness=2), max_rounds=16)
    assert max(row["staleness/max"] for row in history) == 2


def test_the_run_ends_before_the_first_step_that_is_too_late(tmp_path):
    _, history = run(tmp_path / "all")
    times = [row["clock/seconds"] for row in history]
    for name, limit in {"before": times[4] - 1e-3, "at": times[4]}.items():
        _, rows = run(tmp_path / name, max_seconds=limit)
        assert [row["clock/seconds"] for row in rows] == [time for time in times if time <= limit]
        assert "test/accuracy" in rows[-1]
    with warned("trainer.max_seconds", "round 5"):
        _, rows = run(tmp_path / "at", max_seconds=limit, ckpt_path="last")
    assert len(rows) == 5
    with warned("trainer.max_seconds=0.001", "round 0"):
        assert not run(tmp_path / "none", max_seconds=0.001)[1]
    _, rounds = run(tmp_path / "rounds", asynchronous=None, clock=Clock(step_seconds=0.0, latency=2.0), max_seconds=5.0)
    assert [row["clock/seconds"] for row in rounds] == [2.0, 4.0]


class AtTheEnd(PeriodicCallback):
    """Notes the rounds in which it measures, and the last one whose accuracy it sees."""

    def __init__(self):
        super().__init__(every_n_rounds=None)
        self.rounds, self.evaluated = [], []

    def measure(self, trainer):
        self.rounds.append(trainer.server.round)

    def on_round_end(self, trainer):
        super().on_round_end(trainer)
        self.evaluated += [trainer.server.round] * ("test/accuracy" in trainer.metrics)


@pytest.mark.parametrize("asynchronous", [None, BY_TWO])
def test_callbacks_know_the_last_round_of_simulated_seconds(tmp_path, asynchronous):
    at_the_end = AtTheEnd()
    how = {"max_seconds": 20.0, "callbacks": [at_the_end], "eval_every_n_rounds": 1000}
    _, history = run(tmp_path, asynchronous=asynchronous, max_rounds=1000, **how)
    assert at_the_end.rounds == at_the_end.evaluated == [len(history) - 1]


@pytest.mark.parametrize("asynchronous", [None, BY_TWO])
def test_doctor_counts_the_rounds_of_simulated_seconds(tmp_path, asynchronous):
    how = {"max_rounds": 1000, "max_seconds": 60.0, "clock": CLOCK, "asynchronous": asynchronous}
    _, history = run(tmp_path, **how)
    plan = small_trainer(tmp_path, **how).doctor(small_model(), small_data(num_clients=6, partitioner=IID()))
    assert plan["run"]["rounds"] == len(history) < 1000
    assert plan["seconds"]["run"] == pytest.approx(len(history) * plan["seconds"]["round"])
    assert f"{len(history)} in 60 simulated seconds" in as_text(plan)


def test_the_first_step_after_each_multiple_of_seconds_is_evaluated(tmp_path):
    every = 3.0
    _, history = run(tmp_path, eval_every_seconds=every)
    times = [row["clock/seconds"] for row in history]
    multiples = [int(time // every) for time in times]
    first = [multiple > before for before, multiple in pairwise([0, *multiples])]
    assert 2 < sum(first) < len(first)
    assert ["test/accuracy" in row for row in history] == [*first[:-1], True]
    run(tmp_path / "resumed", eval_every_seconds=every, max_rounds=4)
    _, rows = run(tmp_path / "resumed", eval_every_seconds=every, ckpt_path="last")
    assert ["test/accuracy" in row for row in rows[4:]] == ["test/accuracy" in row for row in history[4:]]


def test_whole_microseconds_are_compared(tmp_path):
    """1e6 * 2.01 is below 2010000, and 0.3 // 0.1 is 2."""
    how = {"local_steps": 1, "asynchronous": None, "max_rounds": 7, "eval_every_seconds": 0.1}
    _, history = run(tmp_path / "every", clock=Clock(step_seconds=0.1), **how)
    assert all("test/accuracy" in row for row in history)
    _, history = run(tmp_path / "limit", clock=Clock(step_seconds=2.01, deadline=2.01), max_seconds=2.01, **how)
    assert [(row["clients/late"], row["clock/seconds"]) for row in history] == [(0, 2.01)]


def test_a_step_whose_only_client_fails_changes_nothing_if_no_client_must_succeed(tmp_path):
    how = {"asynchronous": Buffered(4, 1), "max_rounds": 16, "on_client_error": "skip", "local_steps": 1}
    with warned("no update arrives"):
        _, history = run(tmp_path / "none", [FedAsync(), Fails()], min_clients=0, **how)
    assert {row["clients"] for row in history} == {0, 1} and len(history) == 16
    with warned("skipped: client 1"), refused("trainer.min_clients=1", kind=ClientError):
        run(tmp_path / "one", [FedAsync(), Fails()], **how)


def test_doctor_counts_the_versions(tmp_path):
    trainer = small_trainer(tmp_path, max_rounds=8, clock=CLOCK, asynchronous=Buffered(4, 2))
    plan = trainer.doctor(small_model(), small_data(num_clients=6, partitioner=IID()), [FedBuff()])
    _, history = run(tmp_path, [FedBuff()])
    assert plan["run"]["cohort"] == 2
    assert 2 <= plan["versions"]["number"] <= 4
    each = history[0]["bytes/down"] / 2
    assert plan["versions"]["bytes"] == plan["versions"]["number"] * each


class SendsState(Method):
    def sent_state(self, server, k):
        return None


@pytest.mark.parametrize(
    ("how", "keys"),
    [
        ({"clock": None}, ["trainer.clock=None", "trainer.asynchronous"]),
        ({"clock": None, "asynchronous": None, "max_seconds": 9.0}, ["trainer.max_seconds=9.0", "trainer.clock"]),
        ({"max_seconds": 0.0}, ["trainer.max_seconds=0.0"]),
        ({"eval_every_seconds": 0.0}, ["trainer.eval_every_seconds=0.0"]),
        ({"clock": None, "asynchronous": None, "eval_every_seconds": 9.0}, ["trainer.eval_every_seconds", "clock"]),
        ({"clock": Clock(deadline=9.0)}, ["trainer.clock.deadline=9.0"]),
        ({"asynchronous": Buffered(9, 7)}, ["trainer.asynchronous.size=7", "6"]),
        ({"asynchronous": Buffered(9, 2)}, ["trainer.asynchronous.concurrency=9", "6"]),
        ({"sampler": lambda seed, start, number, size: [0, 1]}, ["trainer.sampler=[0, 1]"]),
        ({"cohort_size": 3}, ["trainer.cohort_size=3"]),
        ({"participation": 0.5}, ["trainer.participation=0.5"]),
        ({"systems": SystemsHeterogeneity(available={"0-4": [[0, 1]]})}, ["trainer.asynchronous.size=2"]),
        ({"systems": SystemsHeterogeneity(dropout_after=1.0)}, ["trainer.asynchronous"]),
        ({"methods": [SCAFFOLD()]}, ["trainer.asynchronous", "SCAFFOLD"]),
        ({"methods": [FedDyn()]}, ["trainer.asynchronous", "FedDyn"]),
        ({"methods": [FedExP()]}, ["trainer.asynchronous", "FedExP"]),
        ({"methods": [DPFedAvg()]}, ["trainer.asynchronous", "DPFedAvg"]),
        ({"methods": [SendsState()]}, ["trainer.asynchronous", "SendsState"]),
    ],
)
def test_what_cannot_be_asynchronous_is_refused_before_round_0(tmp_path, how, keys):
    with refused(*keys):
        run(tmp_path, **how)
    assert not any(tmp_path.rglob("metrics.csv"))


def test_another_schedule_cannot_continue_a_run(tmp_path):
    run(tmp_path / "other", max_rounds=4)
    with refused("ckpt_path", "trainer.asynchronous"):
        run(tmp_path / "other", asynchronous=Buffered(5, 2), ckpt_path="last")
    run(tmp_path / "none", asynchronous=None, max_rounds=4)
    trainer = small_trainer(tmp_path / "none", max_rounds=8, clock=CLOCK, asynchronous=BY_TWO)
    data = small_data(num_clients=6, partitioner=IID())
    with refused("trainer.asynchronous: versions"):
        trainer.fit(small_model(), data, [], ckpt_path="last", allow_changes=True)
