"""Residual networks for small images (He et al., CVPR 2016), made of torchvision's blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.resnet import ResNet as TorchvisionResNet

from fl_lightning.models.encoders import NORMS, Encoder, check_channels
from fl_lightning.utilities.errors import require


class _Residual(Encoder):
    """A residual network without max-pooling: a stem, some stages of blocks, and the mean over each channel.

    Its taps are ``early.0``, the stem after ReLU, then every residual block; and ``stage.1``, ``stage.2``, ...
    """

    def __init__(self, in_channels: int, out_features: int) -> None:
        super().__init__()
        check_channels(in_channels)
        self.in_channels, self.out_features = in_channels, out_features

    def add_layers(self, stem: nn.Module, stages: list[nn.Sequential]) -> None:
        self.stem, self.early, self.named = stem, ("stem",), {}
        for number, stage in enumerate(stages, 1):
            self.add_module(f"layer{number}", stage)
            self.early += tuple(f"layer{number}.{block}" for block in range(len(stage)))
            self.named[f"stage.{number}"] = f"layer{number}"

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in self.named.values():
            x = getattr(self, name)(x)
        return x.mean(dim=(2, 3))


class _ResNet(_Residual):
    """The base class of :class:`ResNet18` and :class:`ResNet50`, made by torchvision."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        blocks: list[int],
        in_channels: int,
        stem: Literal["small", "large"],
        first_stride: int,
        norm: Literal["batch", "group"],
        init: Literal["he", "default"],
    ) -> None:
        super().__init__(in_channels, 512 * block.expansion)
        require(first_stride in (1, 2), "first_stride", first_stride, "give 1 or 2")
        for key, value, choices in (("stem", stem, STEMS), ("norm", norm, NORMS), ("init", init, INITS)):
            require(value in choices, key, value, f"give {' or '.join(choices)}")
        layer = NORMS[norm]
        built = TorchvisionResNet(block, blocks, norm_layer=layer)
        if first_stride != 1:
            built.inplanes = 64
            built.layer1 = built._make_layer(block, 64, blocks[0], stride=first_stride)
        kernel, stride = STEMS[stem]
        convolution = nn.Conv2d(in_channels, 64, kernel, stride, kernel // 2, bias=False)
        stages = [built.layer1, built.layer2, built.layer3, built.layer4]
        self.add_layers(nn.Sequential(convolution, layer(64), nn.ReLU()), stages)
        self.apply(INITS[init])


class ResNet18(_ResNet):
    """ResNet-18, ``(B, in_channels, H, W)`` to ``(B, 512)``, for images of any size; the papers' have 32 to 96 px.

    The defaults are MOON's form for CIFAR. FedDecorr's has ``init="default"``, FedUV's ``first_stride=2`` and
    ``init="default"``. With 10 classes and no projector it has 11,173,962 parameters; FedUV's, with ``Projector(512)``
    and 100 classes, 11,751,716.

    Args:
        in_channels: channels of the images.
        stem: ``small``, a 3x3 convolution, or ``large``, a 7x7 convolution of stride 2; both without max-pooling.
        first_stride: stride of the first stage, 1 or 2.
        norm: ``batch`` normalisation, or ``group`` normalisation in 2 groups as in FedDyn, without running statistics.
        init: ``he``, the initialisation of torchvision and MOON, or PyTorch's ``default`` of each layer.
    """

    def __init__(
        self,
        in_channels: int = 3,
        stem: Literal["small", "large"] = "small",
        first_stride: int = 1,
        norm: Literal["batch", "group"] = "batch",
        init: Literal["he", "default"] = "he",
    ) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2], in_channels, stem, first_stride, norm, init)


class ResNet50(_ResNet):
    """ResNet-50, ``(B, in_channels, H, W)`` to ``(B, 2048)``, for images of any size; the papers' have 32 to 96 px.

    The defaults are the form for CIFAR of MOON and FedCKA. FedUV's has ``stem="large"`` and ``init="default"``; with
    ``Projector(2048)`` and 200 classes it has 32,318,728 parameters.

    Args:
        in_channels: channels of the images.
        stem: ``small``, a 3x3 convolution, or ``large``, a 7x7 convolution of stride 2; both without max-pooling.
        first_stride: stride of the first stage, 1 or 2.
        norm: ``batch`` normalisation, or ``group`` normalisation in 2 groups, without running statistics.
        init: ``he``, the initialisation of torchvision and MOON, or PyTorch's ``default`` of each layer.
    """

    def __init__(
        self,
        in_channels: int = 3,
        stem: Literal["small", "large"] = "small",
        first_stride: int = 1,
        norm: Literal["batch", "group"] = "batch",
        init: Literal["he", "default"] = "he",
    ) -> None:
        super().__init__(Bottleneck, [3, 4, 6, 3], in_channels, stem, first_stride, norm, init)


class _ThinResNet(_Residual):
    """A residual network for CIFAR: three stages of 16, 32 and 64 channels, with shortcuts without parameters."""

    def __init__(self, blocks: int, in_channels: int) -> None:
        super().__init__(in_channels, 64)
        stem = nn.Sequential(nn.Conv2d(in_channels, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        stages: list[nn.Sequential] = []
        for channels in (16, 32, 64):
            if stages:
                stage = nn.Sequential(BasicBlock(channels // 2, channels, 2, Subsample(channels)))
            else:
                stage = nn.Sequential(BasicBlock(16, 16))
            for _ in range(blocks - 1):
                stage.append(BasicBlock(channels, channels))
            stages.append(stage)
        self.add_layers(stem, stages)
        self.apply(he)


class ResNet20(_ThinResNet):
    """ResNet-20 for CIFAR, ``(B, in_channels, H, W)`` to ``(B, 64)``; with 10 classes 269,722 parameters.

    Its taps are ``early.0``, the stem after ReLU, then every residual block; and ``stage.1`` to ``stage.3``.

    Args:
        in_channels: channels of the images.
    """

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__(3, in_channels)


class ResNet32(_ThinResNet):
    """ResNet-32 for CIFAR, FedDecorr's: ``(B, in_channels, H, W)`` to ``(B, 64)``; with 10 classes 464,154 parameters.

    Its taps are ``early.0``, the stem after ReLU, then every residual block; and ``stage.1`` to ``stage.3``.

    Args:
        in_channels: channels of the images.
    """

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__(5, in_channels)


class Subsample(nn.Module):
    """The shortcut without parameters (He et al., option A): every second pixel, and zeros for new channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.margin = channels // 4

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.margin, self.margin))


def he(part: nn.Module, **how: Any) -> None:
    """He et al.'s initialisation of a convolution."""
    if isinstance(part, nn.Conv2d):
        nn.init.kaiming_normal_(part.weight, **how)


# kernel size and stride
STEMS: dict[str, tuple[int, int]] = {"small": (3, 1), "large": (7, 2)}
INITS: dict[str, Callable[[nn.Module], None]] = {
    "he": partial(he, mode="fan_out", nonlinearity="relu"),
    "default": lambda part: getattr(part, "reset_parameters", lambda: None)(),
}
