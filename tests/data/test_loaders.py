"""Loaders: the protocol, the loader of images, and the adapter of any other."""

import itertools

import pytest
import torch
from helpers.runs import ready
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, WeightedRandomSampler

from fl_lightning.data import Batches, ClientLoader, Digits, ExampleIndices, RandomFlip, Synthetic
from fl_lightning.data.client_loaders import as_client_loader


def images(number=10, size=4, **options):
    """Every image holds its number, which is its label as well; the rows are the odd numbers below 2 N."""
    values = torch.arange(2 * number, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 2, 3, 3).contiguous()
    rows = torch.arange(1, 2 * number, 2)
    return Batches(values, torch.arange(2 * number), rows, size, **options)


def plain(number=10, size=4, **options):
    return DataLoader(TensorDataset(torch.arange(number)), batch_size=size, **options)


def equal(first, second):
    """Whether two batches are the same: a tensor, or several."""
    pairs = [(first, second)] if isinstance(first, torch.Tensor) else zip(first, second, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


LOADERS = {
    "images": lambda: images(shuffle=True),
    "augmented and noisy": lambda: images(shuffle=True, augment=[RandomFlip()], noise=0.1),
    "digits": lambda: ready(Digits(num_clients=20)).train_dataloader(0),
    "digits' test": lambda: ready(Digits()).test_dataloader(),
    "synthetic": lambda: ready(Synthetic(num_clients=2, largest=99)).train_dataloader(0),
    "DataLoader": lambda: as_client_loader(plain(shuffle=True, generator=torch.Generator())),
    "list": lambda: as_client_loader([torch.arange(4), torch.arange(4, 8), torch.arange(8, 10)]),
}


@pytest.mark.parametrize("name", LOADERS)
def test_equal_seeds_give_equal_passes(name):
    loader = LOADERS[name]()
    assert isinstance(loader, ClientLoader) and as_client_loader(loader) is loader
    assert loader.deterministic == (name not in ("augmented and noisy", "DataLoader", "list"))
    passes = []
    for seed in (5, 5, 6):
        torch.rand(3)
        loader.seed(seed)
        before = torch.random.get_rng_state()
        passes.append([batch for _, batch in loader.batches()])
        if name != "DataLoader":  # PyTorch seeds the worker processes that it could have from the global generator
            assert torch.equal(torch.random.get_rng_state(), before)
    first, again, other = passes
    assert len(first) == len(loader) == len(again)
    assert all(map(equal, first, again))
    assert all(map(equal, first, other)) == (name in ("list", "digits' test"))


# ---------------------------------------------------------------- batches of images


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_rows_belong_to_their_batch_also_where_batches_are_prepared_ahead(ahead):
    loader = images(shuffle=True, augment=[RandomFlip()])
    loader.seed(3)
    batches, queue, seen = loader.batches(), [], []
    queue += itertools.islice(batches, ahead)
    while queue:
        queue += itertools.islice(batches, 1)
        rows, (x, y) = queue.pop(0)
        assert isinstance(rows, ExampleIndices) and (rows.number, rows.batch_size) == (10, 4)
        assert torch.equal(loader.labels[loader.rows[rows.index]], y)
        assert torch.equal((x[:, 0, 0, 0] * 255).round().long(), y)
        seen.append(rows.index)
    assert [len(index) for index in seen] == [4, 4, 2]
    assert torch.cat(seen).sort().values.tolist() == list(range(10))


@pytest.mark.parametrize(("drop_last", "least"), [(False, 1), ("singletons", 2), (True, 4)])
def test_a_last_batch_that_is_not_full_or_of_one_example_can_be_dropped(drop_last, least):
    for number, sizes in ((10, [4, 4, 2]), (9, [4, 4, 1]), (3, [3]), (1, [1]), (8, [4, 4])):
        loader = images(number, drop_last=drop_last)
        expected = [size for size in sizes if size >= least]
        assert [len(rows.index) for rows, _ in loader.batches()] == expected and len(loader) == len(expected)
    assert list(Batches(loader.images, loader.labels, loader.rows[:0], 4, shuffle=True).batches()) == []


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_channels_last_changes_the_layout_and_no_value(noise):
    def given(channels_last):
        loader = images(mean=[0.5] * 3, std=[0.25] * 3, noise=noise)
        loader.seed(1)
        return [batch[0] for _, batch in loader.batches(channels_last)]

    for usual, last in zip(given(False), given(True), strict=True):
        assert usual.is_contiguous() and last.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(usual, last)
    for _, (x, _) in images(mean=[0.5] * 3).share(0, 2, channels_last=True):
        assert x.is_contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------- shares of workers
def test_the_noise_of_a_batch_does_not_depend_on_the_number_of_workers():
    alone, shared = ([*images(noise=0.1).share(rank, size)] for rank, size in ((0, 1), (1, 2)))
    assert [index for index, _ in shared] == [1] and equal(alone[1][1], shared[0][1])


@pytest.mark.parametrize("make", [images, lambda: as_client_loader(plain())], ids=["images", "DataLoader"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 0, 2, 99])
def test_the_shares_of_all_workers_hold_every_batch_once(make, size, limit):
    loader = make()
    whole = [batch for _, batch in loader.batches()]
    shares = [list(loader.share(rank, size, limit)) for rank in range(size)]
    for rank, share in enumerate(shares):
        assert all(index % size == rank for index, _ in share)
    together = dict(pair for share in shares for pair in share)
    assert sorted(together) == list(range(len(whole)))[:limit]
    assert sum(map(len, shares)) == len(together)
    assert all(equal(batch, whole[index]) for index, batch in together.items())


def test_a_share_is_in_the_order_of_the_rows_and_computes_its_own_batches_only():
    computed = []

    def count(images, generator):
        computed.append(len(images))
        return images

    loader = images(20, shuffle=True, augment=[count])
    labels = [y for _, (_, y) in loader.share(1, 2)]
    assert computed == [4, 4]
    assert torch.equal(torch.cat(labels), loader.rows.view(5, 4)[1::2].flatten())


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_workers_agree_on_the_order_of_a_shuffled_loader(generator):
    loader = as_client_loader(plain(12, 3, shuffle=True, generator=generator))
    shares = []
    for rank in range(2):
        torch.rand(rank + 1)
        if generator is not None:
            torch.rand(rank + 1, generator=generator)
        shares += [x for _, (x,) in loader.share(rank, 2)]
    order = torch.cat(shares)
    assert order.sort().values.tolist() == list(range(12)) and order.tolist() != list(range(12))


# ---------------------------------------------------------------- the adapter
@pytest.mark.parametrize(
    "make",
    [
        lambda sampler: DataLoader(range(20), 4, sampler=sampler),
        lambda sampler: DataLoader(range(20), batch_sampler=BatchSampler(sampler, 4, False)),
    ],
    ids=["sampler", "batch sampler"],
)
def test_the_adapter_seeds_the_generators_of_samplers(make):
    loader = as_client_loader(make(WeightedRandomSampler(torch.ones(20), 20, generator=torch.Generator())))

    def order(seed):
        loader.seed(seed)
        return torch.cat([batch for _, batch in loader.batches()]).tolist()

    first = order(1)
    assert order(2) != first == order(1)


def test_the_adapter_gives_batches_as_they_are():
    batches = [object(), {"x": 1}]
    loader = as_client_loader(batches)
    assert [rows for rows, _ in loader.batches(channels_last=True)] == [None, None]
    assert all(given is one for (_, given), one in zip(loader.batches(), batches, strict=True))
    assert list(loader.share(1, 2, channels_last=True)) == [(1, {"x": 1})]
