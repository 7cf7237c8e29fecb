"""Networks have the published numbers of parameters, taps where they say, and any normalisation."""

from functools import partial

import pytest
import torch
from helpers.errors import refused
from helpers.tiers import sample
from torch import nn
from torchvision.models import mobilenet_v3_small, resnet18, squeezenet1_1

from fl_lightning.cli.cli import Parser
from fl_lightning.models import (
    MLP,
    MOONCNN,
    Backbone,
    Encoder,
    FedCKACNN,
    FedDynCNN,
    FedUVCNN,
    ImageClassifier,
    Logistic,
    MobileNetV2,
    ProjectionHead,
    Projector,
    ResNet18,
    ResNet20,
    ResNet32,
    ResNet50,
    with_group_norm,
)
from fl_lightning.utilities.errors import UsageError


def count(model):
    return sum(p.numel() for p in model.parameters())


SIZES = {
    "FedUV's CNN": (lambda: FedUVCNN(4), Projector, 10, 1_331_402),
    "FedUV's CNN of width 1": (lambda: FedUVCNN(1), Projector, 10, 161_594),
    "FedCKA's CNN": (FedCKACNN, None, 10, 151_802),
    "MOON's CNN": (MOONCNN, ProjectionHead, 10, 92_626),
    "MOON's CNN without head": (MOONCNN, None, 10, 62_006),
    "FedDyn's CNN": (FedDynCNN, None, 10, 797_962),
    "FedDecorr's ResNet-18": (ResNet18, None, 10, 11_173_962),
    "MOON's ResNet-18": (ResNet18, lambda: ProjectionHead(512), 10, 11_565_386),
    "MOON's ResNet-50": (ResNet50, lambda: ProjectionHead(2048), 100, 28_246_948),
    "FedUV's ResNet-18": (lambda: ResNet18(first_stride=2, init="default"), lambda: Projector(512), 100, 11_751_716),
    "FedUV's ResNet-50": (lambda: ResNet50(stem="large", init="default"), lambda: Projector(2048), 200, 32_318_728),
    "FedDecorr's ResNet-32": (ResNet32, None, 10, 464_154),
    "MLP": (lambda: MLP(64, [32, 16]), None, 10, 64 * 32 + 32 + 32 * 16 + 16 + 160 + 10),
    "MLP without layers": (lambda: MLP(64, []), None, 10, 64 * 10 + 10),
    "ResNet-20": (ResNet20, None, 10, 269_722),
    "FedDecorr's MobileNetV2": (MobileNetV2, None, 10, 2_296_922),
    "FedDecorr's MobileNetV2 on 200": (MobileNetV2, None, 200, 2_540_312),
}


LARGE = ("MOON's ResNet-18", "MOON's ResNet-50")


@pytest.mark.parametrize("name", sample(list(SIZES), *(name for name in SIZES if name not in LARGE)))
def test_networks_have_the_published_sizes(name):
    encoder, head, classes, parameters = SIZES[name]
    assert count(ImageClassifier(encoder(), head and head(), classes)) == parameters


@pytest.mark.parametrize("size", [32, 96])
@pytest.mark.parametrize(
    ("build", "width", "blocks", "smallest"),
    [(lambda s: MobileNetV2(), 1280, 18, 8), (lambda s: ResNet20(), 64, 10, 4), (lambda s: MOONCNN(3, s), 84, 4, None)],
    ids=["MobileNetV2", "ResNet20", "MOONCNN"],
)
def test_networks_take_the_sizes_of_the_papers(build, width, blocks, smallest, size):
    model = ImageClassifier(build(size), num_classes=7).eval()
    taps = shapes(model, torch.randn(1, 3, size, size))
    assert taps["representation"] == (1, width)
    assert taps["logits"] == (1, 7)
    assert sum(tap.startswith("early") for tap in taps) == blocks + 1
    if smallest:
        assert taps[f"early.{blocks - 1}"][-1] == size // smallest
        assert taps["early.0"][-1] == size


