r"""FedProto: Tan et al., Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, Eq. 3, 6 and 7.

Paper: https://arxiv.org/abs/2105.00243
Code: https://github.com/yuetan031/fedproto

.. math::
    \ell = \lambda \frac{1}{B d} \sum_b \lVert z_b - t_{y_b} \rVert^2, \qquad
    t_c = \frac{1}{|S_c|} \sum_{k \in S_c} \bar z_{k, c}, \quad S_c \text{ the clients that hold class } c
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, ServerValue, Step
from fl_lightning.core.server import Server
from fl_lightning.core.weighted import Weighted
from fl_lightning.functional import class_sums, prototype_distance
from fl_lightning.utilities.errors import require


class FedProto(Method):
    r"""Exchanges class prototypes, the mean representations of each class, and pulls representations towards them.

    As in the authors' code, a client's prototypes :math:`\bar z_{k, c}` are means over its last local epoch, collected
    while it trains, and the server's :math:`t_c` are plain means over the clients of the cohort that hold the class,
    which the paper weights by examples. A class that none of them holds keeps its prototype. The first round has no
    term.

    Args:
        lambda_: coefficient :math:`\lambda \ge 0`; 0 gives FedAvg if ``aggregate_weights``, and Local if not.
        aggregate_weights: send and average the weights too, as FedUV's comparison does. Otherwise every client keeps a
            personalized model, and metrics are means over these models on the same test data.

    Raises:
        UsageError: ``lambda_`` is below 0, or clients have no label counts.
    """

    requires = ("representation",)
    needs_label_counts = True
    prototypes: ServerValue[Tensor | None] = ServerValue(lambda server: None)
    known: ServerValue[Tensor | None] = ServerValue(lambda server: None)

    def __init__(self, lambda_: float = 1.0, aggregate_weights: bool = False) -> None:
        require(lambda_ >= 0, "FedProto.lambda_", lambda_, "give 0 or more")
        self.lambda_, self.aggregate_weights = lambda_, aggregate_weights

    def exchanges(self, key: str) -> bool:
        return self.aggregate_weights

    def on_client_start(self, client: ClientContext) -> None:
        visit, shape = client.scratch(self), client.tap_shape("representation")
        visit.sums, visit.counts, visit.epoch = None, None, 0
        if shape is not None:  # clients side by side need tensors of the final shape before the first step
            device, classes = client.live[client.trainable[0]].device, len(client.info.label_counts)  # type: ignore[arg-type]
            visit.sums = torch.zeros(classes, shape.numel(), dtype=torch.float64, device=device)
            visit.counts = torch.zeros(classes, 1, dtype=torch.float64, device=device)

    def penalty(self, client: ClientContext, step: Step) -> Tensor | None:
        z, targets = step.taps["representation"], step.targets
        if targets is None:
            return None
        sums, counts = class_sums(z, targets, len(client.info.label_counts))  # type: ignore[arg-type]
        visit = client.scratch(self)
        goes_on = visit.sums is not None and visit.epoch == client.epoch
        visit.sums, visit.counts = (visit.sums + sums, visit.counts + counts) if goes_on else (sums, counts)
        visit.epoch = client.epoch
        if self.prototypes is None or self.known is None:
            return None
        where = z.device
        return self.lambda_ * prototype_distance(z, targets, self.prototypes.to(where), self.known.to(where))

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted] | None:
        sums, counts = client.scratch(self).sums, client.scratch(self).counts
        if sums is None or not counts.any():
            return None
        return {"prototypes": Weighted.of(sums / counts.clamp_min(1), counts > 0)}

    def on_round_end(self, server: Server, payload: dict[str, Weighted]) -> None:
        if "prototypes" not in payload:
            return
        mean, present_classes = payload["prototypes"].mean(), payload["prototypes"].weight[:, 0] > 0
        if self.prototypes is None or self.known is None:
            self.prototypes, self.known = torch.zeros_like(mean), torch.zeros_like(present_classes)
        self.prototypes = torch.where(present_classes[:, None], mean, self.prototypes)
        self.known = self.known | present_classes
