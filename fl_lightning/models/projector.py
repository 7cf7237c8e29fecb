"""Projectors: networks between encoder and classifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Literal

from torch import Tensor, nn

from fl_lightning.utilities.errors import require


class BaseProjector(nn.Module, ABC):
    """A network between encoder and classifier, from ``(B, any)`` to ``(B, out_features)``.

    Its first layer is lazy and takes the width of the encoder.

    Attributes:
        out_features: d, the width of the representation.
        layers: the network.
    """

    out_features: int
    layers: nn.Sequential

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Projector(BaseProjector):
    """FedUV's projector (Son et al., CVPR 2024): linear, BatchNorm and ReLU, twice.

    Args:
        width: width of both layers, at least 1; even with group normalisation.
        norm: ``batch`` normalisation, as in the paper, or ``group`` normalisation in 2 groups, without running
            statistics.
    """

    def __init__(self, width: int = 256, norm: Literal["batch", "group"] = "batch") -> None:
        super().__init__()
        require(width >= 1, f"{type(self).__name__}.width", width, "give 1 or more")
        require(norm in ("batch", "group"), f"{type(self).__name__}.norm", norm, "choose among batch, group")
        even = norm == "batch" or width % 2 == 0
        require(
            even, f"{type(self).__name__}.width", width, "use an even width, which norm: group divides into 2 groups"
        )
        self.out_features = width
        make_norm = nn.BatchNorm1d if norm == "batch" else partial(nn.GroupNorm, 2)
        self.layers = nn.Sequential(
            *(nn.LazyLinear(width), make_norm(width), nn.ReLU()),
            *(nn.Linear(width, width), make_norm(width), nn.ReLU()),
        )


class ProjectionHead(BaseProjector):
    """MOON's projection head (Li et al., CVPR 2021): linear, ReLU, linear, without normalisation.

    Args:
        hidden: width of the first layer; MOON takes the encoder's width, FedDecorr's code of MOON half of it.
        width: width of the output, at least 1.
    """

    def __init__(self, hidden: int = 84, width: int = 256) -> None:
        super().__init__()
        require(hidden >= 1, f"{type(self).__name__}.hidden", hidden, "give 1 or more")
        require(width >= 1, f"{type(self).__name__}.width", width, "give 1 or more")
        self.out_features = width
        self.layers = nn.Sequential(nn.LazyLinear(hidden), nn.ReLU(), nn.Linear(hidden, width))
