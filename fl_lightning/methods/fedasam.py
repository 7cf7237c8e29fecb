r"""FedASAM: Caldarola et al., Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022.

Paper: https://arxiv.org/abs/2203.11834
Code: https://github.com/debcaldarola/fedsam

.. math::
    y \leftarrow y - \eta \nabla f_k\Big(y + \rho \frac{T^2 g}{\lVert T g \rVert}\Big), \qquad g = \nabla f_k(y), \quad
    T = |y| + \eta_a
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.methods.fedsam import FedSAM
from fl_lightning.utilities.errors import require


class FedASAM(FedSAM):
    r"""FedSAM with a perturbation relative to the size of each parameter, so that rescaled layers have the same one.

    In place of a ball around y, the nearby point is in an ellipsoid with the scales T. They are :math:`|y| + \eta_a`
    for parameters whose name contains ``weight``, and 1 for the others, as in the authors' code. All else is as in
    :class:`FedSAM`.

    Args:
        rho: size :math:`\rho \ge 0` of the perturbation; 0 gives FedAvg.
        eta: smallest scale :math:`\eta_a \ge 0` of a weight.
        adaptive: ``weights``, as above; or ``all``, in which T is :math:`|y|` for all parameters, without
            :math:`\eta_a`, so that a bias of 0 is not perturbed.

    Raises:
        UsageError: as in :class:`FedSAM`, or ``eta`` is below 0.
    """

    name = "fedasam"

    def __init__(self, rho: float = 0.7, eta: float = 0.2, adaptive: Literal["weights", "all"] = "weights") -> None:
        super().__init__(rho)
        require(eta >= 0, "FedASAM.eta", eta, "give 0 or more")
        self.eta, self.adaptive = eta, adaptive

    def scale(self, name: str, value: Tensor) -> Tensor | float:
        if self.adaptive == "all":
            return value.abs()
        return value.abs() + self.eta if "weight" in name else 1.0
