"""Networks have the published numbers of parameters, and taps where they say."""

import pytest
import torch

from fl_lightning.errors import UsageError
from fl_lightning.models import MLP, FedCKACNN, FedUVCNN, ImageClassifier, Projector, ResNet18, ResNet50


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


RESNETS = {
    "FedDecorr's and MOON's ResNet-18": (ResNet18, {}, None, 10, 11_173_962),
    "FedUV's ResNet-18": (ResNet18, {"first_stride": 2, "init": "default"}, 512, 100, 11_751_716),
    "FedUV's ResNet-50": (ResNet50, {"stem": "large", "init": "default"}, 2048, 200, 32_318_728),
    "FedUV's ResNet-50 on 65 classes": (ResNet50, {"stem": "large", "init": "default"}, 2048, 65, 32_042_113),
}


@pytest.mark.parametrize("name", RESNETS)
def test_resnets_have_the_published_sizes(name):
    kind, options, width, classes, parameters = RESNETS[name]
    assert count(ImageClassifier(kind(**options), width and Projector(width), classes)) == parameters


@pytest.mark.parametrize("size", [32, 64, 96])
def test_resnet_taps_are_the_stem_every_block_and_the_stages(size):
    model = ImageClassifier(ResNet18())
    found = shapes(model, torch.randn(1, 3, size, size))
    sides = [size, *[size] * 2, *[size // 2] * 2, *[size // 4] * 2, *[size // 8] * 2]
    assert [found[f"early.{i}"][-1] for i in range(9)] == sides
    assert "early.9" not in found
    for stage in range(1, 5):
        assert found[f"stage.{stage}"] == found[f"early.{2 * stage}"] == (1, 32 * 2**stage, *[sides[2 * stage]] * 2)
    assert found["representation"] == (1, 512)


def test_resnet_taps_hold_what_the_layers_give_and_carry_gradient():
    model = ImageClassifier(ResNet18(1)).eval()
    seen = {}
    for tap in ("early.0", "early.1", "early.2"):
        model.get_submodule(model.taps[tap]).register_forward_hook(
            lambda m, a, out, tap=tap: seen.__setitem__(tap, out)
        )
    x = torch.randn(2, 1, 16, 16)
    model(x).sum()
    encoder = model.encoder
    stem = torch.relu(encoder.stem[1](encoder.stem[0](x)))
    torch.testing.assert_close(seen["early.0"], stem)
    block = encoder.layer1[0]
    inner = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(stem)))))
    torch.testing.assert_close(seen["early.1"], torch.relu(inner + stem))
    (gradient,) = torch.autograd.grad(seen["early.1"].square().sum(), encoder.stem[0].weight)
    assert gradient.abs().sum() > 0


def test_resnets_begin_as_their_papers_say():
    torch.manual_seed(0)
    he, default = ResNet18(), ResNet18(init="default")
    for model, deviation in ((he, (2 / (512 * 9)) ** 0.5), (default, (1 / (3 * 512 * 9)) ** 0.5)):
        assert model.layer4[1].conv1.weight.std().item() == pytest.approx(deviation, rel=0.01)
        assert model.layer4[1].bn1.weight.eq(1).all()
    assert he.stem[0].weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)


def test_group_normalisation_keeps_no_running_statistics():
    model = ResNet18(norm="group")
    assert not list(model.buffers())
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 512)
    assert list(ResNet18().buffers())


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
    "build",
    [
        lambda: FedUVCNN(0),
        lambda: FedCKACNN(3, 8),
        lambda: ImageClassifier(MLP(4), num_classes=1),
        lambda: ResNet18(first_stride=3),
        lambda: ResNet50(0),
    ],
)
def test_sizes_out_of_range_are_refused(build):
    with pytest.raises(UsageError):
        build()
