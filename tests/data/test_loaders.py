"""Loaders: the protocol, the loader of images, and the adapter of any other."""

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, WeightedRandomSampler

from fl_lightning.data import Batches, ClientLoader, Digits, RandomFlip, Rows, Synthetic, datamodule
from fl_lightning.data.loaders import PlainLoader, as_client_loader


def images(number=10, size=4, **options):
    """Every image holds its number, which is its label as well; the rows are the odd numbers below 2 N."""
    values = torch.arange(2 * number, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 2, 3, 3).contiguous()
    rows = torch.arange(1, 2 * number, 2)
    return Batches(values, torch.arange(2 * number), rows, size, **options)


def plain(number=10, size=4, **options):
    return DataLoader(TensorDataset(torch.arange(number)), batch_size=size, **options)


LOADERS = {
    "images": lambda: images(shuffle=True),
    "DataLoader": lambda: as_client_loader(plain(shuffle=True, generator=torch.Generator())),
    "list": lambda: as_client_loader([torch.arange(4), torch.arange(4, 8), torch.arange(8, 10)]),
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_keeps_the_protocol(name):
    loader = LOADERS[name]()
    assert isinstance(loader, ClientLoader)
    assert as_client_loader(loader) is loader
    assert isinstance(loader.deterministic, bool)
    passes = []
    for _ in range(2):
        loader.seed(5)
        passes.append(list(loader.batches()))
    assert len(passes[0]) == len(loader) == 3
    for (_, first), (_, second) in zip(*passes, strict=True):
        pairs = [(first, second)] if isinstance(first, torch.Tensor) else zip(first, second, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_an_object_without_all_members_is_adapted():
    class Half:
        deterministic = True

        def __len__(self):
            return 1

        def __iter__(self):
            return iter(["batch"])

        def seed(self, seed):
            raise AssertionError

        def batches(self, channels_last=False):
            raise AssertionError

    loader = as_client_loader(Half())
    assert isinstance(loader, PlainLoader) and not loader.deterministic
    assert list(loader.batches()) == [(None, "batch")]


def test_the_loaders_of_the_data_sets_need_no_adapter_or_have_one():
    digits, synthetic = Digits(num_clients=2), Synthetic(num_clients=2, largest=99)
    for data in (digits, synthetic):
        data.setup()
    assert isinstance(digits.train_dataloader(0), ClientLoader) and isinstance(digits.test_dataloader(), ClientLoader)
    loader = as_client_loader(synthetic.train_dataloader(0))
    loader.seed(1)
    first = torch.cat([y for _, (_, y) in loader.batches()])
    loader.seed(1)
    assert torch.equal(torch.cat([y for _, (_, y) in loader.batches()]), first)


# ---------------------------------------------------------------- rows
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_rows_belong_to_their_batch_also_where_batches_are_prepared_ahead(ahead):
    loader = images(shuffle=True, augment=[RandomFlip()])
    loader.seed(3)
    batches, queue, seen = loader.batches(), [], []
    queue += itertools.islice(batches, ahead)
    while queue:
        queue += itertools.islice(batches, 1)
        rows, (x, y) = queue.pop(0)
        assert isinstance(rows, Rows) and (rows.number, rows.batch_size) == (10, 4)
        assert torch.equal(loader.labels[loader.rows[rows.index]], y)
        assert torch.equal((x[:, 0, 0, 0] * 255).round().long(), y)
        seen.append(rows.index)
    assert [len(index) for index in seen] == [4, 4, 2]
    assert torch.cat(seen).sort().values.tolist() == list(range(10))


def test_rows_of_two_passes_at_once_are_not_mixed_up():
    loader = images(shuffle=True)
    for (first, (_, one)), (second, (_, other)) in zip(loader.batches(), loader.batches(), strict=True):
        assert torch.equal(loader.labels[loader.rows[first.index]], one)
        assert torch.equal(loader.labels[loader.rows[second.index]], other)


def test_rows_cannot_be_changed():
    rows, _ = next(images().batches())
    with pytest.raises(AttributeError):
        rows.number = 3


# ---------------------------------------------------------------- passes
def test_a_pass_with_rows_has_the_bits_of_one_without():
    options = {"shuffle": True, "augment": [RandomFlip()], "noise": 0.1, "mean": [0.5] * 3, "std": [0.25] * 3}
    loader = images(**options)
    loader.seed(7)
    with_rows = [batch for _, batch in loader.batches()]
    loader.generator.manual_seed(7)
    without = list(loader)
    for (x, y), (again, labels) in zip(with_rows, without, strict=True):
        assert torch.equal(x, again) and torch.equal(y, labels)


def test_an_example_is_deterministic_without_augmentation_and_noise():
    assert images(shuffle=True).deterministic
    assert not images(augment=[RandomFlip()]).deterministic
    assert not images(noise=0.1).deterministic


@pytest.mark.parametrize("drop_last", [False, True])
def test_full_batches_are_counted(drop_last):
    loader = images(drop_last=drop_last)
    sizes = [len(rows.index) for rows, _ in loader.batches()]
    assert sizes == ([4, 4] if drop_last else [4, 4, 2]) and len(loader) == len(sizes)
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
    loader = images(mean=[0.5] * 3)
    for _, (x, _) in loader.share(0, 2, channels_last=True):
        assert x.is_contiguous(memory_format=torch.channels_last)
    assert next(iter(loader))[0].is_contiguous()


# ---------------------------------------------------------------- shares of workers
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
    for index, batch in together.items():
        assert all(torch.equal(one, other) for one, other in zip(batch, whole[index], strict=True))


def test_a_share_computes_its_own_batches_only(monkeypatch):
    loader, computed = images(20, shuffle=True), []
    real = Batches._batch
    monkeypatch.setattr(
        Batches, "_batch", lambda self, rows, last: computed.append(len(rows)) or real(self, rows, last)
    )
    labels = [y for _, (_, y) in loader.share(1, 2)]
    assert computed == [4, 4]
    # in the order of the rows, although passes are shuffled
    assert torch.equal(torch.cat(labels), loader.rows.view(5, 4)[1::2].flatten())


# ---------------------------------------------------------------- the adapter
def test_the_adapter_seeds_a_generator_where_there_is_one():
    loader = as_client_loader(plain(shuffle=True, generator=torch.Generator()))

    def order(seed):
        loader.seed(seed)
        return torch.cat([batch[0] for _, batch in loader.batches()]).tolist()

    first = order(1)
    assert order(2) != first == order(1)
    for unseeded in (plain(shuffle=True), [1, 2]):
        before = torch.random.get_rng_state()
        as_client_loader(unseeded).seed(1)
        assert torch.equal(torch.random.get_rng_state(), before)


def test_the_adapter_seeds_the_generators_of_samplers():
    for make in (
        lambda sampler: DataLoader(range(20), 4, sampler=sampler),
        lambda sampler: DataLoader(range(20), batch_sampler=BatchSampler(sampler, 4, False)),
    ):
        loader = as_client_loader(make(WeightedRandomSampler(torch.ones(20), 20, generator=torch.Generator())))

        def order(seed, loader=loader):
            loader.seed(seed)
            return torch.cat([batch for _, batch in loader.batches()]).tolist()

        first = order(1)
        assert order(2) != first == order(1)


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


def test_the_adapter_gives_batches_as_they_are():
    batches = [object(), {"x": 1}]
    loader = as_client_loader(batches)
    assert [rows for rows, _ in loader.batches(channels_last=True)] == [None, None]
    assert all(given is one for (_, given), one in zip(loader.batches(), batches, strict=True))
    assert list(loader.share(1, 2, channels_last=True)) == [(1, {"x": 1})]


def test_batches_can_be_imported_from_where_they_were():
    assert datamodule.Batches is Batches
