"""The updates of a cohort one by one: their entries, distances and combinations, on any number of workers."""

import pytest
import torch
from helpers.errors import refused
from helpers.runs import draw
from helpers.workers import together

from fl_lightning import Weighted
from fl_lightning.core.updates import ClientUpdate, Updates

STATE = {"w": torch.zeros(2, 3), "b": torch.zeros(()), "mean": torch.zeros(4), "count": torch.tensor(0)}
IDS = [1, 3, 4, 6, 9]


def client(k, **kwargs):
    change = {"w": draw(2, 3, seed=k), "b": draw(seed=k)}
    buffers = {"mean": draw(4, seed=k).float(), "count": torch.tensor(k)}
    payload = {"mine": {"norm": Weighted.of(float(k))}}
    return ClientUpdate(k, **{"weight": k / 7, "change": change, "buffers": buffers, "payload": payload} | kwargs)


def made(workers, ids=IDS):
    """Client k is on the worker of rank k modulo their number."""
    own = {k: client(k) for k in reversed(ids) if k % workers.size == workers.rank}
    return Updates(own, STATE, ["w", "b"], ["mean"], workers)


def of(function, size=1):
    """What all workers return."""
    results = together(size, lambda workers: function(made(workers)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    return results[0]


def test_they_are_a_mapping_with_ascending_ids_whose_entries_are_those_of_the_clients():
    def read(updates):
        assert [*updates] == IDS and len(updates) == 5 and 3 in updates and 2 not in updates
        one = updates[6]
        assert (one.id, one.weight, one.staleness) == (6, 6 / 7, 0)
        assert [*one.change] == ["w", "b"] and [*one.buffers] == ["mean", "count"]
        seen = updates.as_seen_by("mine")[4].payload["norm"].mean()
        assert seen == 4 and not one.payload
        return {**one.change, **one.buffers}, updates.entry("w"), updates.entry("b"), updates.entry("mean")

    for size in (1, 2, 3):
        one, weights, biases, means = of(read, size)
        wanted = client(6)
        torch.testing.assert_close(one, {**wanted.change, **wanted.buffers}, rtol=0, atol=0)
        rows = [client(k) for k in IDS]
        for found, part, name in ((weights, "change", "w"), (biases, "change", "b"), (means, "buffers", "mean")):
            torch.testing.assert_close(
                found, torch.stack([getattr(row, part)[name].double() for row in rows]), rtol=0, atol=0
            )


def test_squared_distances_are_of_all_parameters_and_of_no_buffer():
    flat = torch.stack([torch.cat([client(k).change["w"].flatten(), client(k).change["b"][None]]) for k in IDS])
    pairs = (flat[:, None] - flat[None]).square().sum(2)
    to = {"w": draw(2, 3, seed=50), "b": draw(seed=50)}
    to_one = (flat - torch.cat([to["w"].flatten(), to["b"][None]])).square().sum(1)
    for size in (1, 2):
        torch.testing.assert_close(of(lambda updates: updates.squared_distances(), size), pairs)
        torch.testing.assert_close(of(lambda updates: updates.squared_distances(to), size), to_one)
    assert torch.equal(of(lambda updates: updates.squared_distances()), of(lambda u: u.squared_distances(), 3))


def test_combinations_are_sums_or_means_of_changes_and_floating_point_buffers():
    table = draw(2, 5, seed=3)
    for size in (1, 3):
        several = of(lambda updates: dict(updates.combined(table)), size)
        first, mean = (of(lambda u, m=m: u.combined(table[0], mean=m), size) for m in (False, True))
        for name, part in {"w": "change", "b": "change", "mean": "buffers"}.items():
            rows = torch.stack([getattr(client(k), part)[name].double() for k in IDS])
            torch.testing.assert_close(several[name], torch.tensordot(table, rows, 1))
            assert torch.equal(several[name][0], first[name])
            torch.testing.assert_close(mean[name] * table[0].sum(), first[name])
    assert "count" not in several


def test_replaced_rows_are_read_in_place_of_the_old_ones_and_the_rest_stays():
    rows = {"w": draw(5, 2, 3, seed=8), "mean": draw(5, 4, seed=8)}

    def replace(updates):
        new = updates.as_seen_by("mine").replaced(rows)
        assert [*new] == IDS and new[9].weight == 9 / 7 and new[9].payload["norm"].mean() == 9
        assert torch.equal(updates.entry("w"), made_rows(updates)) and new[9].buffers["count"] == 9
        return {name: new.entry(name) for name in ("w", "b", "mean")}, new.squared_distances()

    for size in (1, 2):
        found, distances = of(replace, size)
        torch.testing.assert_close(found, {"b": of(lambda u: u.entry("b")), **rows}, rtol=0, atol=0)
        assert distances[0, 1] > 0


def made_rows(updates):
    return torch.stack([client(k).change["w"] for k in updates])


def test_another_number_of_rows_makes_new_clients():
    def bucketed(updates):
        new = updates.replaced(updates.combined(torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 1, 1, 1]]), mean=True))
        assert [*new] == [0, 1] and new[1].weight == 1
        return new.entry("w")

    rows = torch.stack([client(k).change["w"] for k in IDS])
    wanted = torch.stack([rows[:2].mean(0), rows[2:].mean(0)])
    for size in (1, 2, 3):
        torch.testing.assert_close(of(bucketed, size), wanted)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda u: u.combined([1.0, 2.0]), "weights=(2,)"),
        (lambda u: u.replaced({"w": torch.zeros(5, 3, 2)}), "w=(5, 3, 2)"),
        (lambda u: u.replaced({"count": torch.zeros(5)}), "count=(5,)"),
        (lambda u: u.replaced({"w": torch.zeros(2, 2, 3)}), "updates.replaced=['b', 'mean']"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with refused(words):
        of(call)
