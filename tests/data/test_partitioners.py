"""Partitioners end, lose nothing, and have the law they claim."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.data import IID, Dirichlet, Plan
from fl_lightning.data.partitioners import repair
from fl_lightning.errors import UsageError


def rng(seed=0):
    return np.random.default_rng(seed)


def whole(parts, number):
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(number))


@settings(max_examples=80, deadline=None)
@given(
    alpha=st.sampled_from([1e-300, 1e-3, 0.01, 0.1, 1.0, 100.0, 1e6]),
    number=st.integers(1, 300),
    classes=st.integers(1, 12),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_no_sample_is_lost_or_given_twice_and_min_size_is_kept(alpha, number, classes, share, seed):
    labels = rng(seed).integers(0, classes, number)
    clients = max(1, int(share * number))
    partitioner = Dirichlet(alpha, min_size=number // clients)
    parts = partitioner(labels, clients, rng(seed))
    assert len(parts) == clients
    assert whole(parts, number)
    assert min(map(len, parts)) >= number // clients
    assert whole(IID()(labels, clients, rng(seed)), number)


def test_iid_shares_differ_by_at_most_one():
    sizes = [len(part) for part in IID()(np.zeros(103, int), 10, rng())]
    assert max(sizes) - min(sizes) == 1


@pytest.mark.parametrize("partitioner", [IID(), Dirichlet(0.1)])
def test_a_partition_is_a_function_of_its_stream(partitioner):
    labels = np.arange(2000) % 10
    first, second, other = (partitioner(labels, 7, rng(seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def skew(alpha):
    labels = np.arange(5000) % 10
    return np.mean([Plan(Dirichlet(alpha)(labels, 10, rng(s)), labels, 10).skew() for s in range(5)])


def test_skew_falls_with_alpha():
    values = [skew(alpha) for alpha in (0.01, 0.1, 1.0, 100.0)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.6
    assert values[-1] < 0.1


def reference_draw(labels, alpha, num_clients, rng):
    """The published procedure, drawn once: the owner of each sample."""
    owner, held = np.zeros(len(labels), int), np.zeros(num_clients)
    for label in range(10):
        members = rng.permutation(np.flatnonzero(labels == label))
        q = rng.dirichlet([alpha] * num_clients) * (held < len(labels) / num_clients)
        cuts = (np.cumsum(q / q.sum()) * len(members)).astype(int)[:-1]
        for client, part in enumerate(np.split(members, cuts)):
            owner[part] = client
            held[client] += len(part)
    return owner


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5, 1.0])
def test_a_draw_that_needs_no_repair_is_the_references(alpha):
    """But for a few samples, at most one a class, which rounding gives to a client that is closed already."""
    labels, unrepaired = np.repeat(np.arange(10), 5000), 0
    for seed in range(30):
        partitioner = Dirichlet(alpha)
        owner = np.empty(len(labels), int)
        for client, part in enumerate(partitioner(labels, 10, rng(seed))):
            owner[part] = client
        if partitioner.moved == 0:
            unrepaired += 1
            other = reference_draw(labels, alpha, 10, rng(seed))
            assert (owner != other).sum() <= 10
    assert unrepaired > 15


def test_clients_are_as_large_as_the_references():
    """The published law on 50,000 samples, alpha 0.5: sizes from about 2,900 to 6,800, and 8.7 classes, on average."""
    labels = np.repeat(np.arange(10), 5000)
    plans = [Plan(Dirichlet(0.5)(labels, 10, rng(seed)), labels, 10) for seed in range(60)]
    assert np.mean([plan.sizes.min() for plan in plans]) == pytest.approx(2900, rel=0.12)
    assert np.mean([plan.sizes.max() for plan in plans]) == pytest.approx(6800, rel=0.05)
    assert np.mean([(plan.label_counts > 0).sum(1).mean() for plan in plans]) == pytest.approx(8.7, abs=0.2)


def test_a_client_with_its_share_gets_no_later_class():
    labels = np.repeat(np.arange(10), 100)
    for seed in range(20):
        plan = Plan(Dirichlet(0.05, min_size=0)(labels, 10, rng(seed)), labels, 10)
        before = np.cumsum(plan.label_counts, 1) - plan.label_counts
        assert not plan.label_counts[before >= 100].any()


@pytest.mark.parametrize(("clients", "alpha", "min_size"), [(100, 0.01, 10), (10_000, 0.1, 1), (10_000, 0.1, 5)])
def test_many_clients_and_tiny_alpha_end(clients, alpha, min_size):
    labels = np.repeat(np.arange(10), 5000)
    parts = Dirichlet(alpha, min_size)(labels, clients, rng())
    assert whole(parts, 50_000)
    assert min(map(len, parts)) >= min_size


def test_repair_takes_from_the_largest_client_and_says_how_many():
    labels, owner = np.zeros(30, int), np.array([0] * 20 + [1] * 10)
    assert repair(owner, labels, 3, 4) == 4
    assert np.bincount(owner).tolist() == [16, 10, 4]
    partitioner = Dirichlet(0.01, min_size=40)
    partitioner(np.arange(500) % 5, 10, rng())
    assert partitioner.moved > 0


@pytest.mark.parametrize("alpha", [0, -1.0])
def test_alpha_must_be_positive(alpha):
    with pytest.raises(UsageError, match=r"Dirichlet.alpha="):
        Dirichlet(alpha)


def test_an_impossible_min_size_is_refused_with_the_mend():
    with pytest.raises(UsageError, match=r"Dirichlet.min_size=10: .* give at most 5"):
        Dirichlet(1.0)(np.zeros(50, int), 10, rng())


def test_a_plan_is_saved_loaded_and_hashed(tmp_path):
    labels = np.arange(60) % 3
    plan = Plan(IID()(labels, 4, rng()), labels, 3)
    plan.save(tmp_path / "plan.npz")
    again = Plan.load(tmp_path / "plan.npz")
    assert again.hash == plan.hash != Plan(IID()(labels, 4, rng(1)), labels, 3).hash
    assert all(np.array_equal(a, b) for a, b in zip(again.parts, plan.parts, strict=True))
    assert "4 clients of 15 to 15 samples" in plan.report()
    with np.load(tmp_path / "plan.npz", allow_pickle=False) as found:
        assert found["label_counts"].tolist() == plan.label_counts.tolist()
    assert plan.label_counts.sum(0).tolist() == [20, 20, 20]


def test_a_report_says_what_was_realised():
    labels = np.repeat([0, 1], [4, 4])
    apart = Plan([np.arange(4), np.arange(4, 8)], labels, 2, moved=3)
    # all of one class against half and half: the root of (log2(4/3) + log2(2/3)/2 + 1/2) / 2
    assert apart.skew() == pytest.approx(0.5579, abs=1e-4)
    assert "1.0 of 2 classes each" in apart.report() and "3 samples moved" in apart.report()
    alike = Plan([np.array([0, 1, 4, 5]), np.array([2, 3, 6, 7])], labels, 2)
    assert alike.skew() == 0
    assert "moved" not in alike.report()
    assert Plan([np.arange(3), np.arange(3, 5)]).label_counts is None


def test_the_hash_tells_apart_who_holds_the_same_samples():
    first, second = (Plan([np.arange(cut), np.arange(cut, 6)]) for cut in (2, 3))
    assert first.hash != second.hash
    # sizes 2 and 4, then the indices, each as eight bytes with the lowest first
    written = b"".join(number.to_bytes(8, "little") for number in (2, 4, 0, 1, 2, 3, 4, 5))
    assert first.hash == hashlib.sha256(written).hexdigest()
    assert first.hash == Plan([np.arange(2, dtype=np.int32), np.arange(2, 6, dtype=">i8")]).hash


@pytest.mark.parametrize("parts", [[[0, 1], [1, 2]], [[0], [1]], [[0, 1, 2, 3]]])
def test_a_plan_that_loses_or_repeats_a_sample_is_refused(parts):
    with pytest.raises(UsageError, match="partitioner"):
        Plan([np.array(part) for part in parts], np.zeros(3, int), 1)
