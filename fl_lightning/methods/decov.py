r"""DeCov: Cogswell et al., Reducing Overfitting in Deep Networks by Decorrelating Representations, ICLR 2016, Eq. 3.

Paper: https://arxiv.org/abs/1511.06068

.. math:: \ell = \frac{w}{2} \left( \lVert C \rVert_F^2 - \lVert \mathrm{diag}\, C \rVert^2 \right)
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Step
from fl_lightning.functional import covariance_decorrelation
from fl_lightning.utilities.errors import require


class DeCov(Method):
    """Penalises covariance between dimensions of the representation; FedDecorr compares with it in its Table 6.

    C is the covariance of the representation over the batch, ``(d, d)``. The term grows with the fourth power of the
    representation's scale. FedDecorr does not print the coefficient it used.

    Args:
        weight: coefficient w, at least 0; 0 gives FedAvg.

    Raises:
        UsageError: ``weight`` is below 0.
    """

    requires = ("representation",)

    def __init__(self, weight: float = 0.1) -> None:
        require(weight >= 0, "DeCov.weight", weight, "give 0 or more")
        self.weight = weight

    def penalty(self, client: ClientContext, step: Step) -> Tensor | None:
        return self.weight * covariance_decorrelation(step.taps["representation"])
