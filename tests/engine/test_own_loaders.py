"""Loaders of the user's own: lists of batches, objects with a length, combined loaders."""

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, history, small_trainer
from helpers.tiny import TinyModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.data import FederatedDataModule
from fl_lightning.utilities.errors import ClientError


def batches(seed=0, number=4):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 8, generator=generator), torch.arange(6) % 3) for _ in range(number)]


def plain(seed=0, number=4):
    x, y = (torch.cat(parts) for parts in zip(*batches(seed, number), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=6)


class Own:
    """An iterable with a length, and nothing else."""

    def __init__(self, seed=0, length=4):
        self.batches, self.length = batches(seed), length

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return self.length


class Data(FederatedDataModule):
    """Two clients with the loaders that functions give."""

    def __init__(self, train, val=lambda: [], test=lambda: []):
        super().__init__(num_clients=2)
        self.train_dataloader, self.val_dataloader, self.test_dataloader = train, val, test

    def setup(self, stage=None):
        self.plan = self.partition(np.arange(48) % 3, 3)

    def train_dataloader(self, k=0):
        """The constructor gives another."""


class Net(TinyModule):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", self.loss(batch))


class Pairs(Net):
    """A step on the batches of two loaders."""

    def training_step(self, batch, batch_idx):
        first, second = batch.values() if isinstance(batch, dict) else batch
        return self.loss(first) if second is None else self.loss(first) + self.loss(second)


def fit(folder, data, make=Net, **kwargs):
    model, trainer = make(), small_trainer(folder, enable_progress_bar=False, **{"max_rounds": 1, **kwargs})
    trainer.fit(model, data)
    return model.state_dict(), history(trainer)


KINDS = {
    "list": batches,
    "tuple": lambda seed=0: tuple(batches(seed)),
    "own": Own,
    "tensors": lambda seed=0: TensorDataset(*(torch.stack(parts) for parts in zip(*batches(seed), strict=True))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_iterable_with_a_length_trains_and_evaluates_as_a_loader_of_its_batches(tmp_path, kind):
    make = KINDS[kind]
    expected = fit(tmp_path / "loader", Data(plain, lambda: plain(8), lambda: [plain(8), plain(9)]))
    assert "test/loss/dataloader_idx_1" in expected[1][0]
    data = Data(make, lambda: make(8), lambda: [plain(8), Own(9)])
    state, rows = fit(tmp_path / "own", data, name="run")
    assert_same_bits(state, expected[0])
    assert rows == expected[1]


class TwoSteps(Net):
    """The step of :class:`Pairs` on batches that are pairs already."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0]) + self.loss(batch[1])


@pytest.mark.parametrize("combine", [list, lambda two: CombinedLoader(dict(enumerate(two)), "max_size_cycle")])
def test_combined_loaders_give_the_batches_that_lightning_makes_of_them(tmp_path, combine):
    def several(k=0):
        return combine([plain(k), plain(k + 5, number=2)])

    def pairs(k=0):
        return [*zip(batches(k), batches(k + 5, 2) * 2, strict=True)]

    state, _ = fit(tmp_path / "combined", Data(several), Pairs)
    expected, _ = fit(tmp_path / "pairs", Data(pairs), TwoSteps)
    assert_same_bits(state, expected)


@pytest.mark.parametrize(("mode", "steps"), [("min_size", 2), ("max_size", 4), ("max_size_cycle", 4)])
def test_the_length_of_combined_loaders_is_known_before_a_pass(tmp_path, mode, steps):
    data = Data(lambda k=0: CombinedLoader([plain(k), plain(k, number=2)], mode))
    taken = []

    class Counts(Pairs):
        def on_train_end(self):
            taken.append((self.trainer.num_training_batches, self.trainer.global_step))

    fit(tmp_path, data, Counts)
    assert taken == [(steps, steps)] * 2


def raises(k=0):
    return {}["loader"]


KEPT = iter(batches())
TRAIN, VAL = "train_dataloader(0)", "val_dataloader"
REFUSED = {
    "generator": ([lambda k=0: (batch for batch in batches())], (TRAIN, "='generator'", "length")),
    "text": ([lambda k=0: "abc"], (TRAIN, "='str'", "DataLoader")),
    "sequential": (
        [lambda k=0: CombinedLoader([plain()], "sequential")],
        (TRAIN, "CombinedLoader.mode='sequential'", "max_size_cycle"),
    ),
    "error": ([raises], (TRAIN, "KeyError", "test_own_loaders.py:", "(raises)", "'loader'")),
    "text of val": ([batches, lambda: "abc"], (VAL, "='str'", "DataLoader")),
    "min_size of val": (
        [batches, lambda: CombinedLoader([plain()], "min_size")],
        (VAL, "CombinedLoader.mode='min_size'", "sequential"),
    ),
    "used up in val": ([batches, lambda: KEPT], (VAL, "='list_iterator'")),
}


@pytest.mark.parametrize(("loaders", "words"), REFUSED.values(), ids=REFUSED)
def test_loaders_that_cannot_be_counted_or_read_are_refused_before_anything_is_written(tmp_path, loaders, words):
    with refused("data=Data", *words):
        fit(tmp_path, Data(*loaders))
    assert not list(tmp_path.iterdir())


def test_a_generator_that_is_made_anew_evaluates(tmp_path):
    expected = fit(tmp_path / "list", Data(batches, batches))
    assert fit(tmp_path / "generator", Data(batches, lambda: (batch for batch in batches())))[1] == expected[1]


def test_a_pass_of_fewer_batches_than_its_length_says_is_no_pass(tmp_path):
    with refused("client 0", "round 0", "train_dataloader", kind=ClientError):
        fit(tmp_path / "short", Data(lambda k=0: Own(length=5)))
    once = Own()
    once.batches = iter(once.batches)
    with refused("client 1", "round 0", "train_dataloader", kind=ClientError):
        fit(tmp_path / "once", Data(lambda k=0: once))


@pytest.mark.parametrize("nest", [lambda a, b: [a, [b]], lambda a, b: {"a": a, "b": b}, lambda a, b: (a, b)])
def test_lists_and_dictionaries_of_loaders_are_read_in_order(tmp_path, nest):
    expected = fit(tmp_path / "flat", Data(batches, lambda: [plain(8), plain(9)]))[1]
    assert fit(tmp_path / "nested", Data(batches, lambda: nest(plain(8), Own(9))))[1] == expected
