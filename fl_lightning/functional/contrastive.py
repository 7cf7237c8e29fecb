"""Contrasts between the similarities to the global and to previous local models: FedCKA and MOON.

FedCKA: Son et al., Compare Where It Matters: Using Layer-Wise Regularization To Improve Federated Learning on
Heterogeneous Data, 2021. https://arxiv.org/abs/2112.00407

MOON: Li et al., Model-Contrastive Federated Learning, CVPR 2021.
https://arxiv.org/abs/2103.16257, https://github.com/QinbinLi/MOON
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fl_lightning.functional.rows import as_rows, in_full_precision, linked_zero
from fl_lightning.utilities.errors import require


@in_full_precision
def representation_contrast(similarity_to_global: Tensor, similarity_to_previous: Tensor) -> Tensor:
    r"""FedCKA's term of one layer, :math:`-\log \frac{e^{s_g}}{e^{s_g} + e^{s_p}} = \log(1 + e^{s_p - s_g})`.

    Args:
        similarity_to_global: :math:`s_g`, similarity to the global model's activations, a scalar.
        similarity_to_previous: :math:`s_p`, similarity to the previous model's activations, a scalar.

    Returns:
        A scalar above 0: log 2 if the similarities are equal, and in [0.313, 1.313] if both lie in [0, 1].

    Source: FedCKA, Eq. 2, without its mean over layers and without a temperature.

    Example:
        >>> import torch
        >>> closer, farther = torch.tensor(1.0), torch.tensor(0.0)
        >>> representation_contrast(closer, closer), representation_contrast(closer, farther)
        (tensor(0.6931), tensor(0.3133))
    """
    return softplus(similarity_to_previous - similarity_to_global)


@in_full_precision
def model_contrastive_loss(
    z: Tensor, z_global: Tensor, z_previous: Sequence[Tensor] = (), temperature: float = 0.5
) -> Tensor:
    r"""MOON's term, the mean over the batch of :math:`-\log \frac{e^{s_g/T}}{e^{s_g/T} + \sum_j e^{s_j/T}}`.

    :math:`s_g` is the cosine of an example's representation with its representation by the global model, :math:`s_j`
    the cosine with that by the j-th previous local model.

    Args:
        z: representations by the model in training, ``(B, ...)``, flattened to ``(B, d)``; detach the other arguments.
        z_global: representations of the same examples by the global model, ``(B, ...)``.
        z_previous: representations by the previous local models, ``(B, ...)`` each.
        temperature: T > 0; a smaller one sharpens the contrast.

    Returns:
        A scalar, at least 0. If the m previous representations equal the global one it is :math:`\log(1 + m)`. Without
        previous models it is 0, with gradient 0.

    Raises:
        UsageError: ``temperature`` is not above 0.

    Source: MOON, Eq. 3. The authors' code gives the same 0 in the first round.

    Example:
        >>> import torch
        >>> z, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> model_contrastive_loss(z, z, [z]), model_contrastive_loss(z, z, [other])
        (tensor(0.6931), tensor(0.1269))
        >>> model_contrastive_loss(z, other)
        tensor(0.)
    """
    require(temperature > 0, "temperature", temperature, "use a number above 0")
    if not len(z_previous):
        return linked_zero(z)
    rows = as_rows(z)
    references = map(as_rows, (z_global, *z_previous))
    cosines = [cosine_similarity(rows, reference, dim=1) for reference in references]
    logits = torch.stack(cosines, 1) / temperature
    return (logits.logsumexp(1) - logits[:, 0]).mean()
