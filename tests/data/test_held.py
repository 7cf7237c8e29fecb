"""A process that runs many configs reads a data set once, and each run has what it would have read."""

import numpy as np
import pytest
import torch

from fl_lightning.data import Digits, NpyImages, datamodule
from fl_lightning.data.datamodule import Held


@pytest.fixture(autouse=True)
def held(monkeypatch):
    """The data set that was last read is held, as in a suite of runs."""
    held = Held(1)
    monkeypatch.setattr(datamodule, "HELD", held)
    return held


@pytest.fixture
def reads(monkeypatch):
    """The folders that were read."""
    roots, read = [], NpyImages.read
    monkeypatch.setattr(NpyImages, "read", lambda self, root: roots.append(root.name) or read(self, root))
    return roots


def folder(path, classes):
    path.mkdir()
    rng = np.random.default_rng(classes)
    for split in ("train", "test"):
        np.save(path / f"{split}_images.npy", rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8))
        np.save(path / f"{split}_labels.npy", np.arange(40) % classes)
    return str(path)


def ready(root, **kwargs):
    data = NpyImages(root, num_clients=2, **kwargs)
    data.setup("fit")
    return data


def test_the_same_data_are_read_once_whatever_is_done_with_them(tmp_path, held, reads):
    root = folder(tmp_path / "one", 4)
    first, second = ready(root), ready(root, batch_size=8, train_size=20, val_fraction=0.2)
    assert reads == ["one"]
    assert (second.num_classes, second.mean, second.std) == (4, first.mean, first.std)
    held.number = 0
    alone = ready(root, batch_size=8, train_size=20, val_fraction=0.2)
    assert reads == ["one", "one"] and alone.plan.hash == second.plan.hash
    for ours, theirs in zip(alone.test_dataloader(), second.test_dataloader(), strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_other_data_another_scale_and_another_seed_are_read_anew(tmp_path, reads, monkeypatch):
    one, two = folder(tmp_path / "one", 4), folder(tmp_path / "two", 5)
    assert [ready(root).num_classes for root in (one, two, one)] == [4, 5, 4]
    assert ready(one, mean=[0.5] * 3, std=[0.5] * 3).mean == (0.5, 0.5, 0.5)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    ready(one)
    assert reads == ["one", "two", "one", "one", "one"]


def test_data_whose_arguments_do_not_show_are_read_each_time():
    loads = []

    class Hidden(Digits):
        def __init__(self, factor=1, **kwargs):
            super().__init__(**kwargs)
            self._factor = factor

        def load(self):
            loads.append(self._factor)
            return super().load()

    for factor in (1, 2):
        Hidden(factor, num_clients=2).setup("fit")
    assert loads == [1, 2]
