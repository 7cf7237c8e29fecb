r"""pFedMe: Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1.

Paper: https://arxiv.org/abs/2006.08848
Code: https://github.com/CharlieDinh/pFedMe

.. math::
    \theta \leftarrow \theta - a \big(\nabla f_k(\theta; D) + \lambda (\theta - x_k)\big) \text{ K times}, \qquad
    x_k \leftarrow x_k - \eta \lambda (x_k - \theta), \qquad w \leftarrow w + \beta \sum_k p_k (x_k - w)
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Payload, require_sgd
from fl_lightning.core.server import Server
from fl_lightning.core.state import State
from fl_lightning.methods.ditto import check_pull, own_model
from fl_lightning.utilities.errors import require

# their equations hold if a client sends the change of the parameters that it trains, or have another anchor
UNFIT = ("fedprox", "scaffold", "feddyn", "fednova")


class PFedMe(Method):
    r"""Trains a personal model :math:`\theta` near a local copy :math:`x_k` of the global model, which follows it.

    Both begin a visit as the received model w. On each batch D, :math:`\theta` takes K steps at the rate a of the
    client's optimizer, with its weight decay, and then :math:`x_k` takes one. :math:`\theta` is not reset between
    batches, and a batch counts once in its running statistics. The client sends :math:`x_k - w`.

    On its test data, a client uses :math:`\theta` as its last visit left it (evaluation point T; tags have
    ``trained``). A new client uses the global model, which ``test/accuracy`` measures.

    Args:
        lambda_: coefficient :math:`\lambda \ge 0`; with 0, the global model does not move.
        inner_steps: number K of steps on a batch, at least 1; each computes a gradient.
        beta: rate :math:`\beta \ge 0` of the server, before ``trainer.server_optimizer``; 1 gives the mean of the
            :math:`x_k`, and with 0 the global model does not move.
        outer_lr: rate :math:`\eta > 0` of :math:`x_k`.
        personal: model that is evaluated for the client: ``theta``, as the paper says, or ``local`` for :math:`x_k`
            with the buffers of :math:`\theta`, as in the authors' code.

    Raises:
        UsageError: an argument is out of its range, the optimizer is not SGD without momentum, with one rate and one
            weight decay, :math:`a \lambda \ge 2` or :math:`\eta \lambda \ge 2`, for which the models diverge,
            gradients are clipped or replaced, or the list has FedProx, SCAFFOLD, FedDyn or FedNova.
    """

    evaluation_point = "trained"
    memory_keys: ClassVar = {"model": "theta, or x_k, with the buffers, by name"}

    def __init__(
        self,
        lambda_: float = 15.0,
        inner_steps: int = 5,
        beta: float = 1.0,
        outer_lr: float = 0.005,
        personal: Literal["theta", "local"] = "theta",
    ) -> None:
        require(lambda_ >= 0, "PFedMe.lambda_", lambda_, "give 0 or more")
        require(inner_steps >= 1, "PFedMe.inner_steps", inner_steps, "use 1 or more")
        require(beta >= 0, "PFedMe.beta", beta, "give 0 or more")
        require(outer_lr > 0, "PFedMe.outer_lr", outer_lr, "use a number above 0")
        self.lambda_, self.inner_steps, self.beta, self.outer_lr = lambda_, inner_steps, beta, outer_lr
        self.personal, self.needs_gradients = personal, inner_steps > 1

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        require_sgd("PFedMe", optimizer, "theta takes plain SGD steps; use that", momentum=False)
        check_pull("PFedMe.outer_lr", self.outer_lr, self.lambda_)
        pull = optimizer.param_groups[0]["lr"] * self.lambda_
        hint = "theta diverges from 2 on; lower the client optimizer's rate or the coefficient"
        require(pull < 2, "PFedMe: the client optimizer's learning rate times lambda_", pull, hint)
        decays = sorted({group["weight_decay"] for group in optimizer.param_groups})
        hint = "theta has one; give all parameters the same, or set PFedMe.inner_steps=1"
        fits = len(decays) == 1 or not self.needs_gradients
        require(fits, "PFedMe with the client optimizer's weight_decay", decays, hint)
        hint = "the further steps on a batch are not clipped; remove it, or set PFedMe.inner_steps=1"
        require(not (client.clips_gradients and self.needs_gradients), "PFedMe with gradient clipping", True, hint)
        methods = client.methods.methods
        names = [type(m).__name__ for m in methods if m.name in UNFIT or m.replaces_gradients]
        require(not names, "method", ["PFedMe", *names], "they move other parameters than x_k; keep one of them")

    def on_client_start(self, client: ClientContext) -> None:
        client.scratch(self).anchor = {name: client.received[name] for name in client.trainable}

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        client.add_to_gradients(self._gaps(client), self.lambda_)

    @torch.no_grad()
    def on_after_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        for _ in range(self.inner_steps - 1):
            gradients, gaps = client.gradients(), self._gaps(client)
            for name, gradient in gradients.items():
                theta = client.live[name]
                theta.sub_(group["lr"] * (gradient + self.lambda_ * gaps[name] + group["weight_decay"] * theta))
        anchor, gaps = client.scratch(self).anchor, self._gaps(client)
        for name, gap in gaps.items():
            anchor[name] = anchor[name].add(gap, alpha=self.outer_lr * self.lambda_)

    def _gaps(self, client: ClientContext) -> State:
        anchor = client.scratch(self).anchor
        return {name: client.live[name].detach() - x for name, x in anchor.items()}

    def on_client_end(self, client: ClientContext) -> None:
        local = client.scratch(self).anchor if self.personal == "local" else {}
        client.memory(self)["model"] = own_model(client, client.live | local)

    def transform_client_update(self, client: ClientContext, delta: State) -> State:
        anchor = client.scratch(self).anchor
        # rounded to the parameters' type, in which a site sends it
        return {name: (anchor[name] - client.received[name]).double() for name in delta}

    def transform_update(self, server: Server, delta: State, payload: Payload) -> State:
        return {name: self.beta * value for name, value in delta.items()}

    def personal_state(self, client: ClientContext) -> State | None:
        return client.memory(self).get("model")