def test_any_network_of_torchvision_is_a_backbone():
    network = {"network": mobilenet_v3_small, "options": {"dropout": 0.0}}
    model = ImageClassifier(Backbone(**network, early=["features.0", "features.1"], named={"pool": "avgpool"})).eval()
    taps = shapes(model, torch.randn(1, 3, 32, 32))
    assert taps["early.0"] == (1, 16, 16, 16) and taps["early.1"] == (1, 16, 8, 8)
    assert taps["pool"] == (1, 576, 1, 1)
    assert taps["representation"] == (1, 1024) and taps["logits"] == (1, 10)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Backbone(mobilenet_v3_small, head="classifier.1"),
            ("head='classifier.1'", "classifier.0", "classifier.3"),
        ),
        (lambda: Backbone(mobilenet_v3_small, early=["nope"]), ("early='nope'", "features.9")),
        (lambda: Backbone(mobilenet_v3_small, named={"pool": "nope"}), ("named='nope'",)),
        (lambda: Backbone(squeezenet1_1), ("head=''", "(no linear layer)")),
        (lambda: Backbone(torch.nn.Linear(3, 2)), ("head=''", "(no linear layer)")),
        (lambda: Backbone(mobilenet_v3_small(), {"dropout": 0.1}), ("options={'dropout'", "network.init_args")),
        (lambda: Backbone(mobilenet_v3_small, {"weights": "nope"}), ("options={'weights'", "KeyError", "'nope'")),
    ],
)
def test_a_backbone_whose_layers_or_options_do_not_exist_is_refused(make, words):
    with refused(f"Backbone.{words[0]}", *words[1:]):
        make()


def built(network, **options):
    """A Backbone as the command line builds it."""
    parser = Parser(exit_on_error=False)
    parser.add_subclass_arguments(Encoder, "encoder")
    given = {"class_path": "Backbone", "init_args": {"network": network, **options}}
    return parser.instantiate(parser.parse_object({"encoder": given})).encoder


ALEXNET = {"class_path": "torchvision.models.AlexNet", "init_args": {"num_classes": 7, "dropout": 0.1}}


@pytest.mark.parametrize(
    ("network", "options"),
    [(ALEXNET, {}), ("torchvision.models.alexnet", {"options": ALEXNET["init_args"]})],
    ids=["class", "path and options"],
)
def test_the_command_line_builds_a_backbone(network, options):
    encoder = built(network, **options, early=["features.0"], named={"pool": "avgpool"})
    assert encoder.network.classifier[0].p == 0.1
    assert isinstance(encoder.network.classifier[6], torch.nn.Identity)
    assert (encoder.early, encoder.named) == (("network.features.0",), {"pool": "network.avgpool"})
    assert ImageClassifier(encoder).eval()(torch.zeros(1, 3, 63, 63)).shape == (1, 10)


def test_an_activation_in_place_does_not_overwrite_the_tap_before_it():
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(inplace=True), torch.nn.Conv2d(4, 5, 3), torch.nn.Flatten()]
    encoder = Backbone(torch.nn.Sequential(*layers, torch.nn.Linear(80, 2)), early=["0", "2"]).eval()
    seen, x = tapped(encoder, dict(zip("ab", encoder.early, strict=True))), torch.randn(2, 3, 8, 8)
    encoder(x)
    first = layers[0](x)
    assert first.min() < 0
    torch.testing.assert_close(seen["a"], first)
    torch.testing.assert_close(seen["b"], layers[2](torch.relu(first)))


