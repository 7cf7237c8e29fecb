"""Cohorts, dropout, stragglers and absent clients: by the papers' protocols, the same for all methods and workers."""

import numpy as np
import pytest
from helpers.errors import refused
from helpers.quadratics import UNEQUAL, A, B, Curved, curved_data, settle
from helpers.runs import assert_same_bits, differs, small_trainer

from fl_lightning.callbacks import Callback
from fl_lightning.core.sampling import Sampler, UniformSampler, size_of_cohort
from fl_lightning.core.systems import SystemOutcome, SystemsHeterogeneity
from fl_lightning.methods import SCAFFOLD, FedDyn, FedNova


def test_equal_seeds_and_rounds_give_equal_cohorts_and_others_do_not():
    draw = UniformSampler()
    assert draw(0, 3, 50, 10) == draw(0, 3, 50, 10)
    cohorts = {tuple(draw(seed, round_, 50, 10)) for seed in range(3) for round_ in range(3)}
    assert len(cohorts) == 9


def test_cohorts_are_ascending_without_repeats_and_every_client_is_as_likely():
    draw = UniformSampler()
    counts = np.zeros(20)
    for round_ in range(2000):
        cohort = draw(1, round_, 20, 5)
        assert cohort == sorted(set(cohort))
        assert len(cohort) == 5
        counts[cohort] += 1
    # 500 each, with a deviation of 19
    assert abs(counts - 500).max() < 80


def test_a_subclass_states_the_draw_alone():
    class Newest(Sampler):
        def choose(self, rng, round_, num_clients, cohort_size):
            return np.arange(num_clients)[::-1][:cohort_size]

    assert Newest()(0, 0, 6, 2) == [4, 5]


@pytest.mark.parametrize(
    ("clients", "share", "given", "size"),
    [(100, 0.29, None, 29), (10, 1.0, None, 10), (10, 0.05, None, 1), (7, 0.5, None, 3), (7, 0.5, 6, 6)],
)
def test_the_size_is_the_whole_part_of_the_share_and_at_least_1(clients, share, given, size):
    assert size_of_cohort(clients, share, given) == size


COHORT = list(range(0, 40, 2))


class Steps(Callback):
    """The local steps of each visit, by round and client."""

    def __init__(self):
        self.of = {}

    def on_client_end(self, trainer, client):
        self.of[trainer.server.round, client.info.id] = client.num_steps


# ---------------------------------------------------------------- what is drawn
@pytest.mark.parametrize(
    ("given", "number", "epochs"),
    [
        ({"stragglers": 0.0}, 0, []),
        ({"stragglers": 0.5}, 10, [1, 2, 3, 4]),
        ({"stragglers": 0.9}, 18, [1, 2, 3, 4]),
        ({"stragglers": 1.0, "least": 2, "most": 5}, 20, [2, 3, 4, 5]),
    ],
    ids=["none", "FedProx, half", "FedProx, most", "FedNova"],
)
def test_stragglers_train_for_a_uniform_number_of_epochs(given, number, epochs):
    systems, counts = SystemsHeterogeneity(**given), np.zeros(6)
    for round_ in range(200):
        outcomes = systems.outcomes(0, round_, COHORT, 5)
        # a whole visit is none of a straggler
        late = [one.work or 5 for one in outcomes.values() if one.work is not None or 5 in epochs]
        assert list(outcomes) == COHORT and len(late) == number
        counts += np.bincount(late, minlength=6)
    assert set(np.flatnonzero(counts)) == set(epochs)
    assert not epochs or abs(counts[epochs] / (200 * number) - 0.25).max() < 0.03


def test_each_client_drops_out_by_its_probability_and_late_ones_where_they_are_dropped():
    systems = SystemsHeterogeneity(dropout_before=0.2, dropout_after=0.1)
    lost = [one.lost for r in range(200) for one in systems.outcomes(0, r, COHORT, 1).values()]
    assert lost.count("before") / len(lost) == pytest.approx(0.2, abs=0.02)
    assert lost.count("after") / len(lost) == pytest.approx(0.1, abs=0.02)
    late = SystemsHeterogeneity(stragglers=0.5, late="drop").outcomes(0, 3, COHORT, 5)
    kept = SystemsHeterogeneity(stragglers=0.5).outcomes(0, 3, COHORT, 5)
    # FedAvg drops the same clients whose partial work FedProx keeps
    assert {k for k in late if late[k].lost} == {k for k in kept if kept[k].work}


def test_a_fate_depends_on_seed_round_and_client_alone():
    systems = SystemsHeterogeneity(dropout_before=0.3, dropout_after=0.3)
    whole = systems.outcomes(1, 4, COHORT, 5)
    assert systems.outcomes(1, 4, COHORT[3:9], 5) == {k: whole[k] for k in COHORT[3:9]}
    assert systems.outcomes(2, 4, COHORT, 5) != whole != systems.outcomes(1, 5, COHORT, 5)
    assert SystemsHeterogeneity().outcomes(1, 4, [3], 5) == {3: SystemOutcome()}


