r"""Per-FedAvg: Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020, Algorithm 1.

Paper: https://arxiv.org/abs/2002.07948

.. math::
    y \leftarrow y - \beta \big(I - \alpha \nabla^2 f_k(y; D'')\big) \nabla f_k\big(y - \alpha \nabla f_k(y; D); D'\big)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.state import State, select
from fl_lightning.methods.fedsam import reading_sums
from fl_lightning.utilities.errors import require


class PerFedAvg(Method):
    r"""Trains a global model from which one gradient step leads to a good model of each client.

    Each local step has three batches: D of the step, and :math:`D'` and :math:`D''` from a separate random stream.
    :math:`\beta` is the learning rate of the client's optimizer, and all steps start from y, where corrections of
    other methods are added, too. Terms of other methods enter all gradients. Running statistics come from the pass
    on D at y. Clients train sequentially. The paper weights them equally, as ``trainer.weighting=uniform`` does.

    A client's model takes one step of rate :math:`\alpha` from the global model, on a batch of its training data and
    with the loss of the module alone (evaluation point A). That holds for new clients, too.

    Args:
        inner_lr: rate :math:`\alpha \ge 0` of the inner step; 0 gives FedAvg.
        hessian: compute the product with :math:`\nabla^2 f_k` as a difference of gradients (HF), with four gradients a
            step; or leave it out (FO), with two.
        delta: :math:`\delta > 0` of the difference
            :math:`(\nabla f_k(y + \delta g) - \nabla f_k(y - \delta g)) / (2 \delta)`.

    Raises:
        UsageError: ``inner_lr`` is below 0 or ``delta`` not above 0, another method gives each client its own model,
            or as in :class:`FedSAM`.
    """

    replaces_gradients = True
    evaluation_point = "adapted"

    def __init__(self, inner_lr: float = 0.01, hessian: bool = False, delta: float = 1e-3) -> None:
        require(inner_lr >= 0, "PerFedAvg.inner_lr", inner_lr, "give 0 or more")
        require(delta > 0, "PerFedAvg.delta", delta, "use a number above 0")
        self.inner_lr, self.hessian, self.delta = inner_lr, hessian, delta

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        names = ", ".join(reading_sums(client))
        if names:
            rank_zero_warn(f"method=PerFedAvg: {names} corrects gradients that are not taken at y")

    @torch.no_grad()
    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        if not self.inner_lr:
            return
        visit = client.scratch(self)
        if not hasattr(visit, "batches"):
            visit.batches = client.batches(self.name, math.inf)
        trainable = select(client.live, client.trainable)
        live: dict[str, Any] = {name: p for name, p in trainable.items() if p.grad is not None}
        inner = {name: value - self.inner_lr * value.grad for name, value in live.items()}
        outer: State = client.gradients(inner, next(visit.batches))
        if self.hessian:
            batch, moves = next(visit.batches), {name: self.delta * outer[name] for name in live}
            ahead = {name: live[name] + move for name, move in moves.items()}
            behind = {name: live[name] - move for name, move in moves.items()}
            after, before = client.gradients(ahead, batch), client.gradients(behind, batch)
            factor = self.inner_lr / (2 * self.delta)
            outer = {name: outer[name] - factor * (after[name] - before[name]) for name in live}
        for name, value in live.items():
            value.grad = outer[name]

    def personal_state(self, client: ClientContext) -> State | None:
        batch = next(client.batches(self.name), None)
        if batch is None:
            return None
        adapted = {}
        for name, gradient in client.gradients(batch=batch, loss="own").items():
            adapted[name] = client.live[name].detach() - self.inner_lr * gradient
        return adapted
