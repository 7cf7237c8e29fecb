"""Encoders: networks from an input to a representation, which say where their layers can be tapped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.utilities.errors import require

# normalisations of images, by channels
NORMS: dict[str, Callable[..., Any]] = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 2)}


def check_channels(in_channels: int) -> None:
    """Refuse images without channels."""
    require(in_channels >= 1, "in_channels", in_channels, "give 1 or more")


class Encoder(nn.Module):
    """A network from inputs ``(B, ...)`` to representations ``(B, out_features)``.

    Attributes:
        out_features: d.
        early: paths of the submodules whose outputs are the taps ``early.0``, ``early.1``, ..., from the input on.
        named: paths of further submodules, by the names of their taps.
        in_features: number of values of an input; None for any.
        in_channels: number of channels of the images; None for any.
        image_size: height and width of the images; None for any.
        smallest: the least height and width of the images.
    """

    out_features: int
    early: tuple[str, ...] = ()
    named: Mapping[str, str] = MappingProxyType({})
    in_features: int | None = None
    in_channels: int | None = None
    image_size: int | None = None
    smallest: int = 1

    def check(self, x: Tensor) -> None:
        """Check that the network fits inputs like ``x``, ``(B, ...)``.

        Raises:
            UsageError: it does not.
        """
        # a compiler would trace the messages as well; the check has run before anything is compiled
        if torch.compiler.is_compiling():
            return
        channels, *size = shape = x.shape[1:]
        key = fitting = ""
        if self.in_features not in (None, shape.numel()):
            key, fitting = "in_features", str(shape.numel())
        elif self.in_channels is None:
            return
        elif x.ndim != 4:
            key, fitting = "in_channels", "images of channels x height x width"
        elif channels != self.in_channels:
            key, fitting = "in_channels", str(channels)
        elif self.image_size is not None and set(size) != {self.image_size}:
            key, fitting = "image_size", "their height and width, which must be equal"
        elif min(size) < self.smallest:
            key, fitting = "smallest", "larger ones"
        if key:
            hint = f"inputs are {' x '.join(map(str, shape))}, give {fitting}"
            require(False, f"{type(self).__name__}.{key}", getattr(self, key), hint)


class FedUVCNN(Encoder):
    """The small CNN of FedUV (Son et al., CVPR 2024, supplement): eight convolutions without bias and padding.

    3x3/16w, 1x1/16w, 3x3 stride 2/32w, 3x3/32w, 1x1/32w, 3x3 stride 2/64w, 3x3/64w, 1x1/64w, each with BatchNorm and
    ReLU, then global average pooling: ``(B, in_channels, H, W)`` to ``(B, 64 * width)``, H and W at least 21. With
    ``Projector(256)`` and 10 classes it has 1,331,402 parameters at width 4 and 161,594 at width 1.

    Args:
        width: w, at least 1; 4 is the paper's, 1 the default of the authors' code.
        in_channels: channels of the images.
        norm: ``batch`` normalisation, as in the paper, or ``group`` normalisation in 2 groups, without running
            statistics.
    """

    def __init__(self, width: int = 4, in_channels: int = 3, norm: Literal["batch", "group"] = "batch") -> None:
        super().__init__()
        require(width >= 1, f"{type(self).__name__}.width", width, "give 1 or more")
        check_channels(in_channels)
        require(norm in NORMS, f"{type(self).__name__}.norm", norm, f"choose among {', '.join(NORMS)}")
        self.in_channels, self.smallest = in_channels, 21
        a, b, c = 16 * width, 32 * width, 64 * width
        layers = [(a, 3, 1), (a, 1, 1), (b, 3, 2), (b, 3, 1), (b, 1, 1), (c, 3, 2), (c, 3, 1), (c, 1, 1)]
        self.layers = nn.Sequential()
        for out_channels, kernel, stride in layers:
            convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, bias=False)
            self.layers.append(nn.Sequential(convolution, NORMS[norm](out_channels), nn.ReLU()))
            in_channels = out_channels
        self.out_features = c
        self.early = tuple(f"layers.{i}" for i in range(len(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(dim=(2, 3))


class _TwoConvolutions(Encoder):
    """5x5 convolution, ReLU and 2x2 max-pool, twice, then two linear layers with ReLU, and a head."""

    def __init__(
        self,
        in_channels: int,
        channels: tuple[int, int],
        image_size: int,
        widths: tuple[int, int],
        head: Sequence[nn.Module] = (),
        norm: str | None = None,
    ) -> None:
        super().__init__()
        hint = f"choose among {', '.join(NORMS)}, or null for none"
        require(norm is None or norm in NORMS, f"{type(self).__name__}.norm", norm, hint)
        norms = [[NORMS[norm](number)] if norm else [] for number in channels]
        check_channels(in_channels)
        require(image_size >= 16, "image_size", image_size, "give 16 or more")
        side = ((image_size - 4) // 2 - 4) // 2
        first_width, second_width = channels
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(in_channels, first_width, 5), *norms[0], nn.ReLU()),
            nn.MaxPool2d(2),
            nn.Sequential(nn.Conv2d(first_width, second_width, 5), *norms[1], nn.ReLU()),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Sequential(nn.Linear(second_width * side * side, widths[0]), nn.ReLU()),
            nn.Sequential(nn.Linear(*widths), nn.ReLU()),
            *head,
        )
        self.out_features = head[-1].out_features if head else widths[1]  # type: ignore[assignment]
        self.in_channels, self.image_size = in_channels, image_size
        self.early = tuple(f"layers.{i}" for i in (0, 2, *range(5, len(self.layers))))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class FedCKACNN(_TwoConvolutions):
    """The seven-layer CNN of FedCKA (Son et al., 2021), without its output layer.

    5x5/16, ReLU, 2x2 max-pool, 5x5/32, ReLU, 2x2 max-pool, then 120, 84, 84 with ReLU and 256 without activation:
    ``(B, in_channels, S, S)`` to ``(B, 256)``. The last two layers are the projection head of MOON. With 10 classes on
    32 px it has 151,802 parameters. Its taps are the convolutions after ReLU, before pooling, then the linear layers.

    Args:
        in_channels: channels of the images.
        image_size: S, height and width of the images, at least 16.
    """

    def __init__(self, in_channels: int = 3, image_size: int = 32) -> None:
        head = [nn.Sequential(nn.Linear(84, 84), nn.ReLU()), nn.Linear(84, 256)]
        super().__init__(in_channels, (16, 32), image_size, (120, 84), head)


class MOONCNN(_TwoConvolutions):
    """The small CNN of MOON (Li et al., CVPR 2021) and NIID-Bench, without its head.

    5x5/6, ReLU, 2x2 max-pool, 5x5/16, ReLU, 2x2 max-pool, then 120 and 84 with ReLU: ``(B, in_channels, S, S)`` to
    ``(B, 84)``. With 10 classes on 32 px it has 62,006 parameters, with ``ProjectionHead(84)`` 92,626.

    Args:
        in_channels: channels of the images.
        image_size: S, height and width of the images, at least 16.
        norm: ``batch`` normalisation or ``group`` normalisation in 2 groups, without running statistics, between each
            convolution and its ReLU; None for none, as in the paper.
    """

    def __init__(
        self, in_channels: int = 3, image_size: int = 32, norm: Literal["batch", "group"] | None = None
    ) -> None:
        super().__init__(in_channels, (6, 16), image_size, (120, 84), norm=norm)


class FedDynCNN(_TwoConvolutions):
    """The CNN of FedDyn (Acar et al., ICLR 2021), without its output layer.

    5x5/64, ReLU, 2x2 max-pool, twice, then 384 and 192 with ReLU: ``(B, in_channels, S, S)`` to ``(B, 192)``. It has
    no normalisation. With 10 classes on 32 px it has 797,962 parameters.

    Args:
        in_channels: channels of the images.
        image_size: S, height and width of the images, at least 16.
    """

    def __init__(self, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__(in_channels, (64, 64), image_size, (384, 192))


class Logistic(Encoder):
    """No network at all, so that the classifier is logistic regression: ``(B, ...)`` to ``(B, in_features)``.

    Args:
        in_features: number of values of an input.
    """

    def __init__(self, in_features: int = 64) -> None:
        super().__init__()
        require(in_features >= 1, f"{type(self).__name__}.in_features", in_features, "give 1 or more")
        self.out_features = self.in_features = in_features

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class MLP(Encoder):
    """Fully connected layers with ReLU: ``(B, ...)``, flattened to ``in_features``, to ``(B, hidden[-1])``.

    Args:
        in_features: number of values of an input.
        hidden: widths of the layers, none for an empty list; None is one layer of 64.
    """

    def __init__(self, in_features: int = 64, hidden: list[int] | None = None) -> None:
        super().__init__()
        widths = [in_features, *([64] if hidden is None else hidden)]
        require(in_features >= 1, f"{type(self).__name__}.in_features", in_features, "give 1 or more")
        require(min(widths) >= 1, f"{type(self).__name__}.hidden", hidden, "give widths of 1 or more")
        self.layers = nn.Sequential(nn.Flatten())
        for inputs, outputs in itertools.pairwise(widths):
            self.layers.append(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()))
        self.out_features, self.in_features = widths[-1], in_features
        self.early = tuple(f"layers.{i + 1}" for i in range(len(widths) - 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
