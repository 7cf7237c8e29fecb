"""Networks have the published numbers of parameters, and taps where they say."""

import pytest
import torch

from fl_lightning.errors import UsageError
from fl_lightning.models import MLP, FedCKACNN, FedUVCNN, ImageClassifier, Projector


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("width", "classes", "parameters"), [(4, 10, 1_331_402), (4, 7, 1_330_631), (1, 10, 161_594)])
def test_feduv_cnn_has_the_published_size(width, classes, parameters):
    assert count(ImageClassifier(FedUVCNN(width), Projector(256), classes)) == parameters


def test_fedcka_cnn_has_the_published_size():
    assert count(ImageClassifier(FedCKACNN())) == 151_802


def test_mlp_size():
    assert count(ImageClassifier(MLP(64, [32, 16]))) == 64 * 32 + 32 + 32 * 16 + 16 + 160 + 10


def shapes(model, x):
    found = {}
    for tap, path in model.taps.items():
        model.get_submodule(path).register_forward_hook(
            lambda m, a, out, tap=tap: found.__setitem__(tap, tuple(out.shape))
        )
    model(x)
    return found


def test_feduv_cnn_maps_have_the_published_sizes_at_32_and_96_px():
    for size, sides in ((32, [30, 30, 14, 12, 12, 5, 3, 3]), (96, [94, 94, 46, 44, 44, 21, 19, 19])):
        found = shapes(ImageClassifier(FedUVCNN(1), Projector(32)), torch.zeros(2, 3, size, size))
        assert [found[f"early.{i}"][-1] for i in range(8)] == sides
        assert found["representation"] == (2, 32)
        assert found["logits"] == (2, 10)


def test_fedcka_cnn_taps_are_after_relu_and_before_pooling():
    model = ImageClassifier(FedCKACNN())
    found = shapes(model, torch.randn(2, 3, 32, 32))
    assert [found[f"early.{i}"] for i in range(6)] == [
        (2, 16, 28, 28),
        (2, 32, 10, 10),
        (2, 120),
        (2, 84),
        (2, 84),
        (2, 256),
    ]
    assert model.get_submodule(model.taps["early.0"])(torch.randn(1, 3, 32, 32)).min() == 0


@pytest.mark.parametrize("size", [16, 28, 33])
def test_fedcka_cnn_takes_other_sizes(size):
    assert FedCKACNN(1, size)(torch.zeros(2, 1, size, size)).shape == (2, 256)


def test_the_projector_is_twice_linear_batchnorm_relu():
    projector = Projector(8)
    projector(torch.zeros(2, 5))
    assert [type(layer).__name__ for layer in projector.layers] == ["Linear", "BatchNorm1d", "ReLU"] * 2
    assert projector(torch.randn(4, 5)).min() == 0


def test_a_last_batch_of_one_is_skipped_only_where_batchnorm_needs_two():
    batch = (torch.randn(1, 64), torch.tensor([1]))
    assert ImageClassifier(MLP(64), Projector(8)).training_step(batch, 0) is None
    assert ImageClassifier(MLP(64)).training_step(batch, 0) is not None


@pytest.mark.parametrize(
    "build", [lambda: FedUVCNN(0), lambda: FedCKACNN(3, 8), lambda: ImageClassifier(MLP(4), num_classes=1)]
)
def test_sizes_out_of_range_are_refused(build):
    with pytest.raises(UsageError):
        build()
