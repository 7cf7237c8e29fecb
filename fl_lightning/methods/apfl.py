r"""APFL: Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, 2020, Algorithm 1.

Paper: https://arxiv.org/abs/2003.13461
Code: https://github.com/MLOPTPSU/FedTorch

.. math::
    m = \alpha_k v_k + (1 - \alpha_k) y, \qquad v_k \leftarrow v_k - \eta \alpha_k \nabla f_k(m), \qquad
    \alpha_k \leftarrow \alpha_k - \eta \langle v_k - y, \nabla f_k(m) \rangle

The global model is trained by FedAvg, with the local parameters y. In addition, a client trains :math:`v_k` such that
the mixture m fits its data.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.state import State, clone
from fl_lightning.methods.ditto import own_model, rate_of
from fl_lightning.utilities.errors import require


class APFL(Method):
    r"""Trains a personal model :math:`v_k` in a mixture with the global one, on the same batches.

    Both gradients of a step are computed before it. :math:`v_k` takes plain SGD steps, at the rate :math:`\eta` of the
    client's optimizer but without its momentum, weight decay and clipping. The mixture has its own running statistics,
    and the module's own loss. The update that a client sends does not depend on :math:`v_k` and :math:`\alpha_k`.

    On its test data, a client uses the mixture of :math:`v_k` and the received model (evaluation point R). A new client
    uses the global model, with which :math:`v_k` begins; ``test/accuracy`` measures the global model.

    Args:
        alpha: initial share :math:`\alpha_k` of :math:`v_k`, in [0, 1]. With 0, the mixture is the global model, and
            with 1, :math:`v_k` is trained as by Local.
        adaptive: move :math:`\alpha_k` by its gradient in the first step of each visit, within [0, 1].
            ``train/apfl/alpha`` is its mean over the clients.
        alpha_decay: coefficient, at least 0, of the :math:`\alpha_k` that is added to this gradient; 0.02 in the code.

    Raises:
        UsageError: an argument is out of its range, the optimizer has several rates or needs a closure, or gradients
            are accumulated.
    """

    needs_gradients = True
    memory_keys: ClassVar = {
        "model": "v_k: the personal parameters, and the buffers of the mixture, by name",
        "alpha": "the share of v_k in the mixture",
    }

    def __init__(self, alpha: float = 0.5, adaptive: bool = False, alpha_decay: float = 0.0) -> None:
        require(0 <= alpha <= 1, "APFL.alpha", alpha, "use a number in [0, 1]")
        require(alpha_decay >= 0, "APFL.alpha_decay", alpha_decay, "give 0 or more")
        self.alpha, self.adaptive, self.alpha_decay = alpha, adaptive, alpha_decay

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        rate_of("APFL", optimizer)

    def on_client_start(self, client: ClientContext) -> None:
        visit, memory = client.scratch(self), client.memory(self)
        visit.model = own_model(client, memory.get("model", {}))
        device = next(iter(visit.model.values())).device
        visit.alpha = torch.full((), memory.get("alpha", self.alpha), dtype=torch.float64, device=device)

    @torch.no_grad()
    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        visit, rate = client.scratch(self), optimizer.param_groups[0]["lr"]
        v, y, alpha = visit.model, client.live, visit.alpha
        mixture = dict(v)
        for name in client.trainable:
            mixture[name] = torch.lerp(y[name], v[name], alpha.to(v[name]))
        gradients = client.gradients(mixture, loss="own")
        v.update({name: value for name, value in mixture.items() if name not in gradients})
        slope = self.alpha_decay * alpha
        for name, gradient in gradients.items():
            slope = slope + ((v[name] - y[name]).double() * gradient).sum()
            v[name] = v[name].add(alpha.to(gradient) * gradient, alpha=-rate)
        if self.adaptive:
            first_step = (torch.zeros_like(alpha) + (client.num_steps == 0)).bool()  # as a scalar it needs no copy
            visit.alpha = torch.where(first_step, (alpha - rate * slope).clamp(0, 1), alpha)

    def on_client_end(self, client: ClientContext) -> None:
        visit = client.scratch(self)
        client.memory(self).update(model=clone(visit.model), alpha=float(visit.alpha))
        if self.adaptive:
            client.log("apfl/alpha", float(visit.alpha), weight=1.0)

    def personal_state(self, client: ClientContext) -> State | None:
        memory = client.memory(self)
        if not memory:
            return None
        received, model, alpha = client.received, memory["model"], memory["alpha"]
        mixed = {name: torch.lerp(received[name], model[name], alpha) for name in client.trainable}
        return model | mixed
