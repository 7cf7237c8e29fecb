"""Distillation over some of the classes: FedNTD and FedVLS.

Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022.
https://arxiv.org/abs/2106.03097, https://github.com/Lee-Gihun/FedNTD

Guo et al., Exploring Vacant Classes in Label-Skewed Federated Learning, arXiv 2024.
https://arxiv.org/abs/2401.02329, https://github.com/krumpguo/FedVLS
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.functional.rows import in_full_precision
from fl_lightning.utilities.errors import require

# a logit that no class of a softmax has
LOW = -1e30


@in_full_precision
def not_true_distillation(logits: Tensor, reference: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Divergence between two predictions of the classes except the label, :math:`\tau^2 KL(q \Vert p)`.

    For an example with label y, q and p are distributions over the other C - 1 classes: the softmax of
    :math:`o'_c / \tau`, the reference's logits, and of :math:`o_c / \tau`. The result is the mean over the batch.

    Args:
        logits: o, ``(B, C)``.
        reference: :math:`o'`, logits ``(B, C)`` of the same examples; detach them.
        targets: labels y ``(B,)``, below C.
        temperature: :math:`\tau > 0`; a larger one weights the classes more evenly.

    Returns:
        A scalar, at least 0; 0 if the logits of the other classes are equal up to a constant of each example, or if
        C is 2. Its gradient with respect to :math:`o_y` is 0.

    Raises:
        UsageError: ``temperature`` is not above 0, or the shapes are others.

    Source: FedNTD, section 4, and algorithms/fedntd/criterion.py of the authors' code.

    Example:
        >>> import torch
        >>> logits, targets = torch.tensor([[9.0, 0.0, 1.0]]), torch.tensor([0])
        >>> not_true_distillation(logits, torch.tensor([[-5.0, 3.0, 4.0]]), targets)
        tensor(0.)
        >>> not_true_distillation(logits, torch.tensor([[-5.0, 1.0, 0.0]]), targets)
        tensor(0.4621)
    """
    require(temperature > 0, "temperature", temperature, "use a number above 0")
    fits = logits.ndim == 2 and targets.shape == logits.shape[:1]
    require(fits, "logits", tuple(logits.shape), f"pass (B, C) with a label for each row, not {tuple(targets.shape)}")
    other_classes = torch.arange(logits.shape[1] - 1, device=logits.device)
    other_classes = other_classes + (other_classes >= targets[:, None])
    gathered = (values.gather(1, other_classes) for values in (logits, reference))
    p, q = ((values / temperature).log_softmax(1) for values in gathered)
    return temperature**2 * (q.exp() * (q - p)).sum(1).mean()


@in_full_precision
def vacant_class_distillation(logits: Tensor, reference: Tensor, class_counts: Tensor) -> Tensor:
    r"""Divergence :math:`KL(q \Vert p)` between two predictions of the classes without examples.

    q and p are the softmax over these classes of the reference's logits :math:`o'` and of o. The result is the mean
    over the batch.

    Args:
        logits: o, ``(B, C)``.
        reference: :math:`o'`, logits ``(B, C)`` of the same examples; detach them.
        class_counts: the number of training examples of each class, ``(C,)``.

    Returns:
        A scalar, at least 0; 0 if fewer than two classes have no examples. Its gradient is 0 with respect to the logits
        of the other classes, and sums to 0 over the classes without examples.

    Source: FedVLS, and system/flcore/clients/clientvls.py of the authors' code.

    Example:
        >>> import torch
        >>> logits, counts = torch.tensor([[9.0, 0.0, 1.0]]), torch.tensor([5, 0, 0])
        >>> vacant_class_distillation(logits, torch.tensor([[-5.0, 3.0, 4.0]]), counts)
        tensor(0.)
        >>> vacant_class_distillation(logits, torch.tensor([[-5.0, 1.0, 0.0]]), counts)
        tensor(0.4621)
    """
    # without such a class, all logits are equal and the divergence is 0
    has_examples = class_counts > 0
    p = logits.masked_fill(has_examples, LOW).log_softmax(1)
    q = reference.masked_fill(has_examples, LOW).log_softmax(1)
    return (q.exp() * (q - p)).sum(1).mean()