def test_clients_are_there_in_their_windows():
    systems = SystemsHeterogeneity(available={"0": [[2, 3], [6]], "2-3": [[0, 4]]})
    there = [systems.present(r, 5) for r in range(8)]
    assert there[:3] == [[1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert there[4:7] == [[1, 2, 3, 4], [1, 4], [0, 1, 4]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stragglers": 1.5}, ("trainer.systems.stragglers=1.5",)),
        ({"dropout_before": -0.1}, ("trainer.systems.dropout_before=-0.1",)),
        ({"dropout_before": 0.6, "dropout_after": 0.6}, ("dropout_after=1.2",)),
        ({"least": 0}, ("trainer.systems.least=0",)),
        ({"least": 3, "most": 2}, ("trainer.systems.most=2",)),
        ({"late": "lose"}, ("trainer.systems.late='lose'",)),
        ({"available": {"x": [[1]]}}, ("trainer.systems.available='x'",)),
        ({"available": {"1": [[3, 1]]}}, ("trainer.systems.available=[3, 1]",)),
        ({"stragglers": 0.5}, ("trainer.systems.stragglers=0.5",)),
        ({"stragglers": 0.5, "most": 2}, ("trainer.systems.most=2",)),
        ({"available": {"4": [[0]]}}, ("trainer.systems.available=[4]",)),
        ({"available": {"0-3": [[0, 0]]}}, ("trainer.systems.available=[1]",)),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_round(run, tmp_path, given, message):
    with refused(*message):
        run(systems=SystemsHeterogeneity(**given))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- what becomes of it
def test_stragglers_take_fewer_steps_and_their_clock_goes_on_as_if_they_had_not(tmp_path):
    seen, ends = {}, []

    class Clocked(Curved):
        def on_train_start(self):
            trainer = self.trainer
            seen.setdefault(trainer.current_epoch, set()).add((trainer.global_step, trainer.estimated_stepping_batches))

        def on_train_end(self):
            ends.append((self.current_epoch, self.global_step))

    steps, systems = Steps(), SystemsHeterogeneity(stragglers=1.0, least=2, most=4)
    trainer = small_trainer(tmp_path, local_epochs=4, max_rounds=3, callbacks=[steps], systems=systems)
    trainer.fit(Clocked(), curved_data(A, B, sizes=[2, 2, 2], batch_size=1))
    outcomes = {(r, k): one for r in range(3) for k, one in systems.outcomes(0, r, [0, 1, 2], 4).items()}
    assert steps.of == {key: 2 * (one.work or 4) for key, one in outcomes.items()}
    assert len(set(steps.of.values())) > 1
    # every visit begins where it would after whole ones: 8 steps and 4 epochs a round
    assert seen == {0: {(0, 24)}, 4: {(8, 24)}, 8: {(16, 24)}}
    # and ends with the epochs and steps that it has taken
    assert ends == [(4 * r + (one.work or 4), 8 * r + 2 * (one.work or 4)) for (r, _), one in outcomes.items()]
    stragglers = [sum(outcomes[r, k].work is not None for k in range(3)) for r in range(3)]
    assert [row["clients/stragglers"] for row in trainer.history] == stragglers


def test_stragglers_of_a_run_that_counts_steps_take_fewer_steps(tmp_path):
    steps, systems = Steps(), SystemsHeterogeneity(stragglers=1.0, least=3)
    trainer = small_trainer(tmp_path, local_steps=5, max_rounds=4, callbacks=[steps], systems=systems)
    trainer.fit(Curved(), curved_data(A, B, sizes=[2, 2, 2], batch_size=1))
    assert set(steps.of.values()) == {3, 4}


def test_a_client_that_drops_out_is_as_if_not_in_the_cohort(tmp_path):
    """Lost before or after its training: the same bits, but for the bytes that it was sent."""
    trained = []
    for how in ("dropout_before", "dropout_after"):
        trainer = small_trainer(tmp_path, max_rounds=4, systems=SystemsHeterogeneity(**{how: 0.4}))
        trainer.fit(Curved(), curved_data(A * 2, B * 2), [SCAFFOLD(), FedDyn()])
        trained.append(trainer)
    before, after = trained
    assert_same_bits(before.server.state, after.server.state)
    dropped = [row["clients/dropped"] for row in before.history]
    assert 0 < sum(dropped) < 24
    assert [row["clients"] for row in before.history] == [6 - n for n in dropped]
    # the parameter and the variate of SCAFFOLD, of each client
    assert all(row["bytes/down"] == 6 * (4 + 4) for row in after.history)
    memories = [{k: one.client.memories()[k] for k in one.client.memories()} for one in trained]
    assert memories[0] == memories[1]


def test_clients_that_arrive_late_train_late(run):
    steps = Steps()
    systems = SystemsHeterogeneity(available={"1-2": [[2]]})
    data = curved_data([1.0] * 4, [0.0] * 4)
    run(model=Curved(), data=data, callbacks=[steps], systems=systems, max_rounds=4, participation=0.5)
    by_round = [{k for r, k in steps.of if r == round_} for round_ in range(4)]
    assert by_round[0] | by_round[1] <= {0, 3}
    # half of the clients that are there
    assert [len(clients) for clients in by_round] == [1, 1, 2, 2]


def test_no_systems_and_systems_that_do_nothing_are_the_same(run):
    def trained(systems):
        return run(model=Curved(), data=curved_data(A, B), systems=systems)

    plain, _ = trained(None)
    nothing, trainer = trained(SystemsHeterogeneity())
    assert_same_bits(plain, nothing)
    assert trainer.metrics["clients/dropped"] == trainer.metrics["clients/stragglers"] == 0
    assert differs(plain, trained(SystemsHeterogeneity(dropout_before=0.5))[0])


def test_fednova_normalises_by_the_steps_that_were_taken(run):
    """One round from 0: w = tau_eff * mean of the changes per step, with the steps that stragglers took."""
    steps, lr = Steps(), 0.1
    found, _ = settle(run, [FedNova()], max_rounds=1, lr=lr, callbacks=[steps], **UNEQUAL)
    taken = np.array([steps.of[0, k] for k in range(3)])
    assert len(set(taken)) > 1
    change = np.array(B) * (1 - (1 - lr * np.array(A)) ** taken)
    assert found == pytest.approx(float(taken.mean() * (change / taken).mean()), rel=1e-5)
