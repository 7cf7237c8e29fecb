r"""FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022.

Paper: https://arxiv.org/abs/2106.06639

.. math:: w \leftarrow w + \frac{\eta_g}{K} \sum_{k=1}^{K} (1 + \tau_k)^{-p} \Delta_k
"""

from __future__ import annotations

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.state import State
from fl_lightning.utilities.errors import require


class FedBuff(Method):
    r"""Averages K updates of an asynchronous server, after scaling down stale ones.

    :math:`\tau_k` is the number of server steps since the state with which client k began. The buffer is
    ``trainer.asynchronous``: ``Buffered(concurrency, size=K)``; :math:`\eta_g` is the rate of the server optimizer.
    Updates count the same, regardless of ``trainer.weighting``, and the sum is divided by K, not by the sum of the
    factors. Buffers take their plain mean. In a synchronous run all :math:`\tau_k` are 0.

    Args:
        power: p, at least 0; 0 is the plain mean.

    Raises:
        UsageError: ``power`` is below 0, or the run sends no weights.
    """

    needs_exchange = True

    def __init__(self, power: float = 0.5) -> None:
        require(0 <= power < float("inf"), "FedBuff.power", power, "use a finite number from 0")
        self.power = power

    def client_weight(self, client: ClientContext) -> float | None:
        return 1.0

    def transform_client_update(self, client: ClientContext, delta: State) -> State:
        scale = (1 + client.staleness) ** -self.power
        return delta if scale == 1 else {name: scale * value for name, value in delta.items()}
