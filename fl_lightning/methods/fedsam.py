r"""FedSAM: Caldarola et al., Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022.

Paper: https://arxiv.org/abs/2203.11834
Code: https://github.com/debcaldarola/fedsam

.. math:: y \leftarrow y - \eta \nabla f_k\Big(y + \rho \frac{g}{\lVert g \rVert}\Big), \qquad g = \nabla f_k(y)
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.state import State, select
from fl_lightning.functional.rows import HALF
from fl_lightning.utilities.errors import require


class FedSAM(Method):
    r"""Takes each local step with the gradient at a nearby point of higher loss, which leads to flat minima.

    The point is :math:`\rho` away from y, in the direction of the gradient g of the whole loss, with one norm over all
    trained parameters; where g is 0, it is y. Momentum and weight decay act at y. The gradients of the other methods'
    terms are taken at the nearby point, too, but corrections of gradients, as of FedProx and SCAFFOLD, are added at y.
    A step computes two gradients on its batch, with the same dropout masks; the second leaves the running statistics
    alone. The logged loss is that at y.

    Args:
        rho: distance :math:`\rho \ge 0`; 0 gives FedAvg.

    Raises:
        UsageError: ``rho`` is below 0, gradients are accumulated, the optimizer needs a closure, the module overrides a
            hook of the backward pass, or another method of the list replaces the gradients.
    """

    replaces_gradients = True

    def __init__(self, rho: float = 0.1) -> None:
        require(rho >= 0, f"{type(self).__name__}.rho", rho, "give 0 or more")
        self.rho = rho

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        names = reading_sums(client)
        if names:
            who = type(self).__name__
            rank_zero_warn(f"method={who}: {', '.join(names)} corrects gradients that are not taken at y")

    @torch.no_grad()
    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        if not self.rho:
            return
        trainable = select(client.live, client.trainable)
        live = {name: value for name, value in trainable.items() if value.grad is not None}
        slopes: State = {}
        for name, value in live.items():
            gradient: Any = value.grad
            slopes[name] = gradient.to_dense() if gradient.is_sparse else gradient
        scaled = (self.scale(name, value) * slopes[name] for name, value in live.items())
        # bfloat16 has too few digits for a norm
        norms = [(value.float() if value.dtype in HALF else value).norm() for value in scaled]
        norm = torch.stack(norms).norm()
        rate = torch.where(norm > 0, self.rho / norm, 0.0)
        at = {}
        for name, value in live.items():
            at[name] = value + self.scale(name, value) ** 2 * slopes[name] * rate.to(value)
        for name, gradient in client.gradients(at).items():
            if name in live:
                live[name].grad = gradient

    def scale(self, name: str, value: Tensor) -> Tensor | float:
        r"""The scale T of a parameter, by which the perturbation is :math:`\rho T^2 g / \lVert T g \rVert`."""
        return 1.0


def reading_sums(client: ClientContext) -> list[str]:
    """The methods of the list for which a client's change is its rate times a sum of gradients on its way."""
    # subclasses inherit the names
    names = ("scaffold", "feddyn", "fednova")
    return [type(method).__name__ for method in client.methods.methods if method.name in names]
