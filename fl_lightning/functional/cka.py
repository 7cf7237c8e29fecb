r"""Similarities of two layers' activations on the same examples.

Centered kernel alignment (CKA): Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019.
https://arxiv.org/abs/1905.00414,
https://github.com/google-research/google-research/tree/master/representation_similarity

The Frobenius and cosine similarities are the alternatives that FedCKA (Son et al., 2021) compares with in its Table 3.
Its Eq. 3 is linear CKA. https://arxiv.org/abs/2112.00407
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fl_lightning.functional.rows import as_rows, centered, in_full_precision, linked_zero, needs_gradient, unit_scale
from fl_lightning.utilities.errors import require

LEAST_NORM = 1e-12
# columns below which products in half precision save nothing; columns of a block, whose products are added in float32;
# rows around whose mean products of half precision are computed
WIDE, BLOCK, FEW = 1024, 8192, 16


def linear_cka(x: Tensor, y: Tensor, debiased: bool = False) -> Tensor:
    r"""Linear CKA, :math:`\langle K, L \rangle / (\lVert K \rVert \lVert L \rVert)`.

    :math:`K = XX^T` and :math:`L = YY^T` are the Gram matrices of the centered activations. The value does not change
    when either argument is rotated, shifted, or scaled as a whole. With few examples in many dimensions, the biased
    form lies near 1 even for unrelated activations; the debiased form, which uses unbiased estimates of the three
    inner products, does not.

    Args:
        x: activations ``(n, ...)``, flattened to ``(n, p)``.
        y: activations ``(n, ...)`` on the same examples, flattened to ``(n, q)``.
        debiased: use the unbiased estimates (U-statistics).

    Returns:
        A scalar in [0, 1], or in [-1, 1] if debiased. For n = 2 the biased form is always 1. The value is 0, with
        gradient 0, for n < 2 (n < 4 if debiased) and if all rows of one argument are equal.

    Raises:
        UsageError: x and y have different numbers of rows.

    Source: Kornblith et al. 2019, Eq. 1 to 3. Debiased: Song et al., Feature Selection via Dependence Maximization,
    JMLR 2012, https://jmlr.org/papers/v13/song12a.html. The 1e-12 added to the denominator is ours.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]])
        >>> round(linear_cka(x, 3 * x.flip(1) + 5).item(), 4)
        1.0
        >>> x, y = torch.rand(2, 32, 1000, generator=torch.Generator().manual_seed(0))  # unrelated
        >>> round(linear_cka(x, y).item(), 2), round(linear_cka(x, y, debiased=True).item(), 2)
        (0.97, 0.0)
    """
    return linear_ckas(x, y, debiased=debiased)[0]


def linear_ckas(x: Tensor, *ys: Tensor, debiased: bool = False) -> Tensor:
    """:func:`linear_cka` of x with each of several y, for which x is processed only once.

    Under autocast, products of bfloat16 activations stay in bfloat16, forward and backward; blocks of at most 8192
    columns are added in float32, and everything else is float32. Compared with float64, a similarity s then has an
    error below 1e-4, and its gradient, which vanishes at s = 1, an error below 0.003 / sqrt(1 - s^2) of its norm (0.01
    for s = 0.95). This holds for the biased form and for examples of at least 1024 numbers, and not fewer numbers than
    examples. Everything else is computed in float32, also float16, whose range the products could exceed, or in float64
    for float64.

    Args:
        x: activations ``(n, ...)``.
        *ys: activations ``(n, ...)`` each, on the same examples.
        debiased: as in :func:`linear_cka`.

    Returns:
        One similarity for each y, ``(len(ys),)``, with the range and the exceptions of :func:`linear_cka`.

    Raises:
        UsageError: x and one of ``ys`` have different numbers of rows.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]])
        >>> linear_ckas(x, x, x[:, :1])
        tensor([1.0000, 0.7906])
    """
    for y in ys:
        _require_same_rows(x, y)
    wide = not debiased and min(map(_width, (x, *ys))) >= max(WIDE, len(x)) and len(x) >= 2
    in_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in (x, *ys))
    if not (wide and in_bfloat16 and torch.is_autocast_enabled(x.device.type)):
        return in_full_precision(_linear_ckas)(x, *ys, debiased=debiased)
    with torch.autocast(x.device.type, enabled=False):
        return _linear_ckas(x, *ys, debiased=debiased)


def _linear_ckas(x: Tensor, *ys: Tensor, debiased: bool) -> Tensor:
    if len(x) < (4 if debiased else 2):
        return torch.stack([linked_zero(x, y) for y in ys])
    if not debiased and len(x) > max(map(_width, (x, *ys))):
        # inner products of columns are the smaller matrices
        a, values = _standard(x), []
        for b in map(_standard, ys):
            square, size = (a.T @ b).square().sum(), (a.T @ a).norm() * (b.T @ b).norm()
            values.append(square / (size + LEAST_NORM))
        return torch.stack(values)
    k, *ls = (_u_center(gram) if debiased else gram for gram in map(_centered_gram, (x, *ys)))
    return torch.stack([_alignment(k, gram) for gram in ls])


def unbiased_gram(x: Tensor) -> Tensor:
    r"""Return the contribution of a batch to debiased linear CKA over batches, as a vector.

    It is the upper triangle of the Gram matrix of the rows, centered after Song et al., and scaled so that the inner
    product of two such vectors of the same examples is :math:`\frac{n}{2}` times an unbiased estimate of HSIC:

    .. math::
        \mathrm{HSIC}_1(K, L) = \frac{1}{n (n - 3)} \left( \mathrm{tr}(\tilde K \tilde L)
            + \frac{1^T \tilde K 1 \, 1^T \tilde L 1}{(n - 1) (n - 2)}
            - \frac{2}{n - 2} 1^T \tilde K \tilde L 1 \right)

    with the Gram matrices K and L of a batch of n examples, their diagonals set to 0. It does not depend on the width
    of the layer, so that many models and layers can be kept and compared in pairs.

    Args:
        x: activations ``(n, ...)``, flattened to ``(n, p)``.

    Returns:
        ``(n (n - 1) / 2,)`` in float64, without gradient; empty for n < 4, which allows no estimate.

    Example:
        >>> import torch
        >>> unbiased_gram(torch.tensor([[0.0], [1.0], [2.0], [4.0]])).round(decimals=2).tolist()
        [1.67, -0.33, -1.33, -1.33, -0.33, 1.67]
    """
    n = len(x)
    if n < 4:
        return torch.zeros(0, dtype=torch.float64, device=x.device)
    upper = torch.triu_indices(n, n, 1, device=x.device)
    return _u_center(_plain_gram(x.detach()).double())[upper[0], upper[1]] / math.sqrt(n - 3)


@in_full_precision
def _plain_gram(x: Tensor) -> Tensor:
    rows = _rows(x)
    rows = rows - rows[0]  # equal rows give exactly 0
    return rows @ rows.T


def similarities(grams: Tensor) -> Tensor:
    """The debiased linear CKA of each pair of layers or models, from :func:`unbiased_gram` of their batches.

    The numerator and both factors of the denominator of :func:`linear_cka` are means over the batches, weighted by
    their examples. Each mean has the same expectation as the estimate from all examples at once.

    Args:
        grams: ``(m, length)``, a row for each: its vectors of all batches, one after another.

    Returns:
        ``(m, m)``, symmetric with ones on the diagonal; nan where all activations of one are equal.

    Source: Nguyen et al., Do Wide and Deep Networks Learn the Same Things?, ICLR 2021, Eq. 2 and 3,
    https://arxiv.org/abs/2010.15327. HSIC_1: Song et al., Feature Selection via Dependence Maximization, JMLR 2012.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [3.0, 0.0], [4.0, 1.0]])
        >>> grams = torch.stack([unbiased_gram(x), unbiased_gram(5 - 2 * x), unbiased_gram(x[:, :1])])
        >>> similarities(grams)[0].round(decimals=4).tolist()
        [1.0, 1.0, 0.9659]
    """
    # scaled first, since squares of large entries could overflow; a column of zeros, since there may be none
    rows = torch.nn.functional.pad(grams, (0, 1))
    rows = rows / rows.abs().amax(1, keepdim=True)
    rows = rows / rows.norm(dim=1, keepdim=True)
    return (rows @ rows.T).clamp(-1, 1)


@in_full_precision
def rbf_cka(x: Tensor, y: Tensor, bandwidth: float = 0.5) -> Tensor:
    r"""CKA with the Gaussian kernel :math:`e^{-q / (2 t^2 m)}`, where q is the squared distance of two rows.

    m is the median of all n^2 squared distances, including the n zeros from each row to itself. The gradient treats it
    as a constant.

    Args:
        x: activations ``(n, ...)``, flattened to ``(n, p)``.
        y: activations ``(n, ...)`` on the same examples, flattened to ``(n, q)``.
        bandwidth: t > 0, in units of the square root of the median.

    Returns:
        A scalar in [0, 1]. For n = 2 it is always 1. The value is 0, with gradient 0, for n < 2 and if all rows of one
        argument are equal.

    Raises:
        UsageError: ``bandwidth`` is not above 0, or x and y have different numbers of rows.

    Source: Kornblith et al. 2019, section 3, and the authors' notebook. If most rows are equal, so that the median is
    0, the mean replaces it.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]])
        >>> round(rbf_cka(x, 3 * x.flip(1) + 5).item(), 4), round(rbf_cka(x, x[:, :1]).item(), 4)
        (1.0, 0.9955)
    """
    require(bandwidth > 0, "bandwidth", bandwidth, "use a number above 0")
    _require_same_rows(x, y)
    if len(x) < 2:
        return linked_zero(x, y)
    return _alignment(_center(_rbf(_standard(x), bandwidth)), _center(_rbf(_standard(y), bandwidth)))


@in_full_precision
def frobenius_similarity(x: Tensor, y: Tensor) -> Tensor:
    r"""Minus the mean squared difference, :math:`-\lVert x - y \rVert_F^2 / \text{numel}`.

    Args:
        x: activations of any shape.
        y: activations of the same shape.

    Returns:
        A scalar, at most 0; 0 for equal activations.

    Source: FedCKA, Table 3. The squared norm that the paper names is a distance. Its negative is a similarity, and the
    mean keeps the exponential that FedCKA takes of it from overflowing.

    Example:
        >>> import torch
        >>> frobenius_similarity(torch.zeros(2, 3), torch.full((2, 3), 2.0)).item()
        -4.0
    """
    return -(x - y).square().mean()


@in_full_precision
def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the angle between two tensors, each flattened to one vector.

    Args:
        x: activations of any shape.
        y: activations of the same shape.

    Returns:
        A scalar in [-1, 1]; 0 if one of the tensors is 0.

    Source: FedCKA, Table 3.

    Example:
        >>> import torch
        >>> round(cosine_similarity(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 2.0]])).item(), 4)
        0.7071
    """
    return torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0)


