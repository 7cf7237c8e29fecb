"""Partitioners end, lose nothing, and have the law they claim."""

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
    Partitioner,
    Plan,
    QuantityDirichlet,
    Shards,
)
from fl_lightning.data.partitioners import repair


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
    with refused("Dirichlet.alpha="):
        Dirichlet(alpha)


def test_an_impossible_min_size_is_refused_with_a_hint():
    with refused("Dirichlet.min_size=10"):
        Dirichlet(1.0)(np.zeros(50, int), 10, rng())


def test_a_plan_is_saved_loaded_and_hashed(tmp_path):
    labels = np.arange(60) % 3
    plan = Plan(IID()(labels, 4, rng()), labels, 3)
    plan.save(tmp_path / "plan.npz")
    again = Plan.load(tmp_path / "plan.npz")
    assert again.hash == plan.hash != Plan(IID()(labels, 4, rng(1)), labels, 3).hash
    assert all(np.array_equal(a, b) for a, b in zip(again.parts, plan.parts, strict=True))
    assert "4 clients of 15 to 15 samples" in plan.report()
    with np.load(tmp_path / "plan.npz", allow_pickle=False) as saved:
        assert saved["label_counts"].tolist() == plan.label_counts.tolist()
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


@pytest.mark.filterwarnings("error")
def test_the_skew_is_the_mean_jensen_shannon_distance_in_bits():
    labels = rng().integers(0, 7, 500)
    for partitioner in (Dirichlet(0.1, 1), Dirichlet(1.0), Shards(1), IID()):
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


def test_the_hash_tells_apart_who_holds_the_same_samples():
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


# ---------------------------------------------------------------- what every partitioner keeps
MAKE = {
    "IID": lambda: IID(),
    "Dirichlet": lambda: Dirichlet(0.1, min_size=1),
    "Dirichlet, plain": lambda: Dirichlet(0.1, min_size=0, cap=False),
    "ClientDirichlet": lambda: ClientDirichlet(0.1),
    "ClientDirichlet, uneven": lambda: ClientDirichlet(0.3, sigma=1.5),
    "Shards": lambda: Shards(1),
    "ClassesPerClient": lambda: ClassesPerClient(3),
    "QuantityDirichlet": lambda: QuantityDirichlet(0.2, min_size=1),
    "ByDomain": lambda: ByDomain(),
    "DomainDirichlet": lambda: DomainDirichlet(0.1, min_size=1),
    "Natural": lambda: Natural(),
}


def call(partitioner, labels, clients, generator, domains):
    return partitioner(labels, clients, generator, *((domains,) if partitioner.needs_domains else ()))


def test_every_partitioner_is_tested():
    known = {name.split(",")[0] for name in MAKE} | {"Pooled", "FromPlan"}
    assert {kind.__name__ for kind in concrete(Partitioner)} == known


