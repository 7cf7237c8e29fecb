"""Attacks: who attacks, what attackers send, and what it does to the mean."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, differs, small_data, train_in_turn
from helpers.softmax_regression import W, X, Y, fit
from helpers.tiers import sample
from torch.nn.functional import cross_entropy

from fl_lightning import Method
from fl_lightning.callbacks import PersonalAccuracy, Scores
from fl_lightning.methods import ALIE, IPM, Gaussian, LabelFlip, MultiKrum, SignFlip

HONEST = torch.tensor([[1, 0], [0.9, 0.25], [1.1, -0.1], [0.8, 0.1]], dtype=torch.float64)
ATTACKS = {"LabelFlip": LabelFlip, "SignFlip": SignFlip, "Gaussian": Gaussian, "ALIE": ALIE, "IPM": IPM}
ATTACKS |= {
    "SignFlip of steps": partial(SignFlip, where="steps"),
    "LabelFlip to the next": partial(LabelFlip, to="next"),
}


def near(found, wanted):
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-9)


# ---------------------------------------------------------------- values
def test_the_worked_examples_of_colluding_attackers():
    near(ALIE(z=1.0).sent(HONEST, 5), [1.0790994448735804, 0.21180394055974097])
    near(IPM(epsilon=0.5).sent(HONEST, 5), [-0.475, -0.03125])
    near(torch.cat([HONEST, IPM(epsilon=0.5).sent(HONEST, 5)[None]]).mean(0), [0.665, 0.04375])
    pairs = {(10, 2): 0.0, (10, 3): 0.18001236979270493, (10, 4): 0.43072729929545733, (50, 24): 1.4260768722728479}
    pairs |= {(20, 4): 0.15731068461017067, (25, 5): 0.2533471031357998, (50, 12): 0.336038140371823}
    for (m, a), z in pairs.items():
        assert ALIE().distance(m, a) == pytest.approx(z, abs=1e-9)


def test_the_worked_example_of_a_flipped_step_and_its_loss(tmp_path):
    reverse = fit(tmp_path, [LabelFlip([0])])
    wanted = [[0.06758493301913218, 0.22148712891411912], [-0.005774859971226784, -0.12220584632929807]]
    wanted.append([0.3381899269520946, 0.0007187174151789544])
    near(reverse.server.state["head.weight"], wanted)
    assert reverse.history[0]["train/loss"] == pytest.approx(0.9416380540592522, abs=1e-9)
    assert cross_entropy(X["A"] @ W.T, 2 - Y["A"]).item() == pytest.approx(0.9416380540592522, abs=1e-9)
    following = fit(tmp_path, [LabelFlip([0], to="next")]).history[0]["train/loss"]
    assert following == pytest.approx(cross_entropy(X["A"] @ W.T, (Y["A"] + 1) % 3).item(), abs=1e-9)


STEP = [[0.05741506698086783, 0.2035128710858809], [0.005774859971226784, -0.07779415367070194]]
STEP.append([0.3368100730479054, -0.025718717415178956])
TWO = {
    "steps": [
        [0.013920629434723428, 0.20711019919536724],
        [0.011654584188568694, -0.05522394480988121],
        [0.3744247863767079, -0.051886254385486046],
    ],
    "update": [
        [0.01575715438777081, 0.20693909701817131],
        [0.011442130346388068, -0.05596663100054358],
        [0.37280071526584113, -0.050972466017627734],
    ],
}


@pytest.mark.parametrize("where", ["steps", "update"])
def test_turned_steps_are_the_turned_update_of_one_step_but_not_of_two(tmp_path, where):
    for epochs, wanted in {1: STEP, 2: TWO[where]}.items():
        trainer = fit(tmp_path, [SignFlip([0], where=where)], local_epochs=epochs)
        near(trainer.server.state["head.weight"], wanted)


# ---------------------------------------------------------------- laws
def run(folder, methods, num_clients=6, **kwargs):
    data = partial(small_data, train_size=180, test_size=50, num_clients=num_clients, batch_size=16)
    return train_in_turn(folder, methods, data=data, **{"max_rounds": 2, "weighting": "uniform", **kwargs})


@pytest.mark.parametrize("name", sample([*ATTACKS], "SignFlip", "ALIE"))
def test_without_attackers_it_is_the_run_without_it_bit_for_bit(tmp_path, name):
    plain, _ = run(tmp_path, [])
    for neutral in (ATTACKS[name](share=0), ATTACKS[name](start=2)):
        state, trainer = run(tmp_path, [neutral])
        assert_same_bits(state, plain)
        assert trainer.metrics["attack/clients"] == 0
    state, trainer = run(tmp_path, [ATTACKS[name](share=0.3)])
    assert differs(state, plain) and trainer.metrics["attack/clients"] == 2


def test_clients_of_several_attacks_are_counted_once_each(tmp_path):
    attacks = [SignFlip([0, 1]), ATTACKS["ALIE"](clients=[1, 2]), ATTACKS["IPM"](clients=[5], start=1)]
    counts = [row["attack/clients"] for row in run(tmp_path, attacks)[1].history]
    assert counts == [3, 4]


class Seen(Method):
    """Notes what the server sees."""

    def __init__(self):
        self.rows = []

    def transform_updates(self, server, updates):
        self.rows.append({name: updates.entry(name) for name in updates.names})
        return updates


def test_the_mean_turns_around_from_its_bound_on_and_at_the_bound_it_vanishes(tmp_path):
    """Of two attackers among six."""
    means = {}
    for epsilon in (0.0, 2.0, 4.0):
        seen = Seen()
        run(tmp_path, [IPM([1, 4], epsilon=epsilon), seen], max_rounds=1)
        means[epsilon] = {name: rows.mean(0) for name, rows in seen.rows[0].items()}
    for name, wanted in means[0.0].items():
        torch.testing.assert_close(means[2.0][name], torch.zeros_like(wanted), rtol=0, atol=1e-12)
        torch.testing.assert_close(means[4.0][name], -wanted, rtol=1e-9, atol=1e-12)


def test_all_attackers_send_the_honest_mean_and_its_deviations(tmp_path):
    for z in (0.0, 1.5):
        seen = Seen()
        run(tmp_path, [ALIE([0, 5], z=z), seen], max_rounds=1)
        for rows in seen.rows[0].values():
            honest = rows[[1, 2, 3, 4]]
            for sent in rows[[0, 5]]:
                torch.testing.assert_close(sent, honest.mean(0) + z * honest.std(0), rtol=1e-12, atol=1e-15)


def test_noise_has_its_moments_depends_on_round_and_client_and_is_chosen_by_no_krum(tmp_path):
    seen = Seen()
    run(tmp_path, [Gaussian([0, 3], std=2.0, mean=5.0), seen])
    first, second = (torch.cat([rows[[0, 3]].flatten(1) for rows in found.values()], 1) for found in seen.rows)
    for numbers in (*first, *second):
        assert numbers.mean().item() == pytest.approx(5, abs=0.2) and numbers.std().item() == pytest.approx(2, abs=0.15)
    assert not any(torch.equal(*pair) for pair in ((first[0], first[1]), (first[0], second[0])))
    states = [run(tmp_path, [Gaussian([2], std=std), MultiKrum(1)], num_clients=7)[0] for std in (1e6, 1e9)]
    assert_same_bits(*states)


def test_added_noise_is_added(tmp_path):
    both, noise, plain = Seen(), Seen(), Seen()
    for seen, methods in ((both, [Gaussian([0], add=True)]), (noise, [Gaussian([0])]), (plain, [])):
        run(tmp_path, [*methods, seen], max_rounds=1)
    for name, rows in both.rows[0].items():
        torch.testing.assert_close(rows[0], noise.rows[0][name][0] + plain.rows[0][name][0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sample([*ATTACKS], "LabelFlip"))
@pytest.mark.vectorized
def test_attackers_side_by_side_do_as_one_by_one(tmp_path, name):
    alone, beside = (run(tmp_path, [ATTACKS[name]([1, 4])], clients_per_step=n)[0] for n in (1, 6))
    for entry, value in alone.items():
        torch.testing.assert_close(beside[entry], value, rtol=1e-3, atol=1e-4)


def test_attackers_alone_in_a_round_send_what_they_have(tmp_path):
    how = {"max_rounds": 1, "sampler": lambda seed, round_, number, size: [0, 1], "cohort_size": 2}
    plain, _ = run(tmp_path, [], **how)
    for attack in (IPM([0, 1]), ALIE([0, 1])):
        with warned(type(attack).__name__):
            assert_same_bits(run(tmp_path, [attack], **how)[0], plain)


def test_drawn_attackers_are_a_share_of_all_clients_and_the_first_of_one_order(tmp_path):
    drawn = []
    for share in (0.2, 0.5):
        attack = SignFlip(share=share)
        _, trainer = run(tmp_path, [attack], max_rounds=0)
        drawn.append({*attack.attackers(trainer.server)})
    assert len(drawn[0]) == 1 and len(drawn[1]) == 3 and drawn[0] < drawn[1]


# ---------------------------------------------------------------- measurements
@pytest.mark.usefixtures("undrawn")
def test_measurements_on_the_clients_leave_the_attackers_out(tmp_path):
    personal = PersonalAccuracy(examples=None, fine_tune_steps=0)
    plain, attacked = (
        run(tmp_path, methods, callbacks=[personal, Scores()], max_rounds=1, num_clients=4)[1]
        for methods in ([], [SignFlip([1], start=5)])
    )
    honest = [plain.metrics[f"personal/client/{k}"] for k in (0, 2, 3)]
    assert np.load(attacked.run_dir / "personal.npz")["clients"].tolist() == [[0, 2, 3]]
    assert "personal/client/1" in plain.metrics and "personal/client/1" not in attacked.metrics
    for tag in ("personal/accuracy", "scores/clients"):
        assert attacked.metrics[tag] == pytest.approx(np.mean(honest)) != plain.metrics[tag]
    for tag in ("personal/worst_tenth", "scores/worst_tenth"):
        assert attacked.metrics[tag] == pytest.approx(min(honest))


@pytest.mark.parametrize("callback", [PersonalAccuracy, Scores])
def test_a_measurement_on_the_clients_of_which_all_attack_is_refused(tmp_path, callback):
    with refused(callback.__name__, "ipm"):
        run(tmp_path, [IPM(share=1.0)], callbacks=[callback()])
