"""Contrasts of similarities: FedCKA, Son et al., 2021, Eq. 5."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from fl_lightning.functional._precision import in_full_precision


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