def concrete(kind):
    classes = [inner for child in kind.__subclasses__() for inner in (child, *concrete(child))]
    return [one for one in classes if not one.__name__.startswith("_") and one.__module__.startswith("fl_lightning")]


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(number=st.integers(3, 300), classes=st.integers(1, 9), share=st.floats(0, 1), seed=st.integers(0, 1000))
def test_every_sample_goes_to_one_client_for_one_seed_always_the_same(name, number, classes, share, seed):
    labels = rng(seed).integers(0, classes, number)
    domains = np.arange(number) % 3
    clients = max(1, int(share * number))
    if "Domain" in name:
        clients = max(3, clients - clients % 3)
    if name == "Natural":
        domains, clients = np.arange(number) % clients, max(1, clients // 2)
    if name == "ClassesPerClient":
        there = len(np.unique(labels))
        partitioner = ClassesPerClient(min(3, there))
        clients = max(clients, -(-there // partitioner.n))
    else:
        partitioner = MAKE[name]()
    parts, again = (call(partitioner, labels, clients, rng(seed), domains) for _ in range(2))
    assert len(parts) == clients
    assert whole(parts, number)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


# ---------------------------------------------------------------- what each promises
BALANCED = np.repeat(np.arange(10), 500)


def plan_of(partitioner, clients=20, seed=0, labels=BALANCED, domains=None):
    return Plan(call(partitioner, labels, clients, rng(seed), domains), labels, 10, partitioner.moved)


# min and max size of a client and classes of one, on average, by the procedure of the reference codes
REFERENCE = {0.05: (488, 8916, 4.1), 0.1: (1516, 8165, 5.6), 0.5: (2912, 6818, 8.7), 1.0: (3324, 6540, 9.2)}


@pytest.mark.parametrize("alpha", REFERENCE)
def test_redrawn_dirichlet_has_the_sizes_of_the_references(alpha):
    """Means over 30 seeds agree within three times the standard error of the difference."""
    labels = np.repeat(np.arange(10), 5000)
    plans = [plan_of(Dirichlet(alpha, repair="redraw"), 10, seed, labels) for seed in range(30)]
    drawn = np.array(
        [(p.sizes.min(), p.sizes.max(), (p.label_counts > 0).sum(1).mean()) for p in plans if p.moved == 0]
    )
    assert len(drawn) == 30
    error = drawn.std(0, ddof=1) / np.sqrt(30)
    assert (np.abs(drawn.mean(0) - REFERENCE[alpha]) < 3 * np.sqrt(2) * error + 0.05).all(), drawn.mean(0)


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
            q = np.array(
                [0.0 if len(mine) >= len(labels) / clients else share for share, mine in zip(q, held, strict=True)]
            )
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
    strayed = 0
    for seed in range(12):
        ours, theirs = make(seed), make(seed)
        parts = Dirichlet(alpha, repair="redraw")(labels, clients, ours)
        reference = published_partition(labels.tolist(), alpha, clients, theirs)
        assert [part.tolist() for part in parts] == reference
        # as many draws, so that what is drawn next agrees as well
        assert ours.uniform() == theirs.uniform()
        counts = np.stack([np.bincount(labels[part], minlength=len(sizes)) for part in parts])
        before = counts.cumsum(1) - counts
        strayed += (counts[:-1][before[:-1] >= len(labels) / clients] > 0).sum()
    # only the last client can get samples although it holds its share
    assert strayed == 0


def test_stray_samples_go_to_the_last_client():
    """The last client holds its share, and gets the samples of a class that rounding down leaves over."""
    labels, found = np.repeat(np.arange(10), 80), 0
    for seed in range(200):
        parts = Dirichlet(0.1, 0, repair="redraw")(labels, 10, np.random.RandomState(seed))
        counts = np.bincount(labels[parts[-1]], minlength=10)
        found += (counts[counts.cumsum() - counts >= 80] > 0).any()
    assert found > 0


def test_a_class_of_which_all_open_clients_drew_nothing_is_drawn_again():
    labels = np.repeat(np.arange(10), 50)
    parts = Dirichlet(1e-5, 0, repair="redraw")(labels, 10, rng())
    assert whole(parts, 500)
    with refused("Dirichlet.alpha=1e-300", "repair=move"):
        Dirichlet(1e-300, 0, repair="redraw", max_draws=3)(labels, 10, np.random.RandomState(0))


def test_redrawing_gives_up_with_a_hint():
    with refused("Dirichlet.repair='redraw'", "Dirichlet.min_size=490", "repair=move"):
        Dirichlet(0.3, min_size=490, repair="redraw", max_draws=5)(BALANCED, 10, rng())


def test_without_cap_a_client_can_hold_far_more_than_its_share():
    capped, plain = (
        np.mean([plan_of(Dirichlet(0.05, 0, cap=cap), seed=s).sizes.max() for s in range(20)]) for cap in (True, False)
    )
    assert capped < 250 + 500 < plain


def test_client_dirichlet_has_equal_sizes_and_the_skew_of_alpha():
    plans = {alpha: plan_of(ClientDirichlet(alpha), seed=1) for alpha in (0.05, 0.5, 100.0)}
    for plan in plans.values():
        assert plan.sizes.tolist() == [250] * 20
    skews = [plan.skew() for plan in plans.values()]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.6 and skews[-1] < 0.15
    uneven = plan_of(ClientDirichlet(0.5, sigma=1.0)).sizes
    assert uneven.min() >= 1 and uneven.max() > 3 * np.median(uneven)


def test_client_dirichlet_gives_a_client_at_least_its_proportion_of_a_class_that_lasts():
    """The first pass is a multinomial draw of the proportions; what exhausted classes leave open comes on top."""
    proportions = rng(5).dirichlet(np.ones(10), size=2)
    counts = plan_of(ClientDirichlet(1.0), clients=2, seed=5, labels=np.repeat(np.arange(10), 5000)).label_counts
    wanted = proportions * 25_000
    lasting = wanted.sum(0) < 4500
    assert lasting.sum() >= 3
    assert (counts[:, lasting] >= (wanted - 5 * np.sqrt(wanted))[:, lasting]).all()


def test_shards_give_about_as_many_classes_as_there_are_shards():
    for per_client in (1, 2, 4):
        plan = plan_of(Shards(per_client), clients=10)
        assert plan.sizes.tolist() == [500] * 10
        assert (plan.label_counts > 0).sum(1).max() <= per_client
    with refused("Shards.per_client=3"):
        Shards(3)(np.zeros(50, int), 20, rng())


@pytest.mark.parametrize(("clients", "n"), [(20, 2), (20, 5), (7, 2), (5, 2), (10, 1)])
def test_every_client_holds_n_classes_divided_equally_among_owners(clients, n):
    counts = plan_of(ClassesPerClient(n), clients).label_counts
    assert ((counts > 0).sum(1) == n).all()
    for column in counts.T:
        owned = column[column > 0]
        assert owned.max() - owned.min() <= 1
    assert (counts[np.arange(clients), np.arange(clients) % 10] > 0).all()


@pytest.mark.parametrize(
    ("partitioner", "bad"),
    [
        (Dirichlet, {"alpha": 0.0}),
        (Dirichlet, {"min_size": -1}),
        (Dirichlet, {"max_draws": 0}),
        (ClientDirichlet, {"alpha": float("inf")}),
        (ClientDirichlet, {"sigma": -0.1}),
        (QuantityDirichlet, {"beta": 0.0}),
        (QuantityDirichlet, {"min_size": -1}),
        (Shards, {"per_client": 0}),
        (ClassesPerClient, {"n": 0}),
    ],
)
def test_an_argument_out_of_its_range_is_refused_by_name(partitioner, bad):
    ((name, value),) = bad.items()
    with refused(f"{partitioner.__name__}.{name}={value}"):
        partitioner(**bad)


def test_classes_per_client_says_what_is_impossible():
    with refused("ClassesPerClient.n=11"):
        plan_of(ClassesPerClient(11))
    with refused("ClassesPerClient.n=2"):
        plan_of(ClassesPerClient(2), clients=4)


def test_quantity_skew_has_its_sizes_and_iid_labels():
    plan = plan_of(QuantityDirichlet(0.3, min_size=5))
    assert plan.sizes.min() >= 5 and plan.sizes.max() > 4 * np.median(plan.sizes)
    largest = plan.label_counts[plan.sizes.argmax()]
    assert largest.max() < 2 * largest.min()
    assert plan_of(QuantityDirichlet(1e6)).sizes.std() < 5


def test_domains_stay_whole_and_are_divided_among_their_own_clients():
    labels, domains = np.tile(np.arange(10), 90), np.repeat([0, 1, 2], [300, 400, 200])
    assert [len(part) for part in ByDomain()(labels, 3, rng(), domains)] == [300, 400, 200]
    for partitioner in (ByDomain(), DomainDirichlet(0.1, min_size=5)):
        parts = partitioner(labels, 6, rng(), domains)
        assert [np.unique(domains[part]).tolist() for part in parts] == [[0], [0], [1], [1], [2], [2]]
    skews = [
        Plan(DomainDirichlet(alpha, 5)(labels, 6, rng(), domains), labels, 10).skew() for alpha in (0.05, 1.0, 1e5)
    ]
    assert skews == sorted(skews, reverse=True)
    with refused("data.num_clients=4"):
        ByDomain()(labels, 4, rng(), domains)


def test_natural_clients_are_the_writers_or_several_whole_ones_each():
    writers = np.repeat([2, 0, 1, 3, 4], [5, 3, 9, 1, 2])
    parts = Natural()(np.zeros(20, int), 5, rng(), writers)
    assert [np.unique(writers[part]).tolist() for part in parts] == [[0], [1], [2], [3], [4]]
    merged = Natural()(np.zeros(20, int), 2, rng(), writers)
    owners = [set(writers[part]) for part in merged]
    assert owners[0] | owners[1] == set(range(5)) and not owners[0] & owners[1]
    with refused("data.num_clients", "Natural=6"):
        Natural()(np.zeros(20, int), 6, rng(), writers)


def test_from_plan_deals_out_as_another_run_did_and_refuses_another_data_set(tmp_path):
    path = tmp_path / "plan.npz"
    plan = plan_of(Dirichlet(0.3))
    plan.save(path)
    assert plan_of(FromPlan(str(path)), seed=9).hash == plan.hash
    with refused("data.num_clients=3"):
        plan_of(FromPlan(str(path)), clients=3)
    with refused("FromPlan.path=", "5000", "40"):
        FromPlan(str(path))(np.zeros(40, int), 20, rng())


def test_a_bad_plan_is_named(tmp_path):
    path = tmp_path / "plan.npz"
    with refused("RUN/plan.npz"):
        Plan.load(path)
    path.write_bytes(b"nothing")
    with refused("plan=", "plan.npz", "RUN/plan.npz"):
        Plan.load(path)
    np.savez(path, indices=np.array([{"a": 1}], dtype=object), sizes=[1])
    with refused("plan=", "plan.npz", "RUN/plan.npz"):
        Plan.load(path)
    plan_of(IID()).save(path)
    with np.load(path) as saved:
        changed = dict(saved)
    changed["indices"] = changed["indices"][::-1]
    np.savez(path, **changed)
    with refused("plan=", "plan.npz", "hash"):
        Plan.load(path)


def test_a_client_knows_its_domain_where_it_has_one():
    domains = np.array([0, 0, 1, 1, 1, 0])
    plan = Plan(
        [np.array([0, 1]), np.array([2, 3, 5]), np.array([4])], np.zeros(6, int), 1, 0, domains, ("art", "photo")
    )
    assert [plan.domain(k) for k in range(3)] == ["art", None, "photo"]
    assert Plan([np.arange(6)], np.zeros(6, int), 1).domain(0) is None
