"""Class prototypes: FedProto, Tan et al., AAAI 2022, Eq. 3 and 7."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.functional._precision import in_full_precision


@in_full_precision
def prototype_distance(z: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    r"""Mean squared distance of representations to the prototypes of their classes, over all B * d entries.

    :math:`\frac{1}{B d} \sum_b \lVert z_b - t_{y_b} \rVert^2`; an example of a class without
    prototype adds 0, and counts.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.
        targets: labels ``(B,)``.
        prototypes: one a class ``(C, d)``.
        known: whether a class has one ``(C,)``.

    Returns:
        A scalar, at least 0.

    Source: FedProto, Eq. 7 with the mean of the authors' code.
    """
    rows = z.flatten(1)
    gap = rows - prototypes.to(rows)[targets]
    return torch.where(known[targets][:, None], gap, 0.0).square().mean()


def class_sums(z: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sum of the representations of each class ``(C, d)`` in float64 and their number ``(C, 1)``, without gradient.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.
        targets: labels ``(B,)``, below C.
        num_classes: C.
    """
    rows = z.detach().flatten(1).double()
    sums = rows.new_zeros(num_classes, rows.shape[1]).index_add_(0, targets, rows)
    return sums, torch.bincount(targets, minlength=num_classes)[:, None].double()
