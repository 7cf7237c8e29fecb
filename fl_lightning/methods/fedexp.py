r"""FedExP: Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023.

Paper: https://arxiv.org/abs/2301.09604
Code: https://github.com/Divyansh03/FedExP

.. math::
    w^{t+1} = w^t + \eta_g \Delta, \qquad \Delta = \sum_k p_k \Delta_k, \qquad
    \eta_g = \max\left(1, \frac{\sum_k p_k \lVert \Delta_k \rVert^2}{2 (\lVert \Delta \rVert^2 + \epsilon)} \right)
"""

from __future__ import annotations

from typing import Literal

from torch.optim import SGD, Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, ServerValue, overrides
from fl_lightning.core.server import Server
from fl_lightning.core.state import State, clone, norm, select
from fl_lightning.core.weighted import LazyDifference, Weighted
from fl_lightning.utilities.errors import require

CHANGES_THE_MEAN = ("transform_client_update", "transform_update", "aggregate")


class FedExP(Method):
    r"""Extrapolates the mean change by a server rate that grows as the clients' changes disagree.

    :math:`\Delta_k` is the change of the parameters that client k sends, and :math:`p_k` its weight in the mean. From
    the second round on, the evaluated and saved parameters are the mean of the last two global models; buffers are the
    current ones, and ``trainer.buffers=recalibrate`` recomputes them for this mean. The rate :math:`\eta_g` is logged
    as ``fedexp/rate``.

    Args:
        eps: :math:`\epsilon \ge 0`; infinity (``.inf`` in YAML) gives FedAvg, except for ``average_last_two``.
        eps_scale: :math:`\epsilon` itself (``one``), or times the number of clients in the cohort, as in the authors'
            code (``cohort``).
        eps_decay: factor in (0, 1] of :math:`\epsilon` after each round; 0.998 squared in the authors' code.
        average_last_two: evaluate the mean of the last two models; if not, the last one.

    Raises:
        UsageError: an argument out of its range, a server optimizer that is not SGD with rate 1, a run that sends no
            weights, or another method that changes updates or their mean.
    """

    needs_exchange = True
    assumes_fresh = True
    rounds = ServerValue(lambda server: 0, travels=False)
    previous: ServerValue[State] = ServerValue(lambda server: {}, travels=False)

    def __init__(
        self,
        eps: float = 1e-3,
        eps_scale: Literal["one", "cohort"] = "one",
        eps_decay: float = 1.0,
        average_last_two: bool = True,
    ) -> None:
        require(eps >= 0, "FedExP.eps", eps, "give 0 or more")
        require(0 < eps_decay <= 1, "FedExP.eps_decay", eps_decay, "use a number in (0, 1]")
        self.eps, self.eps_scale, self.eps_decay = eps, eps_scale, eps_decay
        self.average_last_two = average_last_two

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        for method in client.methods.methods:
            changes = any(overrides(method, hook) for hook in CHANGES_THE_MEAN)
            hint = "it changes updates or their mean, by whose norms FedExP sets its rate; take one of them out"
            require(method is self or not changes, "FedExP beside method", type(method).__name__, hint)

    def on_fit_start(self, server: Server) -> None:
        optimizer = server.optimizer
        if optimizer is not None:
            defaults = SGD(optimizer.param_groups[0]["params"], lr=1.0).defaults
            averages = isinstance(optimizer, SGD) and optimizer.defaults == defaults
            hint = "FedExP sets the rate itself; leave it out, which is SGD with lr 1"
            require(averages, "trainer.server_optimizer with FedExP", str(optimizer), hint)

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted]:
        change = LazyDifference(client.live, client.received, client.sent)
        return {"square": Weighted.of(norm(change).square(), client.weight)}

    def transform_update(self, server: Server, delta: State, payload: dict[str, Weighted]) -> State:
        self.previous = clone(select(server.state, delta)) if self.rounds and self.average_last_two else {}
        eps = self.eps * self.eps_decay**self.rounds * (len(server.cohort) if self.eps_scale == "cohort" else 1)
        self.rounds += 1
        mean, of_mean = float(payload["square"].mean()), float(norm(delta).square()) + eps
        rate = max(1.0, mean / (2 * of_mean)) if of_mean else 1.0
        server.metrics["fedexp/rate"] = rate
        return {name: rate * value for name, value in delta.items()}

    def evaluated_state(self, server: Server, state: State) -> State:
        return state | {name: (state[name] + before) / 2 for name, before in self.previous.items()}
