"""Neural collapse: how far class means and classifier are from a simplex equiangular tight frame.

Papyan, Han and Donoho, Prevalence of neural collapse during the terminal phase of deep learning training, PNAS 2020.
https://arxiv.org/abs/2008.08186, https://github.com/neuralcollapse/neuralcollapse (neuralcollapse.ipynb)
"""

from __future__ import annotations

import torch
from torch import Tensor

# names of the measures, without "nc/"
MEASURES = ("1", "1_quotient", "2_norm_means", "2_norm_weights", "2_angle_means", "2_angle_weights", "2_etf", "3")


def cosines(rows: Tensor) -> Tensor:
    """Return the cosine of each pair of rows.

    Args:
        rows: ``(n, d)``.

    Returns:
        ``(n, n)``, in float64, without gradient; nan for rows of zeros.

    Example:
        >>> import torch
        >>> cosines(torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])).tolist()
        [[1.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]
    """
    values = rows.detach().double()
    units = values / values.norm(dim=1, keepdim=True)
    return units @ units.T


def neural_collapse(means: Tensor, within: Tensor, weight: Tensor) -> dict[str, Tensor]:
    r"""Return the measures NC1 to NC3 of the K classes that occur; all are 0 for a complete collapse.

    With the rows :math:`m_c` of M, the means :math:`\mu_c` without their own mean, the rows :math:`w_c` of W, the
    covariance within classes :math:`\Sigma_W` and between classes :math:`\Sigma_B = M^T M / K`:

    - ``1``: :math:`\mathrm{tr}(\Sigma_W \Sigma_B^+) / K`, with a pseudo-inverse of rank K - 1 at most.
    - ``1_quotient``: :math:`\mathrm{tr}\, \Sigma_W / \mathrm{tr}\, \Sigma_B`.
    - ``2_norm_means`` and ``2_norm_weights``: standard deviation (divisor K - 1) of the norms of the :math:`m_c` or
      :math:`w_c`, divided by their mean.
    - ``2_angle_means`` and ``2_angle_weights``: mean of :math:`\lvert \cos + 1 / (K - 1) \rvert` over pairs of the
      :math:`m_c` or :math:`w_c`. With :math:`d < K - 1` dimensions it cannot reach 0.
    - ``2_etf``: Frobenius distance of :math:`W W^T / \lVert W W^T \rVert` from :math:`(I - 1 1^T / K) / \sqrt{K - 1}`.
    - ``3``: :math:`\lVert W / \lVert W \rVert - M / \lVert M \rVert \rVert^2`, at most 4.

    Args:
        means: mean representation :math:`\mu_c` of each class, ``(K, d)``.
        within: :math:`\Sigma_W`, ``(d, d)``.
        weight: the classifier's rows of these classes, ``(K, d)``.

    Returns:
        A scalar by name, in float64, without gradient; nan where a measure is undefined, as all are for K < 2.

    Source: the paper's Figures 2 to 7, section "Neural Collapse". The authors' notebook leaves out the division by K in
    ``1``. ``2_etf`` is from Zhu et al., A Geometric Analysis of Neural Collapse with Unconstrained Features, NeurIPS
    2021, https://arxiv.org/abs/2105.02375, https://github.com/tding1/Neural-Collapse (validate_NC.py).

    Example:
        >>> import torch
        >>> frame = torch.eye(3) - 1 / 3
        >>> found = neural_collapse(2 * frame + 1, torch.zeros(3, 3), 5 * frame)
        >>> all(abs(value) < 1e-6 for value in found.values())
        True
    """
    means, within, weight = (value.detach().double() for value in (means, within, weight))
    classes = len(means)
    if classes < 2 or not all(value.isfinite().all() for value in (means, within, weight)):
        return dict.fromkeys(MEASURES, means.new_tensor(torch.nan))
    rows = means - means.mean(0)
    frame, products = (torch.eye(classes).to(means) - 1 / classes) / (classes - 1) ** 0.5, weight @ weight.T
    _, s, directions = torch.linalg.svd(rows, full_matrices=False)
    # K S_B^+ has the eigenvalues 1 / s^2; in directions without a difference of means, s is a rounding error
    spread = s[: classes - 1] > max(rows.shape) * torch.finfo(s.dtype).eps * s[0]
    s, directions = s[: classes - 1][spread], directions[: classes - 1][spread]
    measures = {
        "1": ((directions @ within) * directions).sum(1).div(s.square()).sum() if len(s) else s.new_tensor(torch.nan),
        "1_quotient": classes * within.trace() / rows.square().sum(),
        "2_etf": (products / products.norm() - frame).norm(),
        "3": (weight / weight.norm() - rows / rows.norm()).square().sum(),
    }
    pairs = ~torch.eye(classes, dtype=torch.bool, device=rows.device)
    for name, vectors in {"means": rows, "weights": weight}.items():
        norms = vectors.norm(dim=1)
        measures[f"2_norm_{name}"] = norms.std() / norms.mean()
        measures[f"2_angle_{name}"] = (cosines(vectors)[pairs] + 1 / (classes - 1)).abs().mean()
    return {name: measures[name] for name in MEASURES}
