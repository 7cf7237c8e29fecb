"""The plan of a run: which client holds which samples."""

import hashlib

import numpy as np
import pytest
from helpers.errors import refused

from fl_lightning.data import IID, Dirichlet, Plan, Shards


def rng(seed=0):
    return np.random.default_rng(seed)


def test_a_plan_is_saved_loaded_and_hashed(tmp_path):
    labels = np.arange(60) % 3
    plan = Plan(IID()(labels, 4, rng()), labels, 3)
    plan.save(tmp_path / "plan.npz")
    again = Plan.load(tmp_path / "plan.npz")
    assert again.hash == plan.hash != Plan(IID()(labels, 4, rng(1)), labels, 3).hash
    assert all(np.array_equal(a, b) for a, b in zip(again.parts, plan.parts, strict=True))
    with np.load(tmp_path / "plan.npz", allow_pickle=False) as saved:
        assert saved["label_counts"].tolist() == plan.label_counts.tolist()
    assert plan.label_counts.sum(0).tolist() == [20, 20, 20]


def test_a_report_describes_sizes_classes_skew_and_moved_samples():
    labels = np.repeat([0, 1], [4, 4])
    apart = Plan([np.arange(4), np.arange(4, 8)], labels, 2, moved=3)
    # all of one class against half and half: the root of (log2(4/3) + log2(2/3)/2 + 1/2) / 2
    assert apart.skew() == pytest.approx(0.5579, abs=1e-4)
    for words in ("2 clients of 4 to 4 samples", "1.0 of 2 classes each", "3 samples moved"):
        assert words in apart.report()
    alike = Plan([np.array([0, 1, 4, 5]), np.array([2, 3, 6, 7])], labels, 2)
    assert alike.skew() == 0 and "moved" not in alike.report()
    assert Plan([np.arange(3), np.arange(3, 5)]).label_counts is None


@pytest.mark.filterwarnings("error")
def test_the_skew_is_the_mean_jensen_shannon_distance_in_bits():
    labels = rng().integers(0, 7, 500)
    for partitioner in (Dirichlet(0.1, 1), Shards(1), IID()):
        plan = Plan(partitioner(labels, 9, rng()), labels, 8)
        local = plan.label_counts / plan.label_counts.sum(1, keepdims=True)
        overall = plan.label_counts.sum(0) / 500
        middle = (local + overall) / 2
        with np.errstate(all="ignore"):
            entropies = [np.nansum(p * np.log2(p / middle), 1) for p in (local, np.broadcast_to(overall, local.shape))]
        assert plan.skew() == pytest.approx(np.sqrt(sum(entropies) / 2).mean(), abs=1e-12)
    # three of ten of one class everywhere: shares without an exact binary form
    even = Plan(list(np.arange(70).reshape(7, 10)), np.tile([0, 0, 0, 1, 1, 1, 1, 1, 1, 1], 7), 3)
    assert even.skew() == 0


def test_the_hash_is_that_of_sizes_and_indices_on_every_machine():
    first, second = (Plan([np.arange(cut), np.arange(cut, 6)]) for cut in (2, 3))
    assert first.hash != second.hash
    # sizes 2 and 4, then the indices, each as eight bytes with the lowest first
    written = b"".join(number.to_bytes(8, "little") for number in (2, 4, 0, 1, 2, 3, 4, 5))
    assert first.hash == hashlib.sha256(written).hexdigest()
    assert first.hash == Plan([np.arange(2, dtype=np.int32), np.arange(2, 6, dtype=">i8")]).hash


@pytest.mark.parametrize("parts", [[[0, 1], [1, 2]], [[0], [1]], [[0, 1, 2, 3]]])
def test_a_plan_that_loses_or_repeats_a_sample_is_refused(parts):
    with refused("data.partitioner="):
        Plan([np.array(part) for part in parts], np.zeros(3, int), 1)


def test_a_missing_damaged_or_changed_plan_is_refused(tmp_path):
    path = tmp_path / "plan.npz"
    with refused("RUN/plan.npz"):
        Plan.load(path)
    path.write_bytes(b"nothing")
    with refused("plan=", "plan.npz", "RUN/plan.npz"):
        Plan.load(path)
    Plan(IID()(np.zeros(40), 4, rng())).save(path)
    with np.load(path) as saved:
        changed = dict(saved)
    changed["indices"] = changed["indices"][::-1]
    np.savez(path, **changed)
    with refused("plan=", "plan.npz", "hash"):
        Plan.load(path)


def test_a_client_knows_its_domain_where_it_has_one():
    parts, domains = [np.array([0, 1]), np.array([2, 3, 5]), np.array([4])], np.array([0, 0, 1, 1, 1, 0])
    plan = Plan(parts, np.zeros(6, int), 1, 0, domains, ("art", "photo"))
    assert [plan.domain(k) for k in range(3)] == ["art", None, "photo"]
    assert Plan([np.arange(6)], np.zeros(6, int), 1).domain(0) is None
