"""Projectors: networks between encoder and classifier."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.encoders import check_layer


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
        width: width of both layers, at least 1.
    """

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        require(width >= 1, f"{type(self).__name__}.width", width, "give 1 or more")
        check_layer(f"{type(self).__name__}.width", width, width, width)
        self.out_features = width
        self.layers = nn.Sequential(
            *(nn.LazyLinear(width), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
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
        check_layer(f"{type(self).__name__}.hidden", hidden, hidden, width)
        self.out_features = width
        self.layers = nn.Sequential(nn.LazyLinear(hidden), nn.ReLU(), nn.Linear(hidden, width))
