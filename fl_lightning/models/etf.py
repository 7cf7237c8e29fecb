r"""FedETF: Li et al., No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning, ICCV 2023.

Paper: https://arxiv.org/abs/2303.10058
Code: https://github.com/ZexiLee/ICCV-2023-FedETF

.. math::
    o = s\, h^\top M, \qquad h = \frac{P z + b}{\lVert P z + b \rVert}, \qquad
    M^\top M = \frac{C}{C - 1} \left( I - \frac{1}{C} 1 1^\top \right)
"""

from __future__ import annotations

import math

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.functional import normalize

from fl_lightning.utilities.errors import require


class ETFClassifier(nn.Module):
    r"""Classifies by fixed vectors of the classes, as far apart as they can be: a simplex equiangular tight frame M.

    P and b, a linear layer to d features, and the scale s are trained. The C columns of M have norm 1 and cosines
    :math:`-1 / (C - 1)`. M is a frozen parameter, drawn when the classifier is made, which clients neither change nor
    send. FedETF is this classifier with the method ``LogitAdjustment``, whose default is the balanced softmax of each
    client's label counts. As the ``classifier`` of an :class:`ImageClassifier`, its unit vectors h are the tap
    ``representation`` and its output the tap ``logits``.

    Args:
        in_features: the width of z.
        num_classes: C, at least 2.
        width: d, at least C - 1; None for the larger one of ``in_features`` and C.
        scale: initial s > 0; 10 for the authors' CNN, 1 for their ResNets. Training may take it below 0: the model is
            then evaluated with a warning.

    Raises:
        UsageError: an argument out of its range.

    Example:
        >>> import torch
        >>> frame = ETFClassifier(in_features=5, num_classes=3).vertices.weight
        >>> (frame @ frame.T).add(1e-6).mul(10).round()
        tensor([[10., -5., -5.],
                [-5., 10., -5.],
                [-5., -5., 10.]])
    """

    # the submodules whose outputs are taps
    taps = {"representation": "projection", "logits": "vertices"}  # noqa: RUF012

    def __init__(self, in_features: int, num_classes: int, width: int | None = None, scale: float = 10.0) -> None:
        super().__init__()
        width = max(in_features, num_classes) if width is None else width
        hint = f"{num_classes} classes need {num_classes - 1} or more"
        require(width >= num_classes - 1, "ETFClassifier.width", width, hint)
        require(scale > 0, "ETFClassifier.scale", scale, "use a number above 0")
        self.projection = UnitLinear(in_features, width)
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.vertices = nn.Linear(width, num_classes, bias=False).requires_grad_(False)
        self.vertices.weight.data.copy_(simplex(num_classes, width))

    def forward(self, z: Tensor) -> Tensor:
        # the copies that methods compare with have no gradient, and clients side by side and meta tensors no value
        if not self.training and self.scale.requires_grad and not self.scale.is_meta and self.scale <= 0:
            rank_zero_warn(
                f"ETFClassifier: the trained scale is {float(self.scale):.3g}, so that predictions are reversed"
            )
        return self.vertices(self.scale * self.projection(z))


class UnitLinear(nn.Linear):
    """A linear layer whose output ``(B, d)`` is divided by its norm."""

    def forward(self, z: Tensor) -> Tensor:
        return normalize(super().forward(z), dim=1)


def simplex(num_classes: int, width: int) -> Tensor:
    """Draw the vertices ``(C, d)`` of a regular simplex around 0, with norm 1 and a uniformly distributed rotation."""
    steps = torch.arange(1, num_classes, dtype=torch.float64)
    # an orthonormal basis (C - 1, C) of the vectors whose entries add up to 0
    basis = (torch.ones(num_classes, num_classes, dtype=torch.float64).tril() - torch.diag(steps, 1))[:-1]
    basis = basis / (steps * (steps + 1)).sqrt()[:, None]
    directions = nn.init.orthogonal_(torch.empty(width, num_classes - 1, dtype=torch.float64))
    return math.sqrt(num_classes / (num_classes - 1)) * basis.T @ directions.T
