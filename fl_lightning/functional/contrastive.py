"""Contrasts of similarities: FedCKA, Son et al., 2021, Eq. 5; MOON, Li et al., CVPR 2021, Eq. 3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fl_lightning.errors import require
from fl_lightning.functional._precision import in_full_precision, linked_zero


@in_full_precision
def representation_contrast(similarity_to_global: Tensor, similarity_to_previous: Tensor) -> Tensor:
    r"""FedCKA for one layer, :math:`-\log \frac{e^{s_g}}{e^{s_g} + e^{s_p}} = \log(1 + e^{s_p - s_g})`.

    Args:
        similarity_to_global: :math:`s_g`, a scalar.
        similarity_to_previous: :math:`s_p`, a scalar.

    Returns:
        A scalar above 0; log 2 for equal similarities, in [0.313, 1.313] for similarities in [0, 1].

    Source: FedCKA, Eq. 5, without its mean over layers. There is no temperature.
    """
    return softplus(similarity_to_previous - similarity_to_global)


@in_full_precision
def model_contrastive_loss(
    z: Tensor, z_global: Tensor, z_previous: Sequence[Tensor] = (), temperature: float = 0.5
) -> Tensor:
    r"""MOON, the mean over the batch of :math:`-\log \frac{e^{s_g/T}}{e^{s_g/T} + \sum_j e^{s_j/T}}`.

    :math:`s_g` and :math:`s_j` are the cosines of z with the global and with the j-th previous representation.

    Args:
        z: representations ``(B, d)``, the only argument that is to receive gradient.
        z_global: the same examples' representations by the global model ``(B, d)``.
        z_previous: those by previous local models, ``(B, d)`` each; none gives 0.
        temperature: T > 0.

    Returns:
        A scalar, at least 0; :math:`\log(1 + m)` where the m previous representations equal the global one; 0, with
        gradient 0, without previous ones.

    Raises:
        UsageError: ``temperature`` is not above 0.

    Source: MOON, Eq. 3; the authors' code has the same single-logit value 0 in the first round.
    """
    require(temperature > 0, "temperature", temperature, "give a number above 0")
    if not len(z_previous):
        return linked_zero(z)
    rows = z.flatten(1)
    cosines = [cosine_similarity(rows, other.flatten(1), dim=1) for other in (z_global, *z_previous)]
    logits = torch.stack(cosines, 1) / temperature
    return (logits.logsumexp(1) - logits[:, 0]).mean()
