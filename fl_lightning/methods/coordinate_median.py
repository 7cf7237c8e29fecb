r"""CoordinateMedian: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.

Paper: https://arxiv.org/abs/1803.01498

.. math:: \Delta_j = \operatorname{median}_k x_{k j}
"""

from __future__ import annotations

from fl_lightning.methods.trimmed_mean import TrimmedMean


class CoordinateMedian(TrimmedMean):
    """Takes the median of each coordinate j of the changes, and of floating-point buffers.

    For an even number of clients, it is the mean of the two middle values. It has no neutral coefficient.

    Raises:
        UsageError: another method's sums would pass by the rule.
    """

    name = "coordinatemedian"

    def __init__(self) -> None:
        super().__init__(f=0)

    def cut(self, m: int) -> int:
        return (m - 1) // 2
