"""A user's loader on each client's part: its sampler and its arguments are kept, or refused in one line."""

import random

import numpy as np
import pytest
import torch
from helpers.errors import refused
from lightning.pytorch import LightningDataModule
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fl_lightning import Partitioned
from fl_lightning.data import Partitioner
from fl_lightning.data.client_loaders import last_batch

N = 90
X, Y = torch.arange(float(N)).view(N, 1).repeat(1, 8), torch.arange(N) % 3
DATA = TensorDataset(X, Y)


class Module(LightningDataModule):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def train_dataloader(self):
        return self.make()


class Blocks(Partitioner):
    """Clients of the given sizes, whose rows are in descending order."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __call__(self, labels, num_clients, rng):
        return [part[::-1].copy() for part in np.split(np.arange(len(labels)), np.cumsum(self.sizes)[:-1])]


def divided(sizes=(30, 60), dataset=DATA, **kwargs):
    data = Partitioned(Module(lambda: DataLoader(dataset, **kwargs)), Blocks(*sizes), len(sizes))
    data.setup()
    return data


def rows_of(loader, seed=0):
    """The rows of one pass, in its order."""
    loader.generator.manual_seed(seed)
    return [int(row[0]) for x, _ in loader for row in x]


def passes(data, k, number=20):
    return [rows_of(data.train_dataloader(k), seed) for seed in range(number)]


# ---------------------------------------------------------------- what each sampler becomes
def test_without_shuffle_a_pass_is_in_the_order_of_the_data_set():
    data = divided(batch_size=8)
    assert rows_of(data.train_dataloader(0)) == list(range(30))
    assert rows_of(data.train_dataloader(1), 5) == list(range(30, 90))


def test_weights_of_the_users_sampler_are_those_of_the_clients_rows():
    weights = (Y == 0).float() + 1e-3 * (Y == 1)
    data = divided(batch_size=8, sampler=WeightedRandomSampler(weights, N))
    drawn = [row for k in (0, 1) for one in passes(data, k) for row in one]
    assert np.mean([row % 3 == 0 for row in drawn]) > 0.99
    assert not any(row % 3 == 2 for row in drawn)
    assert {len(one) for one in passes(data, 0)} == {30} and {len(one) for one in passes(data, 1)} == {60}
    assert all(row < 30 for one in passes(data, 0) for row in one)


@pytest.mark.parametrize(("number", "shares"), [(90, [30, 60]), (1, [1, 1]), (10, [3, 7]), (300, [100, 200])])
def test_num_samples_is_in_proportion_to_the_rows_rounded_and_at_least_one(number, shares):
    for sampler in (WeightedRandomSampler(torch.ones(N), number), RandomSampler(DATA, True, number)):
        data = divided(batch_size=8, sampler=sampler)
        assert [len(rows_of(data.train_dataloader(k))) for k in (0, 1)] == shares
    data = divided(batch_size=8, sampler=RandomSampler(DATA, num_samples=number))
    assert [len(rows_of(data.train_dataloader(k))) for k in (0, 1)] == shares


def test_without_replacement_no_row_comes_twice():
    weights = (Y != 2).float()
    for sampler in (WeightedRandomSampler(weights, 60, replacement=False), RandomSampler(DATA, num_samples=60)):
        data = divided(batch_size=8, sampler=sampler)
        for k, number in ((0, 20), (1, 40)):
            for rows in passes(data, k):
                assert len(set(rows)) == len(rows) == number
    # two of the three rows have a weight, so that a client draws no more than these
    data = divided((3, 87), batch_size=8, sampler=WeightedRandomSampler(weights, 59, replacement=False))
    assert sorted(rows_of(data.train_dataloader(0))) == [0, 1]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_a_subset_sampler_keeps_those_of_its_indices_that_a_client_holds(kind):
    data = divided(batch_size=8, sampler=SubsetRandomSampler(kind([5, 80, 29, 31, 5, -90])))
    assert sorted(rows_of(data.train_dataloader(0))) == [0, 5, 5, 29]
    assert sorted(rows_of(data.train_dataloader(1))) == [31, 80]
    assert len({tuple(rows) for rows in passes(data, 0)}) > 3


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(torch.rand(N), 50),
        SubsetRandomSampler(range(0, N, 2)),
        RandomSampler(DATA, True, 50, torch.Generator()),
    ],
)
def test_a_pass_is_a_function_of_the_loaders_generator(sampler):
    loader = divided(batch_size=8, sampler=sampler).train_dataloader(1)
    first = rows_of(loader, 1)
    torch.rand(3)
    assert rows_of(loader, 1) == first != rows_of(loader, 2)
    before = torch.random.get_rng_state()
    rows_of(loader)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_plain_batch_sampler_is_batch_size_and_drop_last():
    weighted = WeightedRandomSampler((Y == 1).float(), N)
    data = divided(batch_sampler=BatchSampler(weighted, 7, True))
    loader = data.train_dataloader(0)
    assert (loader.batch_size, loader.drop_last) == (7, True)
    assert [len(y) for _, y in loader] == [7] * 4 and {row % 3 for row in rows_of(loader)} == {1}


def test_examples_without_automatic_batching():
    with refused("data.datamodule='Module'", "sampler", "shuffle", "RandomSampler"):
        divided(sampler=BatchSampler(RandomSampler(DATA), 7, False), batch_size=None)
    singles = divided(batch_size=None, shuffle=True).train_dataloader(0)
    assert singles.batch_size is None and sorted(int(x[0]) for x, _ in singles) == list(range(30))


# ---------------------------------------------------------------- what a client is said to hold
def test_a_client_counts_the_rows_that_its_sampler_can_draw():
    data = divided(batch_size=8, sampler=SubsetRandomSampler([1, 2, 4, 4, 50]))
    assert data.info(0).num_examples == 3 and data.info(0).label_counts.tolist() == [0, 2, 1]
    assert data.info(1).num_examples == 1 and data.plan.sizes.tolist() == [30, 60]
    data = divided(batch_size=8, sampler=WeightedRandomSampler((Y > 0) * 0.1, 5))
    assert data.info(1).num_examples == 40 and data.info(1).label_counts.tolist() == [0, 20, 20]
    assert divided(batch_size=8, sampler=RandomSampler(DATA, True, 7)).info(0).num_examples == 30


def test_a_client_that_draws_nothing_of_what_it_holds_is_refused():
    with refused("'Module'", "SubsetRandomSampler", "client 0"):
        divided(batch_size=8, sampler=SubsetRandomSampler([30, 31]))
    with refused("WeightedRandomSampler", "client 1"):
        divided(batch_size=8, sampler=WeightedRandomSampler((torch.arange(N) < 30).float(), 5))


@pytest.mark.parametrize("how", [{"shuffle": True}, {}, {"sampler": WeightedRandomSampler(torch.ones(N), 5)}])
def test_a_client_that_the_partitioner_left_empty_has_an_empty_loader(how):
    data = divided((0, 90), batch_size=8, **how)
    assert list(data.train_dataloader(0)) == [] and data.info(0).num_examples == 0


def test_the_last_batch_is_of_the_examples_that_are_drawn():
    def last(**how):
        data = divided((17, 73), batch_size=8, **how)
        return [last_batch(data, k) for k in (0, 1)]

    assert last(shuffle=True) == ["single", "single"]
    assert last(shuffle=True, drop_last=True) == ["dropped", "dropped"]
    assert last(sampler=RandomSampler(DATA, True, 20)) == ["short", "full"]  # 4 and 16


# ---------------------------------------------------------------- what is refused
class Mine(Sampler):
    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        return 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 1)] * 10)

    def __len__(self):
        return 10


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DataLoader(DATA, sampler=Mine()), ("sampler", "Mine", "shuffle")),
        (lambda: DataLoader(DATA, batch_sampler=[[0, 1]]), ("batch_sampler", "list", "batch_size")),
        (lambda: DataLoader(DATA, batch_sampler=BatchSampler(Mine(), 3, False)), ("sampler", "Mine", "shuffle")),
        (lambda: DataLoader(Stream(), batch_size=2), ("Stream", "length")),
        (lambda: [DataLoader(DATA)], ("train_dataloader()", "list", "DataLoader")),
        (lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 4, 2)), ("4 weights", "90 examples")),
        (lambda: DataLoader(DATA, sampler=RandomSampler(range(4))), ("RandomSampler", "4 examples")),
        (lambda: DataLoader(DATA, sampler=SubsetRandomSampler([90])), ("SubsetRandomSampler", "90 examples")),
    ],
)
def test_what_cannot_be_divided_is_named_with_the_remedy(make, named):
    with refused("data.datamodule='Module'", *named):
        Partitioned(Module(make), num_clients=3).setup()
    with refused("'LightningDataModule'", "train_dataloader"):
        Partitioned(LightningDataModule()).setup()


# ---------------------------------------------------------------- arguments of the loader


def test_the_arguments_of_the_loader_are_kept():
    given = {
        "num_workers": 1,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "timeout": 7,
        "multiprocessing_context": "spawn",
        "worker_init_fn": print,
        "collate_fn": list,
        "pin_memory": True,
        "drop_last": True,
        "batch_size": 5,
    }
    loader = divided(shuffle=True, **given).train_dataloader(0)
    kept = {name: getattr(loader, name) for name in given}
    assert kept.pop("multiprocessing_context").get_start_method() == given.pop("multiprocessing_context")
    assert kept == given


# ---------------------------------------------------------------- random numbers of items
class Noisy(Dataset):
    """Items with random numbers of torch, NumPy and Python, and labels that are known without them."""

    targets = Y

    def __len__(self):
        return N

    def __getitem__(self, index):
        noise = torch.rand(1) + np.random.rand() + random.random()  # noqa: NPY002
        return X[index] + noise, Y[index]


def test_items_get_their_random_numbers_from_the_generator_in_worker_processes():
    loader = divided((20, 70), Noisy(), batch_size=5, shuffle=True, num_workers=2).train_dataloader(0)

    def one_pass(seed):
        random.seed(random.random())
        loader.generator.manual_seed(seed)
        return torch.cat([x[:, 0] for x, _ in loader])

    first = one_pass(1)
    assert torch.equal(one_pass(1), first) and not torch.equal(one_pass(2), first)
    # the noise of items in different worker processes differs
    assert len((first % 1).unique()) == 20
