"""Rules for the changes of clients some of whom may lie: means and choices that few of them cannot move far.

Trimmed mean, median: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
https://arxiv.org/abs/1803.01498

Krum: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.
https://arxiv.org/abs/1703.02757

Nearest-neighbour mixing: Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity,
AISTATS 2023. https://arxiv.org/abs/2302.01772
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.utilities.errors import require


def trimmed_mean(rows: Tensor, cut: int) -> Tensor:
    r"""Mean of each coordinate without its ``cut`` smallest and ``cut`` largest values.

    Args:
        rows: a row for each client, ``(m, *shape)``.
        cut: 0 or more, below m / 2; :math:`\lfloor (m - 1) / 2 \rfloor` gives the median, the mean of the two middle
            values for even m.

    Returns:
        ``(*shape)``. Each coordinate lies between those of honest clients if at most ``cut`` clients lie.

    Raises:
        UsageError: ``cut`` is out of range.

    Source: Yin et al., Definitions 1 and 2.

    Example:
        >>> import torch
        >>> trimmed_mean(torch.tensor([[1.0, 0.0], [3.0, 9.0], [2.0, 1.0]]), 1)
        tensor([2., 1.])
    """
    require(0 <= 2 * cut < len(rows), "cut", cut, f"use 0 or more, below {len(rows)} / 2")
    if rows.device.type == "cpu" and rows.dtype == torch.float64 and not rows.requires_grad:
        # numpy is several times faster, as it keeps no indices
        ordered = torch.from_numpy(np.sort(rows.numpy(), 0))
    else:
        ordered = rows.sort(0).values
    return ordered[cut : len(rows) - cut].mean(0)


def krum_scores(squared_distances: Tensor, f: int) -> Tensor:
    r"""Sum of the squared distances to the m - f - 2 nearest others, small for a row in company.

    Args:
        squared_distances: of each pair of rows, ``(m, m)``.
        f: number of clients that may lie, 0 or more.

    Returns:
        ``(m,)``.

    Source: Blanchard et al., section 4.

    Example:
        >>> import torch
        >>> krum_scores(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), 0)
        tensor([1., 1., 4.])
    """
    m = len(squared_distances)
    is_itself = torch.eye(m, dtype=torch.bool, device=squared_distances.device)
    return squared_distances.masked_fill(is_itself, torch.inf).sort(1).values[:, : max(m - f - 2, 0)].sum(1)


def chosen_by_score(scores: Tensor, number: int) -> Tensor:
    """Weights of 1 for the rows of the least scores and 0 for the others; among equal scores the first rows count.

    Args:
        scores: ``(m,)``, or several of them ``(c, m)``.
        number: how many rows are chosen, from 1 to m.

    Returns:
        Weights in the shape of ``scores``.

    Source: MultiKrum of Blanchard et al., section 4; with distances as scores, the neighbours of Allouah et al.,
    Algorithm 2.

    Example:
        >>> import torch
        >>> chosen_by_score(torch.tensor([3.0, 1.0, 1.0, 1.0]), 2)
        tensor([0., 1., 1., 0.])
    """
    order = scores.argsort(dim=-1, stable=True)[..., :number]
    return torch.zeros_like(scores).scatter_(-1, order, 1.0)
