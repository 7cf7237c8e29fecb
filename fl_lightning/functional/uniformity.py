"""The uniformity of representations, and the variance of predictions over a batch: FedUV.

Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024.
https://arxiv.org/abs/2402.18372, https://github.com/sonhamin/FedUV
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fl_lightning.functional.rows import as_rows, centered, in_full_precision, is_mapped, linked_zero, unit_scale
from fl_lightning.utilities.errors import UsageError

Hinge = Literal["linear", "none", "square", "clamped_square"]
HINGES: tuple[Hinge, ...] = get_args(Hinge)

# squared distance of two rows, as a share of their squared norms around the mean, below which they are near
NEAR = 1e-4


@in_full_precision
def rbf_uniformity(z: Tensor, bandwidth_factor: float = 1.0, detach_bandwidth: bool = False) -> Tensor:
    r"""FedUV's :math:`L_U`: the mean of :math:`e^{-q_{ij} / (f \sigma)}` over all pairs of rows.

    :math:`q_{ij}` is the squared distance of rows i and j, with i < j, and :math:`\sigma` the lower median of nonzero
    distances. The value does not depend on the scale of z, so gradients that also flow through the median are
    orthogonal to z. A pair of equal rows counts as 1 in the mean and is excluded from the median.

    On a CPU, distances of float32 rows are computed by matrix products in float64, unless two rows are nearly equal.
    Value and gradient have the precision of float32, as with pairwise distances: compared with float64, the value has
    an error below 1e-6, the gradient an error below 1e-5 of its norm.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.
        bandwidth_factor: f > 0; 1 in the authors' code, 2 in the paper's text.
        detach_bandwidth: treat the median as a constant in the gradient.

    Returns:
        A scalar in (0, 1), and :math:`e^{-1/f}` for two different rows. It is 0, with gradient 0, for fewer than two
        rows and for equal rows.

    Raises:
        UsageError: ``bandwidth_factor`` is not above 0.

    Source: FedUV, Eq. 4, after the authors' code, which returns nan where this function returns 0.

    Example:
        >>> import torch
        >>> rbf_uniformity(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        tensor(0.3679)
        >>> spread, clustered = torch.eye(3), torch.tensor([[0.0], [0.1], [5.0]])
        >>> rbf_uniformity(spread) < rbf_uniformity(clustered)
        tensor(True)
    """
    if not bandwidth_factor > 0:
        raise UsageError(f"bandwidth_factor={bandwidth_factor!r}: use a number above 0")
    if len(z) < 2:
        return linked_zero(z)
    rows = as_rows(z)
    if rows.dtype == torch.float32 and rows.device.type == "cpu":
        if is_mapped(rows):
            return _ClientByClient.apply(rows, bandwidth_factor, detach_bandwidth)
        squares = _squared_distances(rows.detach())
        if squares is not None:
            return _Uniformity.apply(rows, *squares, bandwidth_factor, detach_bandwidth)
    return _by_distances(rows, bandwidth_factor, detach_bandwidth)


class _ClientByClient(torch.autograd.Function):
    """Return the value of each mapped client.

    Some clients may have nearly equal rows. Pairwise distances would be correct for all, but on a CPU they are slower
    than matrix products.
    """

    @staticmethod
    def forward(rows: Tensor, bandwidth_factor: float, detach_bandwidth: bool) -> Tensor:
        return rbf_uniformity(rows, bandwidth_factor, detach_bandwidth)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Functions without it cannot be called inside ``torch.vmap``.

        The gradient is the gradient of the map's values.
        """

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rows: Tensor, *options: Any) -> tuple[Tensor, int]:
        batches = rows.unbind(in_dims[0])
        return torch.stack([rbf_uniformity(batch, *options) for batch in batches]), 0