class _Gram(torch.autograd.Function):
    """Inner products ``(n, n)`` of rows ``(n, p)`` after centering, for p far above n; of bfloat16 rows in float32.

    The small matrix of products is centered instead of the rows, and the backward pass multiplies the wide matrix once,
    where autograd would do so twice.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor) -> Tensor:
        if rows.dtype != torch.bfloat16:
            return _twice_centered(rows @ rows.T)
        # a product of bfloat16 matrices is itself rounded to bfloat16, which the sum over blocks evens out
        products = ((block @ block.T).float() for block in rows.split(BLOCK, 1))
        return _twice_centered(functools.reduce(torch.add, products))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return _twice_centered(gradient + gradient.T).to(rows.dtype) @ rows


def _twice_centered(gram: Tensor) -> Tensor:
    """H G H with H = I - 1/n."""
    half = gram - gram.mean(0)
    return half - half.mean(1, keepdim=True)


def _centered_gram(x: Tensor) -> Tensor:
    """Inner products ``(n, n)`` of the centered rows, scaled to largest entry 1, so that no norm overflows."""
    rows = _rows(x)
    # so that equal rows are exactly 0, and rows far from the origin keep their digits
    half = rows.dtype == torch.bfloat16
    rows = rows - (rows[:FEW].detach().float().mean(0).bfloat16() if half else rows[0].detach())
    gram = _Gram.apply(rows) if needs_gradient(rows) else _Gram.forward(rows)
    largest = gram.detach().abs().amax()
    return gram / torch.where(largest > torch.finfo(gram.dtype).tiny, largest, 1)


def _rows(x: Tensor) -> Tensor:
    """Activations ``(n, ...)`` as rows ``(n, p)``; the order of columns does not matter, and this one costs no copy."""
    channels_last = x.ndim == 4 and x.stride(1) == 1
    return as_rows(x.permute(0, 2, 3, 1) if channels_last else x)


def _width(x: Tensor) -> int:
    """Numbers in an example."""
    return math.prod(x.shape[1:])


def _require_same_rows(x: Tensor, y: Tensor) -> None:
    require(len(x) == len(y), "rows", (len(x), len(y)), "give x and y on the same examples")


def _standard(x: Tensor) -> Tensor:
    """Centered rows ``(n, p)``, scaled to largest entry 1: CKA does not depend on the scale."""
    return unit_scale(centered(as_rows(x)))[0]


def _rbf(rows: Tensor, bandwidth: float) -> Tensor:
    # computed by matrix products, the distance of equal rows would not be exactly 0
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    constant = distances.detach()
    median = (constant.median() - (-constant).median()) / 2
    median = torch.where(median > 0, median, constant.mean())
    return torch.exp(-distances / (2 * bandwidth**2 * torch.where(median > 0, median, 1)))


def _alignment(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741 - K and L, as in the paper
    return (k * l).sum() / (k.norm() * l.norm() + LEAST_NORM)


def _center(k: Tensor) -> Tensor:
    return k - k.mean(0, keepdim=True) - k.mean(1, keepdim=True) + k.mean()


def _u_center(k: Tensor) -> Tensor:
    """Return the centered matrix with zero diagonal, and rows and columns with sum 0, for unbiased estimates."""
    n = len(k)
    k = k - torch.diag(k.diagonal())
    means = k.sum(0) / (n - 2)
    means = means - means.sum() / (2 * (n - 1))
    k = k - means[:, None] - means[None, :]
    return k - torch.diag(k.diagonal())
