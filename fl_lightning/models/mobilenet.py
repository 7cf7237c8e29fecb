"""MobileNetV2 (Sandler et al., CVPR 2018) for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.ops.misc import Conv2dNormActivation

from fl_lightning.models.encoders import Encoder, check_channels


class MobileNetV2(Encoder):
    """MobileNetV2 in FedDecorr's form (Shi et al., ICLR 2023): ``(B, in_channels, H, W)`` to ``(B, 1280)``.

    It differs from the original in that the first stages have stride 1, that ReLU replaces ReLU6, and that a block of
    stride 1 which changes the number of channels has a shortcut as well: a 1x1 convolution with BatchNorm. With 10
    classes it has 2,296,922 parameters. Its taps are ``early.0``, the stem after ReLU, then every block.

    Args:
        in_channels: channels of the images.
    """

    # expansion, channels, blocks, stride of the first block
    stages = (
        (1, 16, 1, 1),
        (6, 24, 2, 1),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        check_channels(in_channels)
        layers: list[nn.Module] = [Conv2dNormActivation(in_channels, 32, inplace=False)]
        before = 32
        for expansion, channels, number, stride in self.stages:
            for index in range(number):
                layers.append(InvertedResidual(before, channels, expansion, stride if index == 0 else 1))
                before = channels
        self.layers = nn.Sequential(*layers, Conv2dNormActivation(before, 1280, 1, inplace=False))
        self.out_features, self.in_channels = 1280, in_channels
        self.early = tuple(f"layers.{i}" for i in range(len(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(dim=(2, 3))


class InvertedResidual(nn.Module):
    """A 1x1, a depthwise 3x3 and a 1x1 convolution, ``expansion`` times as wide inside; with a shortcut at stride 1."""

    def __init__(self, in_channels: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = expansion * in_channels
        self.layers = nn.Sequential(
            Conv2dNormActivation(in_channels, inner, 1),
            Conv2dNormActivation(inner, inner, 3, stride, groups=inner),
            Conv2dNormActivation(inner, channels, 1, activation_layer=None),
        )
        self.shortcut: nn.Module | None = None
        if stride == 1:
            self.shortcut = nn.Identity()
            if in_channels != channels:
                self.shortcut = Conv2dNormActivation(in_channels, channels, 1, activation_layer=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if self.shortcut is None else self.layers(x) + self.shortcut(x)
