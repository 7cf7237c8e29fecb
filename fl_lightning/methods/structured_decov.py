r"""StructuredDeCov: after Xiong et al., Regularizing Deep CNNs with a Structured Decorrelation Constraint, ICDM 2016.

Paper: https://doi.org/10.1109/ICDM.2016.0063

.. math::
    \ell = \frac{w}{2} \sum_{g(i) \ne g(j)} C_{ij}^2 - \frac{w \gamma}{2} \sum_{g(i) = g(j), i \ne j} C_{ij}^2
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Step
from fl_lightning.functional import structured_covariance_decorrelation
from fl_lightning.utilities.errors import require


class StructuredDeCov(Method):
    r"""Penalises covariance between groups of dimensions; FedDecorr compares with it in its Table 6.

    C is the covariance of the representation over the batch, ``(d, d)``, and g(i) the group of dimension i. The paper's
    constants are not public, so contiguous groups of equal size and :math:`\gamma` are our definition.

    Args:
        weight: coefficient w, at least 0; 0 gives FedAvg.
        groups: number of groups, from 1 to the width d of the representation; d gives DeCov.
        gamma: how much covariance inside a group is rewarded, at least 0; 0 ignores it.

    Raises:
        UsageError: ``weight`` or ``gamma`` is below 0, or ``groups`` is outside [1, d].
    """

    requires = ("representation",)

    def __init__(self, weight: float = 0.1, groups: int = 8, gamma: float = 0.0) -> None:
        require(weight >= 0, "StructuredDeCov.weight", weight, "give 0 or more")
        require(groups >= 1, "StructuredDeCov.groups", groups, "give 1 or more")
        require(gamma >= 0, "StructuredDeCov.gamma", gamma, "give 0 or more")
        self.weight, self.groups, self.gamma = weight, groups, gamma

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        layer = client.module.get_submodule(client.tap_paths["representation"])
        width = getattr(layer, "out_features", self.groups)
        hint = f"the representation has {width} dimensions, give at most that"
        require(self.groups <= width, "StructuredDeCov.groups", self.groups, hint)

    def penalty(self, client: ClientContext, step: Step) -> Tensor | None:
        z = step.taps["representation"]
        return self.weight * structured_covariance_decorrelation(z, self.groups, self.gamma)
