"""Images that stay on a device: the same batches as from main memory, and no more memory than is allowed."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import small_data, small_model, small_trainer
from helpers.without_values import IndexedByOperators, WithoutValues
from lightning.fabric import Fabric
from torch.utils.data import TensorDataset

from fl_lightning.data import AutoAugment, Batches, RandomCrop, RandomFlip, RandomRotation, client_loaders
from fl_lightning.engine import launching as run_module
from fl_lightning.training import device_loaders
from fl_lightning.training.device_loaders import Loaders
from fl_lightning.training.resident_images import ResidentImages

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
AUGMENTATIONS = {
    "none": [],
    "crop": [RandomCrop(2)],
    "reflected crop": [RandomCrop(2, "reflect")],
    "flip": [RandomFlip()],
    "crop and flip": [RandomCrop(2), RandomFlip(0.3)],
    "rotation": [RandomRotation(), RandomFlip()],
    "AutoAugment": [RandomCrop(2), AutoAugment()],
}


def loader_of(number=50, seed=0, **options):
    images = torch.randint(0, 256, (number, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Batches(images, torch.arange(number), torch.arange(0, number, 2), 8, shuffle=True, **options)


def resident(loader, images=None):
    """The loader on copies, where it may have some."""
    return (images or ResidentImages(CPU, 1e9)).of(loader)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("scale", [{}, {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}], ids=["", "normalised"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_copies_give_the_same_batches(name, noise, scale, channels_last):
    loader = loader_of(augment=AUGMENTATIONS[name], noise=noise, **scale)
    other = resident(loader)
    stays = name in ("rotation", "AutoAugment")  # which round otherwise on a GPU
    assert (other is loader) == stays and other.generator is loader.generator
    assert stays or other.images.data_ptr() != loader.images.data_ptr()
    passes = []
    for one in (loader, other):
        one.seed(5)
        passes.append([batch for _ in range(2) for batch in one.batches(channels_last)])
    for (rows, (x, y)), (rows_, (x_, y_)) in zip(*passes, strict=True):
        assert torch.equal(rows.index, rows_.index) and torch.equal(x, x_) and torch.equal(y, y_)
        assert x.stride() == x_.stride()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", ["none", "crop", "reflected crop", "flip", "crop and flip"])
def test_a_batch_of_images_on_a_gpu_is_computed_there(name, channels_last, monkeypatch):
    # which images are flipped depends on values
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda chosen: chosen[:2].long()[:, None])
    monkeypatch.setattr(client_loaders, "scaling", client_loaders.scaling.__wrapped__)  # else it keeps such tensors
    with WithoutValues(), IndexedByOperators():
        rows, images = torch.arange(8), torch.zeros(50, 8, 8, 3, dtype=torch.uint8, device=CUDA)
        labels = torch.zeros(50, dtype=torch.int64, device=CUDA)
        loader = Batches(images, labels, rows, 8, augment=AUGMENTATIONS[name], noise=0.1, mean=(0.5,), std=(0.5,))
        ((_, (x, y)),) = loader.batches(channels_last)
        assert x.device == y.device == CUDA and x.shape == (8, 3, 8, 8) and x.dtype == torch.float32


def test_clients_share_copies_which_go_with_their_originals():
    images, loader = ResidentImages(CPU, 1e9), loader_of()
    other = resident(loader, images)
    again = images.of(Batches(loader.images, loader.labels, loader.rows[:5], 8, shuffle=True))
    assert again.images is other.images and again.labels is other.labels and again.is_like(other)
    assert other.subset(torch.arange(3), 2).images is other.as_stored().images is other.images
    copied = weakref.ref(other.images)
    del loader, other, again
    gc.collect()
    assert copied() is None
    # tensors that do not last are not copied again and again
    loader = loader_of()
    assert resident(loader, images) is loader


def test_the_least_recently_used_copies_go_first():
    loaders = [loader_of(seed=seed) for seed in range(3)]
    size = loaders[0].images.nbytes + loaders[0].labels.nbytes
    images = ResidentImages(CPU, 2.5 * size)
    first, second, third = (resident(loader, images) for loader in loaders)
    assert images.of(loaders[1]).images is second.images and images.of(loaders[2]).images is third.images
    assert images.of(loaders[0]).images is not first.images  # in place of those of the second
    assert images.of(loaders[2]).images is third.images and images.of(loaders[1]).images is not second.images
    assert resident(loader_of(), ResidentImages(CPU, size)).images.device == CPU
    large = loader_of()
    assert resident(large, ResidentImages(CPU, size - 1)) is large


class Mine(Batches):
    """May do anything with its images."""


def test_a_subclass_of_batches_and_other_loaders_stay_as_they_are():
    loader = loader_of()
    own = Mine(loader.images, loader.labels, loader.rows, 8)
    listed = [TensorDataset(torch.arange(3))]
    images = ResidentImages(CPU, 1e9)
    for _ in range(2):
        assert images.of(own) is own and images.of(listed) is listed


@pytest.mark.parametrize("clients_per_step", [1, pytest.param(4, marks=pytest.mark.vectorized)])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_a_run_on_copies_is_the_same_run(tmp_path, monkeypatch, kind, clients_per_step):
    copied = []

    class Everywhere(ResidentImages):
        def __init__(self, device, limit):
            super().__init__(device, 1e9 if forced else limit)

        def of(self, loader):
            found = super().of(loader)
            copied.append(found is not loader)
            return found

    monkeypatch.setattr(device_loaders, "ResidentImages", Everywhere)
    weights = []
    for forced in (False, True):
        copied.clear()
        augment = [RandomCrop(1), RandomFlip()] if clients_per_step == 1 else []
        trainer = small_trainer(tmp_path, max_rounds=3, clients_per_step=clients_per_step)
        trainer.fit(small_model(kind), small_data(kind, augment=augment))
        assert any(copied) == forced
        weights.append({name: value.clone() for name, value in trainer.server.state.items()})
        weights[-1] |= {"accuracy": torch.tensor(trainer.metrics["test/accuracy"])}
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("hook", ["", "on_before_batch_transfer"])
def test_a_transfer_hook_sees_batches_in_main_memory(hook):
    data = small_data()
    data.setup()
    if hook:
        data = type("Hooked", (type(data),), {hook: lambda self, batch, index: batch})(num_clients=2)
        data.setup()
    loaders = Loaders(Fabric(accelerator="cpu"), data, 0, resident=1e9)
    for _ in range(2):
        with loaders.train(0, 0) as loader:
            pass
        (test,) = loaders.evaluation("test")
    assert (loader.images is data._train[0]) == (test.images is data._test[0]) == bool(hook)


def test_other_batches_go_to_a_gpu_through_pinned_memory(monkeypatch):
    through = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: through.append(tensor.shape) or tensor)
    fabric = SimpleNamespace(device=CUDA, strategy=Fabric(accelerator="cpu").strategy, to_device=lambda batch: batch)
    batch = {"x": torch.rand(2, 3), "more": [torch.arange(2), torch.eye(2).to_sparse(), "text"]}
    found = Loaders(fabric, small_data(), 0).to_device(batch)
    assert through == [(2, 3), (2,)] and found["x"] is batch["x"]


def test_workers_that_share_a_gpu_share_its_memory():
    class Two:
        def gather(self, value, label):
            return [value, (value[0], value[1], 60.0), ("elsewhere", value[1], 25.0)]

    assert run_module.memory_share(Two(), CUDA, 80.0) == run_module.SHARE * 25.0
