"""Rules for clients that may lie: the values of their papers' formulas, and laws that hold for any updates."""

import math
from functools import partial

import pytest
import torch
from helpers.errors import warned
from helpers.runs import assert_same_bits, differs, draw, small_data, train_in_turn
from helpers.tiers import sample
from helpers.workers import together

from fl_lightning.core.server import Server
from fl_lightning.core.updates import ClientUpdate, Updates
from fl_lightning.functional import chosen_by_score, krum_scores, trimmed_mean
from fl_lightning.methods import (
    NNM,
    CenteredClipping,
    CoordinateMedian,
    FedDisco,
    FedProto,
    GeometricMedian,
    MultiKrum,
    TrimmedMean,
)

X = torch.tensor([[1, 0], [0.9, 0.25], [1.1, -0.1], [0.8, 0.1], [-4, 3]], dtype=torch.float64)
N = [10.0, 20.0, 30.0, 20.0, 20.0]
FAR = torch.cat([X[:4], torch.full((1, 2), 1e12, dtype=torch.float64)])


def updates_of(rows, weights=None, workers=None):
    """One update for each row, in a state of the entries w and b, on the workers if there are any."""
    entries = {"w": rows[:, :-1], "b": rows[:, -1]}
    own = {
        k: ClientUpdate(k, (weights or [1.0] * len(rows))[k], change={name: x[k] for name, x in entries.items()})
        for k in range(len(rows))
        if workers is None or k % workers.size == workers.rank
    }
    if workers is None:
        (found,) = together(1, lambda one: Updates(own, state_of(rows), ["w", "b"], [], one))
        return found
    return Updates(own, state_of(rows), ["w", "b"], [], workers)


def state_of(rows):
    return {"w": torch.zeros(rows.shape[1] - 1, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}


def result(methods, rows, weights=None, rounds=1, workers=None):
    """What the last method makes of the rows, after the others have transformed them."""
    server = Server(state_of(rows), ["w", "b"], num_clients=len(rows))
    *transforms, rule = methods if isinstance(methods, list) else [methods]
    for method in (*transforms, rule):
        method.reset(server)
        method.on_fit_start(server)
    for _ in range(rounds):
        updates = updates_of(rows, weights, workers)
        for method in transforms:
            updates = method.transform_updates(server, updates)
        change = rule.aggregate(server, updates)
    return torch.cat([change["w"], change["b"][None]])


def assert_near(found, wanted):
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-9)