IMAGES = torch.zeros(2, 3, 32, 32)
UNFIT = {
    "channels": (lambda: FedUVCNN(1, 1), IMAGES, ("FedUVCNN.in_channels=1", "3 x 32 x 32", "give 3")),
    "channels of MobileNetV2": (lambda: MobileNetV2(1), IMAGES, ("MobileNetV2.in_channels=1", "give 3")),
    "no images": (FedCKACNN, torch.zeros(2, 60), ("FedCKACNN.in_channels=3", "60")),
    "size": (lambda: FedCKACNN(3, 28), IMAGES, ("FedCKACNN.image_size=28", "3 x 32 x 32")),
    "not square": (MOONCNN, IMAGES[:, :, :28], ("MOONCNN.image_size=32", "3 x 28 x 32")),
    "too small": (FedUVCNN, IMAGES[..., :20], ("FedUVCNN.smallest=21", "3 x 32 x 20")),
    "features": (lambda: Logistic(60), IMAGES, ("Logistic.in_features=60", "3 x 32 x 32", "give 3072")),
}


@pytest.mark.parametrize("case", UNFIT)
def test_inputs_that_do_not_fit_the_network_are_refused(case):
    build, x, words = UNFIT[case]
    with refused(*words):
        ImageClassifier(build())(x)


def tapped(module, paths):
    """What the submodules at these paths give, by name, after a forward pass."""
    seen = {}
    for name, path in paths.items():
        module.get_submodule(path).register_forward_hook(lambda m, a, out, name=name: seen.__setitem__(name, out))
    return seen


def shapes(model, x):
    seen = tapped(model, model.taps)
    model(x)
    return {name: tuple(out.shape) for name, out in seen.items()}


def test_feduv_cnn_maps_have_the_published_sizes_at_32_and_96_px():
    for size, sides in ((32, [30, 30, 14, 12, 12, 5, 3, 3]), (96, [94, 94, 46, 44, 44, 21, 19, 19])):
        taps = shapes(ImageClassifier(FedUVCNN(1), Projector(32)), torch.zeros(2, 3, size, size))
        assert [taps[f"early.{i}"][-1] for i in range(8)] == sides
        assert taps["representation"] == (2, 32)
        assert taps["logits"] == (2, 10)


def test_fedcka_cnn_taps_are_after_relu_and_before_pooling():
    model = ImageClassifier(FedCKACNN())
    taps = shapes(model, torch.randn(2, 3, 32, 32))
    assert [taps[f"early.{i}"] for i in range(7)] == [
        (2, 16, 28, 28),
        (2, 32, 10, 10),
        (2, 120),
        (2, 84),
        (2, 84),
        (2, 256),
        (2, 10),
    ]
    assert model.get_submodule(model.taps["early.0"])(torch.randn(1, 3, 32, 32)).min() == 0


