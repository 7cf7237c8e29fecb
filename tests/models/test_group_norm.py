"""BatchNorm is replaced by GroupNorm in any module."""

import pytest
import torch
from helpers.errors import refused
from torch import nn
from torchvision.models import resnet18

from fl_lightning.models import ImageClassifier, MobileNetV2, with_group_norm

BATCH = (nn.BatchNorm1d, nn.BatchNorm2d)


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


def test_an_example_no_longer_depends_on_the_others_of_its_batch():
    torch.manual_seed(0)
    model, x = ImageClassifier(MobileNetV2(1)), torch.randn(3, 1, 16, 16)
    assert not torch.allclose(model(x)[:2], model(x[:2]), atol=1e-3)
    with_group_norm(model)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), atol=1e-4, rtol=1e-3)


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
