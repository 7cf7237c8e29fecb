"""Partitioners end, lose nothing and have the law they claim; a plan says which client holds which samples."""

import hashlib

import numpy as np
import pytest
from helpers.errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.data import (
    IID,
    ByDomain,
    ClassesPerClient,
    ClientDirichlet,
    Dirichlet,
    DomainDirichlet,
    FromPlan,
    Natural,
    Plan,
    Pooled,
    QuantityDirichlet,
    Shards,
)

BALANCED = np.repeat(np.arange(10), 500)


def rng(seed=0):
    return np.random.default_rng(seed)


def whole(parts, number):
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(number))


def call(partitioner, labels, clients, generator, domains=None):
    return partitioner(labels, clients, generator, *((domains,) if partitioner.needs_domains else ()))


def plan_of(partitioner, clients=20, seed=0, labels=BALANCED, domains=None):
    return Plan(call(partitioner, labels, clients, rng(seed), domains), labels, 10, partitioner.moved)


# ---------------------------------------------------------------- what every partitioner keeps
LABELS, DOMAINS = np.array([2, 1, 0, 2, 0, 0, 0, 1, 1, 0, 0, 1]), np.arange(12) % 3
# partitioner and the parts of 12 samples that it draws from the seed 0
PARTS = {
    "IID": (lambda: IID(), [[9, 2, 7], [4, 5, 11], [0, 3], [6, 10], [8, 1]]),
    "Dirichlet": (lambda: Dirichlet(0.1, min_size=2), [[5, 6, 9, 10], [0, 11], [3, 8], [1, 2, 4, 7]]),
    "Dirichlet, no cap": (lambda: Dirichlet(0.5, 0, cap=False), [[5, 6, 10], [9], [0, 1, 2, 3, 4, 7, 8, 11]]),
    "Dirichlet, redraw": (lambda: Dirichlet(0.5, 1, repair="redraw"), [[10, 6, 3, 5], [9], [2, 0, 1, 4, 11, 7, 8]]),
    "ClientDirichlet": (lambda: ClientDirichlet(0.3), [[0, 2, 4, 6], [1, 3, 7, 8], [5, 9, 10, 11]]),
    "ClientDirichlet, uneven": (lambda: ClientDirichlet(0.3, sigma=1.0), [[2, 10], [0, 1, 3, 6, 7, 8, 9, 11], [4, 5]]),
    "Shards": (lambda: Shards(2), [[6, 10, 4, 5], [7, 11, 0, 3], [9, 2, 8, 1]]),
    "ClassesPerClient": (lambda: ClassesPerClient(2), [[1, 8, 10], [5, 7, 11], [3, 6, 9], [0, 2, 4]]),
    "QuantityDirichlet": (lambda: QuantityDirichlet(0.2, min_size=2), [[4, 10], [6, 2], [5, 1, 3, 9, 8, 0], [11, 7]]),
    "ByDomain": (lambda: ByDomain(), [[6, 0], [3, 9], [10, 7], [4, 1], [5, 11], [2, 8]]),
    "DomainDirichlet": (lambda: DomainDirichlet(0.3, 1), [[0, 6], [3, 9], [1, 4], [7, 10], [8, 11], [2, 5]]),
    "Natural": (lambda: Natural(), [[2, 5, 8, 11, 0, 3, 6, 9], [1, 4, 7, 10]]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_seed_names_a_partition_for_good(name):
    make, parts = PARTS[name]
    drawn = [[part.tolist() for part in call(make(), LABELS, len(parts), rng(seed), DOMAINS)] for seed in range(4)]
    assert drawn[0] == parts and len(set(map(str, drawn))) > 1


@pytest.mark.parametrize("name", PARTS)
def test_parts_depend_on_labels_where_the_partitioner_needs_them(name):
    make, parts = PARTS[name]
    drawn = call(make(), np.roll(LABELS, 1), len(parts), rng(), DOMAINS)
    assert ([part.tolist() for part in drawn] != parts) == make().needs_labels


@pytest.mark.parametrize("name", PARTS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(number=st.integers(3, 300), classes=st.integers(1, 9), share=st.floats(0, 1), seed=st.integers(0, 1000))
def test_every_sample_goes_to_exactly_one_client(name, number, classes, share, seed):
    labels, domains = rng(seed).integers(0, classes, number), np.arange(number) % 3
    clients, partitioner = max(1, int(share * number)), PARTS[name][0]()
    if partitioner.needs_domains:
        clients = max(3, clients - clients % 3)
        if name == "DomainDirichlet":
            partitioner.inner.min_size = 0
        if name == "Natural":
            domains = np.arange(number) % clients
            clients = max(1, clients // 2)
    if name == "Shards":
        clients = max(1, clients // 2)
    if name == "ClassesPerClient":
        partitioner.n = min(2, len(np.unique(labels)))
        clients = max(clients, -(-classes // partitioner.n))
    if hasattr(partitioner, "min_size"):
        partitioner.min_size = 0 if "redraw" in name else min(partitioner.min_size, number // clients)
    parts = call(partitioner, labels, clients, rng(seed), domains)
    assert len(parts) == clients
    assert whole(parts, number)
    assert min(map(len, parts)) >= getattr(partitioner, "min_size", 0)


@pytest.mark.parametrize(
    ("partitioner", "clients", "words"),
    [
        (Dirichlet(1.0), 10, ("Dirichlet.min_size=10", "at most 5")),
        (QuantityDirichlet(1.0), 10, ("QuantityDirichlet.min_size=10", "at most 5")),
        (Shards(3), 20, ("Shards.per_client=3", "60 shards of 50")),
        (ClassesPerClient(11), 20, ("ClassesPerClient.n=11", "10 classes")),
        (ClassesPerClient(2), 4, ("ClassesPerClient.n=2", "3 or more")),
        (Pooled(), 2, ("data.num_clients", "Pooled=2", "give 1")),
        (ByDomain(), 4, ("data.num_clients=4", "multiple of 3")),
        (ByDomain(), 54, ("data.num_clients=54", "17 samples for 18")),
        (Natural(), 4, ("data.num_clients", "Natural=4", "3 natural clients")),
    ],
)
def test_too_many_clients_or_too_few_samples_are_refused(partitioner, clients, words):
    with refused(*words):
        call(partitioner, np.arange(50) % 10, clients, rng(), np.arange(50) % 3)


def test_the_least_that_is_enough_is_accepted():
    labels, domains = np.arange(50) % 10, np.arange(50) % 3
    assert plan_of(Dirichlet(1.0, 5), 10, labels=labels).sizes.tolist() == [5] * 10
    assert plan_of(QuantityDirichlet(1.0, 5), 10, labels=labels).sizes.tolist() == [5] * 10
    assert plan_of(Shards(5), 10, labels=labels).sizes.tolist() == [5] * 10
    assert (plan_of(ClassesPerClient(2), 5, labels=labels).label_counts > 0).sum(1).tolist() == [2] * 5
    assert plan_of(ClassesPerClient(10), 2, labels=labels).label_counts.min() > 0
    assert plan_of(ByDomain(), 48, labels=labels, domains=domains).sizes.min() == 1
    assert Pooled()(labels, 1, rng())[0].tolist() == list(range(50))
    assert not Pooled.needs_labels and not FromPlan.needs_labels


# ---------------------------------------------------------------- what each promises


@pytest.mark.parametrize(
    ("make", "alphas", "most", "least"),
    [
        (lambda alpha: Dirichlet(alpha), (0.01, 0.1, 1.0, 100.0), 0.6, 0.1),
        (lambda alpha: ClientDirichlet(alpha), (0.05, 0.5, 100.0), 0.6, 0.15),
        (lambda alpha: DomainDirichlet(alpha, 5), (0.05, 1.0, 1e5), 0.5, 0.1),
    ],
    ids=["Dirichlet", "ClientDirichlet", "DomainDirichlet"],
)
def test_skew_falls_with_alpha(make, alphas, most, least):
    domains = np.arange(5000) // 10 % 2
    skews = [np.mean([plan_of(make(a), 10, s, domains=domains).skew() for s in range(3)]) for a in alphas]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > most and skews[-1] < least


@pytest.mark.parametrize(("clients", "alpha", "min_size"), [(100, 0.01, 10), (10_000, 0.1, 5), (7, 1e-300, 700)])
def test_many_clients_and_tiny_alpha_end(clients, alpha, min_size):
    parts = Dirichlet(alpha, min_size)(np.repeat(np.arange(10), 5000), clients, rng())
    assert whole(parts, 50_000)
    assert min(map(len, parts)) >= min_size


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (lambda least: Dirichlet(0.05, least), "ba2b3055e9a40a9a"),
        (lambda least: QuantityDirichlet(0.2, least), "9faca1c53ce26ce3"),
    ],
)
def test_only_clients_that_are_too_small_gain_and_the_moved_samples_are_counted(make, first):
    assert plan_of(make(60)).hash.startswith(first)
    for seed in range(5):
        drawn, kept = (plan_of(make(least), 20, seed) for least in (0, 60))
        small = drawn.sizes < 60
        assert small.any() and (kept.sizes[small] == 60).all()
        assert (kept.sizes[~small] <= drawn.sizes[~small]).all() and kept.sizes.min() == 60
        assert drawn.moved == 0 and kept.moved == (60 - drawn.sizes[small]).sum()


def published_partition(labels, alpha, clients, state, least=10):
    """The procedure of MOON, NIID-Bench, FedDecorr and FedUV, on lists, written from its description.

    Class by class: shuffle its samples, draw the clients' proportions, strike out the clients that hold N/K, normalise,
    and cut at the rounded-down cumulative sum. Again from the start while a client has fewer than ``least``; at the end
    every client's list is shuffled.
    """
    smallest = -1
    while smallest < least:
        held = [[] for _ in range(clients)]
        for label in range(max(labels) + 1):
            members = [i for i, own in enumerate(labels) if own == label]
            state.shuffle(members)
            q = state.dirichlet([alpha] * clients)
            full = [len(mine) >= len(labels) / clients for mine in held]
            q = np.where(full, 0.0, q)
            q = q / q.sum()
            ends = [int(total * len(members)) for total in np.cumsum(q)[:-1]]
            for mine, start, end in zip(held, [0, *ends], [*ends, len(members)], strict=True):
                mine += members[start:end]
        smallest = min(map(len, held))
    for mine in held:
        state.shuffle(mine)
    return held


@pytest.mark.parametrize(
    ("alpha", "clients", "sizes"), [(0.1, 10, [80] * 10), (0.5, 7, [30, 0, 71, 1, 40]), (5.0, 3, [60])]
)
@pytest.mark.parametrize("make", [np.random.RandomState, np.random.default_rng])
def test_redrawn_parts_are_the_very_draws_of_the_references(alpha, clients, sizes, make):
    labels = rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    for seed in range(8):
        ours, theirs = make(seed), make(seed)
        parts = Dirichlet(alpha, repair="redraw")(labels, clients, ours)
        assert [part.tolist() for part in parts] == published_partition(labels.tolist(), alpha, clients, theirs)
        # as many draws, so that what is drawn next agrees as well
        assert ours.uniform() == theirs.uniform()


def test_a_class_of_which_all_open_clients_drew_nothing_is_drawn_again():
    labels = np.repeat(np.arange(10), 50)
    assert whole(Dirichlet(1e-5, 0, repair="redraw")(labels, 10, rng()), 500)
    with refused("Dirichlet.alpha=1e-300", "repair=move"):
        Dirichlet(1e-300, 0, repair="redraw", max_draws=3)(labels, 10, np.random.RandomState(0))
    with refused("Dirichlet.repair='redraw'", "Dirichlet.min_size=490", "repair=move"):
        Dirichlet(0.3, min_size=490, repair="redraw", max_draws=5)(BALANCED, 10, rng())


def test_client_dirichlet_has_equal_sizes_or_lognormal_ones():
    assert plan_of(ClientDirichlet(0.05), seed=1).sizes.tolist() == [250] * 20
    uneven = plan_of(ClientDirichlet(0.5, sigma=1.0)).sizes
    assert uneven.min() >= 1 and uneven.max() > 3 * np.median(uneven)


@pytest.mark.parametrize(("clients", "n"), [(20, 2), (20, 5), (7, 2), (5, 2), (10, 1)])
def test_every_client_holds_n_classes_divided_equally_among_owners(clients, n):
    counts = plan_of(ClassesPerClient(n), clients).label_counts
    assert ((counts > 0).sum(1) == n).all()
    for column in counts.T:
        owned = column[column > 0]
        assert owned.max() - owned.min() <= 1
    assert (counts[np.arange(clients), np.arange(clients) % 10] > 0).all()


def test_domains_stay_whole_and_are_divided_among_their_own_clients():
    labels, domains = np.tile(np.arange(10), 90), np.repeat([0, 1, 2], [300, 400, 200])
    assert [len(part) for part in ByDomain()(labels, 3, rng(), domains)] == [300, 400, 200]
    for partitioner in (ByDomain(), DomainDirichlet(0.1, min_size=90)):
        parts = partitioner(labels, 6, rng(), domains)
        assert [np.unique(domains[part]).tolist() for part in parts] == [[0], [0], [1], [1], [2], [2]]
    one_class = np.zeros(900, int)
    partitioner(one_class, 6, rng(), domains)
    alone, generator = Dirichlet(0.1, 90), rng()
    moved = [alone(one_class[domains == d], 2, generator) and alone.moved for d in range(3)]
    assert partitioner.moved == sum(moved) > max(moved)


def test_natural_clients_are_the_writers_or_several_whole_ones_each():
    writers = np.repeat([2, 0, 1, 3, 4], [5, 3, 9, 1, 2])
    parts = Natural()(np.zeros(20, int), 5, rng(), writers)
    assert [np.unique(writers[part]).tolist() for part in parts] == [[0], [1], [2], [3], [4]]
    merged = Natural()(np.zeros(20, int), 2, rng(), writers)
    owners = [set(writers[part]) for part in merged]
    assert owners[0] | owners[1] == set(range(5)) and not owners[0] & owners[1]


def test_from_plan_deals_out_as_another_run_did_and_refuses_another_data_set(tmp_path):
    path = tmp_path / "plan.npz"
    plan = plan_of(Dirichlet(0.3))
    plan.save(path)
    again = plan_of(FromPlan(str(path)), seed=9)
    assert again.hash == plan.hash and (again.label_counts == plan.label_counts).all()
    with np.load(path, allow_pickle=False) as saved:
        assert (saved["label_counts"] == plan.label_counts).all()
    with refused("data.num_clients=3"):
        plan_of(FromPlan(str(path)), clients=3)
    with refused("FromPlan.path=", "5000", "40"):
        FromPlan(str(path))(np.zeros(40, int), 20, rng())


def test_a_report_describes_sizes_classes_skew_and_moved_samples():
    labels = np.repeat([0, 1], [4, 4])
    apart = Plan([np.arange(4), np.arange(4, 8)], labels, 2, moved=3)
    for words in ("2 clients of 4 to 4 samples", "1.0 of 2 classes each", "3 samples moved"):
        assert words in apart.report()
    alike = Plan([np.array([0, 1, 4, 5]), np.array([2, 3, 6, 7])], labels, 2)
    assert alike.skew() == 0 and "moved" not in alike.report()
    assert Plan([np.arange(8)], labels, 2).report().startswith("1 client of 8 to 8 samples")
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
    for parts in ([np.arange(2, dtype=np.int32), np.arange(2, 6, dtype=">i8")], [[0, 1], [2, 3, 4, 5]]):
        assert first.hash == Plan(parts).hash
    assert Plan([[0, 1, 2], [], np.array([])], np.zeros(3, int), 1).label_counts.tolist() == [[3], [0], [0]]


@pytest.mark.parametrize("parts", [[[0, 1], [1, 2]], [[0], [1]], [[0, 1, 2, 3]]])
def test_a_plan_that_loses_or_repeats_a_sample_is_refused(parts):
    with refused("data.partitioner="):
        Plan([np.array(part) for part in parts], np.zeros(3, int), 1)


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], [0.0, 1.0], [0.5, 1.0]])
def test_labels_that_are_not_numbers_of_classes_are_refused(labels):
    with refused("data: labels="):
        Plan([np.arange(2)], np.array(labels), 2)


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
