r"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous FL, NeurIPS 2020, Eq. 8 and 9.

Paper: https://arxiv.org/abs/2007.07481
Code: https://github.com/JYWa/FedNova

.. math::
    w^{t+1} = w^t - \tau_{eff} \sum_k p_k d_k, \qquad d_k = \frac{w^t - y_k}{\lVert a_k \rVert_1}, \qquad
    \tau_{eff} = \sum_k p_k \lVert a_k \rVert_1
"""

from __future__ import annotations

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, require_sgd
from fl_lightning.core.server import Server
from fl_lightning.core.state import State
from fl_lightning.core.weighted import Weighted


class FedNova(Method):
    r"""Normalises each client's change by its number of local steps, so that more steps do not give more influence.

    :math:`\lVert a_k \rVert_1` is the sum of the weights of the visit's gradients in the client's change,
    in units of the first step's learning rate: the number of steps for plain SGD, and
    :math:`\sum_t (1 - \rho^t) / (1 - \rho)` over the steps t with momentum :math:`\rho`. Together with FedProx, it
    counts the pull, by which plain SGD shrinks the sum by :math:`1 - \eta \mu` at each step, and :math:`\tau_{eff}`
    counts steps, as in the authors' code. Weight decay is not considered. Buffers take the plain mean. The method has
    no coefficient; without FedProx, and if all clients take equal numbers of steps, it is FedAvg.

    Raises:
        UsageError: the clients' optimizer is not SGD, it has dampening, Nesterov momentum or parameter groups that
            differ, or the run sends no weights.
    """

    needs_exchange = True
    mu = 0.0

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        self.mu = client.methods.proximal
        require_sgd("FedNova", optimizer, "its normalisation holds for SGD, with or without momentum; use that")

    def on_client_start(self, client: ClientContext) -> None:
        visit = client.scratch(self)
        visit.counter = visit.norm = visit.first_rate = 0.0

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        rate, momentum = (optimizer.param_groups[0][key] for key in ("lr", "momentum"))
        visit = client.scratch(self)
        visit.first_rate = visit.first_rate or rate
        # a proximal term pulls by what the visit has moved so far
        visit.counter = momentum * visit.counter + 1 - visit.first_rate * self.mu * visit.norm
        visit.norm += rate / visit.first_rate * visit.counter if rate else 0.0

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted] | None:
        return {"steps": Weighted.of(client.num_steps if self.mu else client.scratch(self).norm, client.weight)}

    def transform_client_update(self, client: ClientContext, delta: State) -> State:
        norm = client.scratch(self).norm
        return {name: value / norm for name, value in delta.items()} if norm else delta

    def transform_update(self, server: Server, delta: State, payload: dict[str, Weighted]) -> State:
        steps = payload["steps"].mean()
        return {name: value * steps for name, value in delta.items()}
