"""Class prototypes, the mean representations of classes: FedProto.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.
https://arxiv.org/abs/2105.00243, https://github.com/yuetan031/fedproto
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.functional.rows import as_rows, in_full_precision


@in_full_precision
def prototype_distance(z: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    r"""Mean squared difference between representations and the prototypes t of their classes.

    :math:`\frac{1}{B d} \sum_b \lVert z_b - t_{y_b} \rVert^2`. An example of a class without prototype adds 0 to the
    sum and still counts in B.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.
        targets: labels ``(B,)``, below C.
        prototypes: the prototype of each class, ``(C, d)``.
        known: whether the class has a prototype, boolean ``(C,)``.

    Returns:
        A scalar, at least 0.

    Source: FedProto, Eq. 7, as a mean over all entries, as in the authors' code.

    Example:
        >>> import torch
        >>> z, targets = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
        >>> known = torch.tensor([True, False])
        >>> prototype_distance(z, targets, torch.zeros(2, 2), known)
        tensor(0.2500)
    """
    rows = as_rows(z)
    gap = rows - prototypes.to(rows)[targets]
    return torch.where(known[targets][:, None], gap, 0.0).square().mean()


def class_sums(z: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return sums and numbers of the representations of each class, for prototypes.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.
        targets: labels ``(B,)``, below C.
        num_classes: C.

    Returns:
        The sums ``(C, d)`` and the numbers ``(C, 1)``, both in float64 and without gradient.

    Source: FedProto, Eq. 3, whose mean is the quotient of the two.

    Example:
        >>> import torch
        >>> z, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([0, 0, 2])
        >>> sums, numbers = class_sums(z, targets, num_classes=3)
        >>> sums.tolist(), numbers.tolist()
        ([[4.0, 6.0], [0.0, 0.0], [5.0, 6.0]], [[2.0], [0.0], [1.0]])
    """
    rows = as_rows(z.detach()).double()
    sums = rows.new_zeros(num_classes, rows.shape[1]).index_add_(0, targets, rows)
    # compared with each class, as torch.vmap has no rule for bincount
    belongs = targets == torch.arange(num_classes, device=targets.device)[:, None]
    return sums, belongs.sum(1, keepdim=True).double()