def _by_distances(rows: Tensor, bandwidth_factor: float, detach_bandwidth: bool) -> Tensor:
    """Return the value for any rows, by pairwise distances.

    Excluded pairs are masked, since in a mapped function no shape and no branch may depend on values.
    """
    rows = torch.where(rows.detach().abs().amax() < torch.inf, rows, 0)
    if is_mapped(rows):  # torch.vmap has no rule for pdist
        square = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        distances = square.flatten()[_pairs(len(rows)).to(rows.device)]
    else:
        distances = torch.pdist(rows)
    distances, _ = unit_scale(distances)
    distinct = distances > math.sqrt(torch.finfo(rows.dtype).tiny)
    # the median of the squares is the square of the median. CUDA's nanmedian would wait for the device
    number = distinct.sum()
    ordered = torch.where(distinct, distances.detach(), torch.inf).sort().values
    median = ordered.gather(0, (number - 1).clamp(min=0)[None] // 2)[0]
    any_distinct = number > 0
    distances, width = torch.where(any_distinct, distances, 1), torch.where(any_distinct, median, 1)
    if not detach_bandwidth:
        # all distances that equal the median share its gradient
        equal = distances == width
        width = width + torch.where(equal, distances - width, 0).sum() / equal.sum()
    value = torch.exp(-(distances / width).square() / bandwidth_factor).mean()
    return torch.where(any_distinct, value, 0)


def _squared_distances(rows: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the rows around their mean, and the squared distances of all pairs and their unit.

    They are computed by matrix products in float64, in units of the largest. None if two rows are equal, or closer to
    each other than about a hundredth of their distance from the mean, where differences of products lose digits.
    """
    around = rows.double()
    around -= around.mean(0)
    products = around @ around.T
    norms = products.diagonal()
    sums = norms[:, None] + norms
    squares = torch.sub(sums, products, alpha=2)
    # each row is near itself; nan is near nothing
    if int((squares <= NEAR * sums).sum()) != len(rows):
        return None
    squares = squares.take(_pairs(len(rows)))
    unit = squares.amax()
    return around.float(), (squares / unit).float(), unit


@lru_cache(maxsize=16)
def _pairs(number: int) -> Tensor:
    """The places above the diagonal of a square matrix, flattened."""
    rows, columns = torch.triu_indices(number, number, 1, device="cpu")
    return rows * number + columns


class _Uniformity(torch.autograd.Function):
    """The value by squared distances that all differ from 0, in units of ``unit``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, around: Tensor, squares: Tensor, unit: Tensor, factor: float, detached: bool
    ) -> Tensor:
        median = squares.median()
        ratios = squares / median
        kernel = torch.exp(ratios / -factor)
        ctx.save_for_backward(around, ratios, kernel, unit * median)
        ctx.factor, ctx.detached = factor, detached
        return kernel.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        around, ratios, kernel, median = ctx.saved_tensors
        slopes = -kernel  # by the ratios, times the number of pairs and the factor
        if not ctx.detached:
            medians = ratios == 1
            slopes += medians * ((kernel * ratios).sum() / medians.sum())
        number = len(around)
        weights = around.new_zeros(number**2).index_copy_(0, _pairs(number), slopes).view(number, number)
        weights = weights + weights.T
        moved = (weights.sum(1, keepdim=True) * around).sub_(weights @ around)
        scale = 2 * gradient / (len(kernel) * ctx.factor * median)
        return moved.double().mul_(scale).float(), None, None, None, None, None


@in_full_precision
def probability_variance_hinge(logits: Tensor, hinge: Hinge = "linear") -> Tensor:
    r"""FedUV's :math:`L_V`: the lack of variation of the predictions over the batch, against balanced one-hot labels.

    :math:`s_j` is the unbiased standard deviation of column j of softmax(logits), and :math:`c = 1/\sqrt C` the
    standard deviation of a column of the identity. The value is the mean over j of :math:`\max(0, c - s_j)`
    (``linear``), :math:`c - s_j` (``none``), :math:`(c - s_j)^2` (``square``) or :math:`\max(0, c - s_j)^2`
    (``clamped_square``).

    Args:
        logits: raw logits ``(B, C)``.
        hinge: one of the four forms above.

    Returns:
        A scalar: in [0, c] for ``linear``, at most c for ``none``, at least 0 for the squares. It is 0, with gradient
        0, for fewer than two rows. If all predictions are equal, it is c (its square for the squares), also with
        gradient 0.

    Raises:
        UsageError: ``hinge`` has another value.

    Source: FedUV, Eq. 2 and 3 and supplement Table 6, after the authors' code, which takes probabilities where the
    pseudo-code takes one-hot predictions.

    Example:
        >>> import torch
        >>> certain_and_balanced, all_equal = 100 * torch.eye(4), torch.zeros(8, 4)
        >>> probability_variance_hinge(certain_and_balanced), probability_variance_hinge(all_equal)
        (tensor(0.), tensor(0.5000))
    """
    if hinge not in HINGES:
        raise UsageError(f"hinge={hinge!r}: choose one of {', '.join(HINGES)}")
    if len(logits) < 2:
        return linked_zero(logits)
    # the gradient of torch's own standard deviation is infinite where squares underflow
    rows, scale = unit_scale(centered(logits.softmax(1)), dim=0)
    gap = 1 / math.sqrt(logits.shape[1]) - scale * rows.norm(dim=0) / math.sqrt(len(logits) - 1)
    if hinge in ("linear", "clamped_square"):
        gap = gap.relu()
    return (gap.square() if "square" in hinge else gap).mean()