# ---------------------------------------------------------------- values
EXAMPLES = {
    "trimmed": (TrimmedMean(1), [0.9, 0.11666666666666665]),
    "trimmed share": (TrimmedMean(share=0.2), [0.9, 0.11666666666666665]),
    "uniform": (TrimmedMean(share=0), [-0.04, 0.65]),
    "median": (CoordinateMedian(), [0.9, 0.1]),
    "Krum": (MultiKrum(1, chosen=1), [1.0, 0.0]),
    "MultiKrum": (MultiKrum(1, chosen=3), [0.9, 0.11666666666666665]),
    "geometric median": (GeometricMedian(), [0.8550231227468537, 0.11233598759367538]),
    "from the mean": (GeometricMedian(3, start="mean"), [0.8530066418239834, 0.11880370093153181]),
    "once from the mean": (GeometricMedian(1, start="mean"), [0.6597848065510729, 0.23721983396408805]),
    "weighted": (GeometricMedian(nu=math.inf), [-0.03, 0.64]),
    "limit": (GeometricMedian(200, tolerance=0), [0.8550512729172529, 0.11028202182694129]),
    "uniform limit": (
        GeometricMedian(200, tolerance=0, weighting="uniform"),
        [0.8569565177765671, 0.11136417734496908],
    ),
    "BYZ": (GeometricMedian(3, 0.1, weighting="uniform"), [0.8689728334225141, 0.12439658662842033]),
    "clipped once": (CenteredClipping(1.0), [0.5791786412935409, 0.17189285079149633]),
    "clipped thrice": (CenteredClipping(1.0, 3), [0.7294290288367271, 0.19044780517172402]),
    "NNM, median": ([NNM(1), CoordinateMedian()], [0.95, 0.0625]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_worked_examples(name):
    rule, wanted = EXAMPLES[name]
    assert_near(result(rule, X, N), wanted)
    for found in together(2, lambda workers: result(rule, X, N, workers=workers)):
        assert torch.equal(found, result(rule, X, N))


def test_the_worked_scores_and_the_mixed_rows():
    distances = updates_of(X).squared_distances()
    assert_near(krum_scores(distances, 1), [0.07, 0.105, 0.15, 0.0825, 63.0225])
    server = Server(state_of(X), ["w", "b"], num_clients=5)
    mixed = NNM(1).transform_updates(server, updates_of(X))
    rows = torch.cat([mixed.entry("w"), mixed.entry("b")[:, None]], 1)
    assert_near(rows, [[0.95, 0.0625]] * 4 + [[-0.325, 0.8375]])


def test_the_mean_as_start_is_not_robust_to_size_and_no_change_is():
    how = {"weighting": "uniform", "tolerance": 0}
    far = result(GeometricMedian(start="mean", **how), FAR)
    torch.testing.assert_close(far, FAR.new_tensor([975609757.0466343, 975609756.1600003]), rtol=1e-12, atol=0)
    assert_near(result(GeometricMedian(**how), FAR), [0.97463687454749, 0.0957577500020816])


def test_a_share_is_floored_after_a_small_number():
    assert TrimmedMean(share=0.29).cut(100) == 29 and TrimmedMean(share=0.3).cut(10) == 3


# ---------------------------------------------------------------- laws
RULES = {
    "TrimmedMean": lambda: TrimmedMean(2),
    "CoordinateMedian": CoordinateMedian,
    "MultiKrum": lambda: MultiKrum(2),
    "Krum": lambda: MultiKrum(2, chosen=1),
    "GeometricMedian": lambda: GeometricMedian(300, weighting="uniform", tolerance=0),
    "CenteredClipping": lambda: CenteredClipping(0.5, 200),
    "NNM, TrimmedMean": lambda: [NNM(2), TrimmedMean(2)],
}
ROWS = draw(9, 6)


@pytest.mark.parametrize("name", RULES)
def test_equal_updates_give_that_update_the_order_is_irrelevant_and_a_shift_shifts_the_result(name):
    near = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(result(RULES[name](), ROWS[:1].repeat(9, 1)), ROWS[0], **near)
    found, order = result(RULES[name](), ROWS), torch.randperm(9, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(result(RULES[name](), ROWS[order]), found, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result(RULES[name](), ROWS + 3 * ROWS[4]), found + 3 * ROWS[4], **near)


@pytest.mark.parametrize("name", ["MultiKrum", "Krum", "GeometricMedian", "CenteredClipping"])
def test_rules_by_distances_turn_with_the_updates_and_trimming_does_not(name):
    q = torch.linalg.qr(draw(6, 6, seed=2)).Q
    turned, found = (result(RULES[name](), rows) for rows in (ROWS @ q, ROWS))
    torch.testing.assert_close(turned, found @ q, rtol=1e-6, atol=1e-6)
    apart = result(RULES["TrimmedMean"](), ROWS @ q) - result(RULES["TrimmedMean"](), ROWS) @ q
    assert apart.abs().max() > 1e-3


@pytest.mark.parametrize("size", [1.0, 1e6, 1e12])
def test_liars_cannot_leave_the_range_of_the_honest_or_be_chosen(size):
    rows = ROWS.clone()
    rows[[2, 5]] = size * draw(2, 6, seed=4) + size
    honest = rows[[0, 1, 3, 4, 6, 7, 8]]
    for rule in (TrimmedMean(2), CoordinateMedian()):
        found = result(rule, rows)
        assert (found >= honest.min(0).values).all() and (found <= honest.max(0).values).all()
    if size > 1:
        weights = chosen_by_score(krum_scores(updates_of(rows).squared_distances(), 2), 7)
        assert weights.tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 1]


def test_trimming_all_but_the_middle_is_the_median():
    for m in (5, 6):
        wanted = ROWS[:m].quantile(0.5, dim=0)
        torch.testing.assert_close(result(CoordinateMedian(), ROWS[:m]), wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(trimmed_mean(ROWS[:m], (m - 1) // 2), wanted, rtol=1e-12, atol=0)


def test_one_client_is_returned():
    for rule in (TrimmedMean(share=0.4), CoordinateMedian(), MultiKrum(0), GeometricMedian(), CenteredClipping(99.0)):
        torch.testing.assert_close(result(rule, ROWS[:1]), ROWS[0], rtol=1e-12, atol=0)


def test_krum_is_equivariant_to_scale_and_all_rows_without_liars_are_the_mean():
    torch.testing.assert_close(result(MultiKrum(2), 7 * ROWS), 7 * result(MultiKrum(2), ROWS))
    torch.testing.assert_close(result(MultiKrum(0), ROWS), ROWS.mean(0))


def test_the_geometric_median_of_numbers_is_their_median_and_a_majority_of_weight_is_its_row():
    line = torch.tensor([0.3, -1.0, 5.0, 0.7, 2.0]).double()[:, None] * ROWS[:1]
    torch.testing.assert_close(result(RULES["GeometricMedian"](), line), 0.7 * ROWS[0], rtol=1e-4, atol=1e-4)
    found = result(GeometricMedian(300, tolerance=0), ROWS[:4], [1.0, 2.0, 9.0, 3.0])
    torch.testing.assert_close(found, ROWS[2], rtol=1e-5, atol=1e-5)


def test_an_iteration_never_raises_the_smoothed_sum_of_distances():
    nu, last = 0.5, math.inf
    for iterations in range(1, 12):
        z = result(GeometricMedian(iterations, nu, weighting="uniform", tolerance=0), ROWS)
        d = (ROWS - z).norm(dim=1)
        value = torch.where(d > nu, d, d.square() / (2 * nu) + nu / 2).sum().item()
        assert value <= last + 1e-12
        last = value


def test_one_liar_moves_a_clipped_mean_by_at_most_two_radii_over_m():
    tau = 0.3
    for size in (1.0, 1e6):
        liar = ROWS.clone()
        liar[3] = size * draw(6, seed=7)
        moved = result(CenteredClipping(tau), liar) - result(CenteredClipping(tau), ROWS)
        assert moved.norm() <= 2 * tau / 9 + 1e-12
    assert result(CenteredClipping(1e-9), ROWS).abs().max() < 1e-8


def test_the_second_round_of_clipping_starts_at_the_result_of_the_first():
    twice = result(CenteredClipping(1.0), X, rounds=2)
    torch.testing.assert_close(twice, result(CenteredClipping(1.0, 2), X), rtol=1e-12, atol=0)


def test_mixing_all_gives_any_rule_the_mean():
    for rule in (CoordinateMedian(), MultiKrum(2, chosen=1), GeometricMedian(300, weighting="uniform")):
        torch.testing.assert_close(result([NNM(0), rule], ROWS), ROWS.mean(0), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- runs
SEVEN = partial(small_data, train_size=200, test_size=50, num_clients=7, batch_size=16)
fit = partial(train_in_turn, data=SEVEN)


NEUTRAL = {
    "TrimmedMean": ([TrimmedMean(share=0)], [TrimmedMean(2)], "uniform"),
    "MultiKrum": ([MultiKrum(0)], [MultiKrum(2)], "uniform"),
    "MultiKrum by examples": ([MultiKrum(0, weighting="examples")], [MultiKrum(2, weighting="examples")], "examples"),
    "GeometricMedian": ([GeometricMedian(nu=math.inf)], [GeometricMedian()], "examples"),
    "CenteredClipping": ([CenteredClipping(math.inf)], [CenteredClipping(0.1)], "uniform"),
}


@pytest.mark.parametrize("name", sample([*NEUTRAL], "TrimmedMean", "CenteredClipping"))
def test_the_neutral_coefficient_is_fedavg_bit_for_bit_and_another_is_not(tmp_path, name):
    neutral, strong, weighting = NEUTRAL[name]
    plain, _ = fit(tmp_path, [], weighting=weighting)
    assert_same_bits(fit(tmp_path, neutral, weighting=weighting)[0], plain)
    assert differs(fit(tmp_path, strong, weighting=weighting)[0], plain)


def test_running_statistics_pass_a_rule_by_coordinate_and_follow_the_clients_it_selects(tmp_path):
    states = [fit(tmp_path, [method], max_rounds=1)[0] for method in (CoordinateMedian(), TrimmedMean(share=0))]
    names = [name for name in states[0] if name.endswith("running_mean")]
    assert names and all(differs({n: states[0][n]}, {n: states[1][n]}) for n in names)


def test_the_mean_factor_of_clipping_is_logged(tmp_path):
    _, trainer = fit(tmp_path, [CenteredClipping(0.1)])
    assert all(0 < row["train/centeredclipping"] < 1 for row in trainer.history)


def test_a_smaller_round_has_a_smaller_number_of_liars_with_a_warning():
    with warned("TrimmedMean.f=2", "3"):
        assert TrimmedMean(2).tolerated(3) == 1
    with warned("MultiKrum.f=2", "5"):
        assert MultiKrum(2).tolerated(5) == 1
    assert TrimmedMean(2).tolerated(5) == 2


# ---------------------------------------------------------------- refusals
def test_other_payloads_are_warned_of(tmp_path):
    with warned("method=['FedProto']", "TrimmedMean"):
        fit(tmp_path, [FedProto(aggregate_weights=True), TrimmedMean(1)], max_rounds=1)


def test_geometric_median_reads_the_weights_of_another_method(tmp_path):
    states = [
        fit(tmp_path, methods, max_rounds=1)[0] for methods in ([GeometricMedian()], [FedDisco(), GeometricMedian()])
    ]
    assert differs(*states)
