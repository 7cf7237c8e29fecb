r"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1.

Paper: https://arxiv.org/abs/1910.06378

.. math::
    y \leftarrow y - \eta (g_k(y) - c_k + c), \qquad c_k^+ = c_k - c + \frac{w^t - y_k}{K \eta}, \qquad
    c \leftarrow c + \frac{1}{N} \sum_{k \in S} (c_k^+ - c_k)
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, ServerValue, require_sgd
from fl_lightning.core.server import Server
from fl_lightning.core.state import clone
from fl_lightning.core.weighted import LazyWeighted, Weighted
from fl_lightning.methods.ditto import rate_of


class SCAFFOLD(Method):
    r"""Corrects client drift by control variates: estimates of the client's gradient, :math:`c_k`, and of the mean, c.

    K is the number of local steps, :math:`\eta` the clients' learning rate and N the number of all clients, by which
    the sum over the cohort S is divided. Control variates start at 0, so that the first round is FedAvg, and cover
    trained parameters only. A client without a local step, or with learning rate 0 under ``displacement``, does not
    change c. The method has no coefficient.

    Args:
        variate: computation of :math:`c_k^+`: by the equation above, the paper's option II (``displacement``, with the
            sum of the learning rates for :math:`K \eta`), which is correct only for SGD without momentum; or as the
            mean of the visit's ``gradients``, which equals it there, apart from weight decay, and is correct for any
            optimizer. A gradient is read after clipping, before the optimizer, and the correction :math:`c - c_k` is
            subtracted from it.
        correction: add :math:`c - c_k` to the ``gradient``; or, as NIID-Bench does, add :math:`-\eta (c - c_k)` to the
            parameters after the step (``post_step``), which bypasses momentum. With ``post_step``, ``displacement``
            accepts momentum :math:`\rho`, but its control variates are too large by about :math:`1 / (1 - \rho)`.
        weighting: weights of the clients' changes: ``uniform``, as in the paper, or ``examples``, those of FedAvg.
        scaled: as in FedDyn's code, divide c by :math:`\omega_k = N n_k / n` in the client's correction, which becomes
            :math:`c / \omega_k - c_k`, and multiply its contribution to c, :math:`c_k^+ - c_k`, by :math:`\omega_k`.
            Here :math:`n_k` is the client's number of examples and n the number of all clients' examples. With equal
            weights of the changes, the optimum then weights the clients' losses by their examples. For equal numbers
            of examples, it is the paper's form. With ``displacement``, :math:`c_k^+` is computed with c itself, as in
            that code, so that it is a mean gradient only if c is 0.

    Raises:
        UsageError: ``displacement`` without plain SGD, it or ``post_step`` with several learning rates, or a run that
            sends no weights.
    """

    needs_exchange = True
    assumes_fresh = True
    memory_keys: ClassVar = {"variate": "c_k, by the name of the parameter"}
    global_variate = ServerValue(Server.zeros)

    def __init__(
        self,
        variate: Literal["displacement", "gradients"] = "displacement",
        correction: Literal["gradient", "post_step"] = "gradient",
        weighting: Literal["uniform", "examples"] = "uniform",
        scaled: bool = False,
    ) -> None:
        self.variate, self.correction, self.weighting, self.scaled = variate, correction, weighting, scaled

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        if self.variate == "displacement":
            hint = (
                "its variates hold for SGD without momentum and with one rate; use that, or SCAFFOLD.variate=gradients"
            )
            require_sgd("SCAFFOLD", optimizer, hint, momentum=self.correction == "post_step")
        if self.correction == "post_step":
            rate_of("SCAFFOLD.correction=post_step", optimizer)

    def on_fit_start(self, server: Server) -> None:
        self._mean_examples = server.num_examples / server.num_clients

    def on_client_start(self, client: ClientContext) -> None:
        visit, variate = client.scratch(self), client.memory(self).get("variate", {})
        # a client without examples takes no step, and its share does not count
        visit.share = (client.info.num_examples or 1) / self._mean_examples if self.scaled else 1.0
        visit.gap = {}
        for name in client.sent:
            visit.gap[name] = self._of_server(client, name) / visit.share - variate.get(name, 0.0)
        visit.rates, visit.gradients, visit.later = 0.0, {}, {}
        if self.variate == "gradients":
            visit.gradients = {name: torch.zeros_like(value) for name, value in visit.gap.items()}
            # clipping and other methods change the gradients after this one
            if client.clips_gradients or len(client.methods.methods) > 1:
                visit.later = clone(visit.gradients)

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        visit = client.scratch(self)
        visit.rates += optimizer.param_groups[0]["lr"]
        client.add_gradients_to(visit.gradients)
        if self.correction == "gradient":
            client.add_to_gradients(visit.gap)
        client.add_gradients_to(visit.later, -1.0)

    def on_after_clipping(self, client: ClientContext, optimizer: Optimizer) -> None:
        # the changes after the correction, gradient after minus before, are summed separately, so that nothing is
        # rounded without them
        client.add_gradients_to(client.scratch(self).later)

    def on_after_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        if self.correction == "post_step":
            client.add_to_parameters(client.scratch(self).gap, -optimizer.param_groups[0]["lr"])

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted] | None:
        visit = client.scratch(self)
        # without a step, or with a rate of 0 throughout, a displacement says nothing about the gradient
        if client.num_steps == 0 or (self.variate == "displacement" and not visit.rates):
            return None
        before, variate, visit.gap = client.memory(self).get("variate", {}), {}, {}
        for name in client.sent:
            if self.variate == "gradients":
                total = visit.gradients[name]
                estimate = (total + visit.later[name] if visit.later else total) / client.num_steps
            else:
                estimate = before.get(name, 0.0) - self._of_server(client, name) - client.change[name] / visit.rates
            variate[name] = estimate.to(client.live[name])
        client.memory(self)["variate"] = variate

        def change(name: str) -> Tensor:
            return ((variate[name] - before.get(name, 0.0)) * visit.share).double()

        shapes = {name: value.shape for name, value in variate.items()}
        return {name: LazyWeighted(partial(change, name), shape) for name, shape in shapes.items()}

    def _of_server(self, client: ClientContext, name: str) -> Tensor:
        return self.global_variate[name].to(client.live[name])

    def client_weight(self, client: ClientContext) -> float | None:
        return 1.0 if self.weighting == "uniform" else None

    def on_round_end(self, server: Server, payload: dict[str, Weighted]) -> None:
        for name, value in payload.items():
            self.global_variate[name] += value.total / server.num_clients
