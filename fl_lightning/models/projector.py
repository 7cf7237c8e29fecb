"""The projector between encoder and classifier."""

from __future__ import annotations

from torch import Tensor, nn

from fl_lightning.errors import require


class Projector(nn.Module):
    """FedUV's projector (Son et al., CVPR 2024): twice linear, BatchNorm and ReLU; ``(B, any)`` to ``(B, width)``.

    Its input width is that of the encoder it is given to.

    Args:
        width: width of both layers, at least 1.
    """

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        require(width >= 1, "width", width, "give 1 or more")
        self.out_features = width
        self.layers = nn.Sequential(
            *(nn.LazyLinear(width), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