@pytest.mark.parametrize("size", sample([32, 64, 96], 32))
def test_resnet_taps_are_the_stem_every_block_and_the_stages(size):
    model = ImageClassifier(ResNet18())
    taps = shapes(model, torch.randn(1, 3, size, size))
    sides = [size, *[size] * 2, *[size // 2] * 2, *[size // 4] * 2, *[size // 8] * 2]
    assert [taps[f"early.{i}"][-1] for i in range(9)] == sides
    assert taps["early.9"] == (1, 10) and "early.10" not in taps
    for stage in range(1, 5):
        assert taps[f"stage.{stage}"] == taps[f"early.{2 * stage}"] == (1, 32 * 2**stage, *[sides[2 * stage]] * 2)
    assert taps["representation"] == (1, 512)


def test_resnet_taps_hold_what_the_layers_give_and_carry_gradient():
    model = ImageClassifier(ResNet18(1)).eval()
    seen = tapped(model, {tap: model.taps[tap] for tap in ("early.0", "early.1")})
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


def replaced(norm):
    """A network without an argument for its normalisation."""
    model = ImageClassifier(MobileNetV2())
    return with_group_norm(model) if norm == "group" else model


GROUPED = {"ResNet-18": ResNet18, "FedUV's CNN": lambda norm: FedUVCNN(1, norm=norm), "MOON's CNN": MOONCNN}
GROUPED["any network"] = replaced


@pytest.mark.parametrize("name", GROUPED)
def test_group_normalisation_keeps_no_running_statistics_and_sees_one_image_at_a_time(name):
    """Whatever images are with it, an image has the same output, in training and in evaluation, alone or not."""
    torch.manual_seed(0)
    model, images = GROUPED[name](norm="group"), torch.randn(3, 3, 32, 32)
    assert not list(model.buffers())
    together = model.train()(images)
    alone = torch.cat([model.train()(image[None]) for image in images])
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.eval()(images), together)
    batched = GROUPED[name](norm="batch")
    assert list(batched.buffers())
    assert not torch.allclose(batched.train()(images)[:2], batched.train()(images[:2]), rtol=1e-2)


def test_a_last_batch_of_one_is_skipped_only_where_batchnorm_needs_two():
    batch = (torch.randn(1, 64), torch.tensor([1]))
    assert ImageClassifier(MLP(64), Projector(8)).training_step(batch, 0) is None
    for model in (ImageClassifier(MLP(64)), with_group_norm(ImageClassifier(MLP(64), Projector(8)))):
        with pytest.warns(UserWarning, match="self.log"):  # without a trainer
            assert model.training_step(batch, 0) is not None


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *((kind, {"in_channels": 0}) for kind in (FedCKACNN, MOONCNN, FedDynCNN, ResNet50)),
        (FedUVCNN, {"width": 0}),
        (FedCKACNN, {"image_size": 8}),
        (ResNet18, {"first_stride": 3}),
        *((ResNet50, {key: "weird"}) for key in ("stem", "norm", "init")),
        *((kind, {"norm": "layer"}) for kind in (FedUVCNN, MOONCNN)),
        (partial(ImageClassifier, MLP(4)), {"num_classes": 1}),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(kind, bad):
    ((key, value),) = bad.items()
    with pytest.raises(UsageError) as caught:
        kind(**bad)
    assert f"{key}={value!r}:" in str(caught.value)


def test_every_layer_is_replaced_and_nothing_else_changes():
    torch.manual_seed(0)
    before = resnet18()
    after = with_group_norm(resnet18(), groups=4)
    after.load_state_dict(before.state_dict(), strict=False)
    kinds = [(type(a), type(b)) for a, b in zip(before.modules(), after.modules(), strict=True)]
    assert all(b is (nn.GroupNorm if a is nn.BatchNorm2d else a) for a, b in kinds)
    assert dict(after.named_parameters()).keys() == dict(before.named_parameters()).keys()
    assert not list(after.buffers())
    assert {part.num_groups for part in after.modules() if isinstance(part, nn.GroupNorm)} == {4}


def test_scale_shift_and_epsilon_are_kept_and_a_layer_in_two_places_stays_one():
    layer = nn.BatchNorm2d(6, eps=0.1)
    nn.init.uniform_(layer.weight)
    other = nn.BatchNorm2d(4, affine=False)
    module = with_group_norm(nn.Sequential(nn.Sequential(layer), layer, nn.Conv2d(6, 4, 1), other), groups=2)
    assert module[0][0] is module[1] and module[1].weight is layer.weight and module[1].eps == 0.1
    assert module[3].weight is None
    x = torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(module[1](x), nn.functional.group_norm(x, 2, layer.weight, layer.bias, 0.1))


@pytest.mark.parametrize(
    ("module", "groups", "words"),
    [
        (nn.Sequential(nn.BatchNorm2d(6)), 4, ("with_group_norm.groups=4", "0 has 6 channels")),
        (nn.Sequential(nn.BatchNorm1d(2)), 2, ("with_group_norm.groups=2", "0 has 2 channels", "smaller")),
        (nn.Sequential(nn.BatchNorm1d(2)), 0, ("with_group_norm.groups=0", "1 or more")),
        (nn.Sequential(nn.Linear(2, 2)), 2, ("with_group_norm.module='Sequential'", "no BatchNorm")),
    ],
)
def test_what_cannot_be_replaced_is_refused(module, groups, words):
    with refused(*words):
        with_group_norm(module, groups)
