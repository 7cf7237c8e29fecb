r"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Eq. 2.

Paper: https://arxiv.org/abs/1812.06127
Code: https://github.com/litian96/FedProx

.. math:: \min_y f_k(y) + \frac{\mu}{2} \lVert y - w^t \rVert^2
"""

from __future__ import annotations

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.state import as_floats
from fl_lightning.core.weighted import Weighted
from fl_lightning.utilities.errors import require


class FedProx(Method):
    r"""Pulls a client's parameters y towards those it received, :math:`w^t`.

    The gradient of the proximal term, :math:`\mu (y - w^t)`, is added in place to the gradients of the trained
    parameters, which is cheaper than adding the term to the loss. ``train/fedprox`` is the value of the term after the
    last local step.

    Args:
        mu: coefficient :math:`\mu \ge 0`; 0 gives FedAvg.

    Raises:
        UsageError: ``mu`` is below 0.
    """

    def __init__(self, mu: float = 0.01) -> None:
        require(mu >= 0, "FedProx.mu", mu, "give 0 or more")
        self.mu = mu

    @property
    def proximal(self) -> float:
        return self.mu

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        client.add_to_gradients(client.drift_so_far(client.trainable), self.mu)

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted] | None:
        squares = sum(as_floats([change.square().sum() for change in client.change.values()]))
        client.log(self.name, 0.5 * self.mu * squares, weight=client.info.num_examples)
        return None
