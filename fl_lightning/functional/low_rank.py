"""Factors of low rank: the aggregation of LoRA adapters by the mean of their products.

FlexLoRA: Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources,
NeurIPS 2024. https://arxiv.org/abs/2402.11505
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.utilities.errors import require


def low_rank_factors(product: Tensor, a: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor]:
    r"""Return factors B and A whose product is the best approximation of a matrix D by a matrix of low rank.

    With :math:`D = U \Sigma V^T`, :math:`B = U_k \Sigma_k^{1/2}` and :math:`A = \Sigma_k^{1/2} V_k^T`; the error in the
    Frobenius norm is :math:`\sqrt{\sum_{i > k} \sigma_i^2}`. The entry of largest magnitude in each column of U is
    positive. Where a singular value is 0 up to rounding, or beyond k, the column of B is 0 and the row of A stays as it
    was, so that both can still be trained.

    Args:
        product: D, ``(m, n)``.
        a: the former A, ``(r, n)``.
        rank: k, at least 1 and at most r; None is r.

    Returns:
        B ``(m, r)`` and A ``(r, n)``, in float64, without gradient.

    Raises:
        UsageError: ``rank`` is out of its range.

    Source: FlexLoRA, which decomposes the mean product.

    Example:
        >>> import torch
        >>> b, a = low_rank_factors(torch.full((2, 2), 2.0), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
        >>> (b @ a).round(decimals=4).tolist(), a.round(decimals=4).tolist()
        ([[2.0, 2.0], [2.0, 2.0]], [[1.4142, 1.4142], [5.0, 6.0]])
    """
    number = len(a) if rank is None else rank
    require(1 <= number <= len(a), "rank", rank, f"the factors have rank {len(a)}; use 1 to this number")
    left_vectors, values, right_vectors = torch.linalg.svd(product.detach().double(), full_matrices=False)
    left_vectors, values, right_vectors = left_vectors[:, :number], values[:number], right_vectors[:number]
    signs = left_vectors.gather(0, left_vectors.abs().argmax(0, keepdim=True)).sign()
    tolerance = torch.finfo(torch.float64).eps * max(product.shape) * values[0]
    nonzero = values > tolerance
    roots = torch.where(nonzero, values, 0.0).sqrt()
    new_b, new_a = product.new_zeros(len(product), len(a), dtype=torch.float64), a.detach().double().clone()
    new_b[:, : len(values)] = left_vectors * signs * roots
    scaled = (signs.T * right_vectors) * roots[:, None]
    new_a[: len(values)] = torch.where(nonzero[:, None], scaled, new_a[: len(values)])
    return new_b, new_a
