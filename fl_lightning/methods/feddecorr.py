r"""FedDecorr: Shi et al., Towards Understanding and Mitigating Dimensional Collapse in ... FL, ICLR 2023, Eq. 6, 8.

Paper: https://arxiv.org/abs/2210.00226
Code: https://github.com/bytedance/FedDecorr

.. math:: \ell = \beta \lVert K \rVert_F^2 / d^2, \quad K \text{ the correlation matrix of } z \text{ over the batch}
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Step
from fl_lightning.functional import correlation_frobenius, singular_value_variance
from fl_lightning.utilities.errors import require


class FedDecorr(Method):
    r"""Decorrelates the d dimensions of the representation, so that it does not collapse into a few of them.

    The term of the authors' code is about B times the printed equation, where B is the batch size, and
    :math:`\beta = 0.1` was chosen for it. Its gradient grows as the representation's spread over the batch shrinks, in
    both forms of the correlation. On networks without normalisation layers, whose spread is small at the start, it can
    dominate the loss. A constant representation makes it 0, so training can end there: ``train/feddecorr`` is then 0.
    Take a network with normalisation, or a smaller ``beta``.

    Args:
        beta: coefficient :math:`\beta \ge 0`; 0 gives FedAvg. The authors use 0.1, and 0.05 for CIFAR-100.
        form: ``official``, as in the authors' code; ``paper``, Eq. 8 as printed; or ``singular_values``, Eq. 6: the
            variance of the singular values of z's covariance, which the paper replaces by Eq. 8. If the dimensions of z
            had variance 1, it would be d times ``paper``, minus 1. In general, it grows with the fourth power of the
            scale of z.

    Raises:
        UsageError: ``beta`` is below 0.
    """

    requires = ("representation",)

    def __init__(self, beta: float = 0.1, form: Literal["official", "paper", "singular_values"] = "official") -> None:
        require(beta >= 0, "FedDecorr.beta", beta, "give 0 or more")
        self.beta, self.form = beta, form

    def penalty(self, client: ClientContext, step: Step) -> Tensor | None:
        z = step.taps["representation"]
        term = singular_value_variance(z) if self.form == "singular_values" else correlation_frobenius(z, self.form)
        return self.beta * term
