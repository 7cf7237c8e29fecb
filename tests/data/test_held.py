"""A process that runs many configs reads a data set once, and each run has what it would have read."""

import numpy as np
import pytest

from fl_lightning.data import PACS, Digits, NpyImages, datamodule
from fl_lightning.data.datamodule import Held
from fl_lightning.seeding import base_seed


@pytest.fixture
def held(monkeypatch):
    held = Held(1)
    monkeypatch.setattr(datamodule, "HELD", held)
    return held


@pytest.fixture
def reads(monkeypatch):
    """The folders that were read."""
    roots, read = [], NpyImages.read

    def counted(self, root):
        roots.append(root.name)
        return read(self, root)

    monkeypatch.setattr(NpyImages, "read", counted)
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
    for (x, y), (z, w) in zip(alone.test_dataloader(), second.test_dataloader(), strict=True):
        assert x.equal(z) and y.equal(w)


def test_other_data_another_scale_and_another_seed_are_read_anew(tmp_path, held, reads, monkeypatch):
    one, two = folder(tmp_path / "one", 4), folder(tmp_path / "two", 5)
    assert [ready(root).num_classes for root in (one, two, one)] == [4, 5, 4]
    assert ready(one, mean=[0.5] * 3, std=[0.5] * 3).mean == (0.5, 0.5, 0.5)
    monkeypatch.setenv("PL_GLOBAL_SEED", str(base_seed() + 1))
    ready(one)
    assert reads == ["one", "two", "one", "one", "one"]


def test_what_does_not_show_its_arguments_is_not_held(held):
    class Hidden(Digits):
        def __init__(self, factor=1, **kwargs):
            super().__init__(**kwargs)
            self._factor = factor
            self.loads = 0

        def load(self):
            self.loads += 1
            return super().load()

    made = [Hidden(factor, num_clients=2) for factor in (1, 2)]
    for data in made:
        data.setup("fit")
    assert [data.loads for data in made] == [1, 1]


def test_folders_of_images_are_held(held):
    for _ in range(2):
        PACS(offline=True, num_clients=4, image_size=8).setup("fit")
    assert len(held._known) == 1
