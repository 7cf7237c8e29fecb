r"""FedRoD: Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022.

Paper: https://arxiv.org/abs/2107.00778
Code of others: https://github.com/TsingZ0/PFLlib, https://github.com/makgyver/fluke

.. math::
    \ell = \mathrm{CE}(G(z) + \gamma \log n_k, y) + \mathrm{CE}(\mathrm{sg}[G(z)] + H_k(\mathrm{sg}[z]), y)

The body and the generic head G learn from the first term, the balanced softmax, and are averaged. The personal head
:math:`H_k` learns from the second term and stays with the client; sg stops the gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Step
from fl_lightning.core.state import State
from fl_lightning.functional import adjusted_logits, as_rows
from fl_lightning.functional.rows import in_full_precision
from fl_lightning.methods.fedlc import counts_on
from fl_lightning.utilities.errors import require


class FedRoD(Method):
    r"""Trains a generic head on a balanced softmax, and a personal head that stays with the client.

    z is the representation, the input of the head, and :math:`n_k` are the client's label counts. The softmax of the
    first term leaves out classes without examples at the client. The client's optimizer trains both heads. The personal
    head does not affect the generic model, unless gradients are clipped by their common norm.

    On its test data, a client uses the received model with the head :math:`G + H_k`, where :math:`H_k` is from its last
    visit (evaluation point R). A new client uses the generic model, which ``test/accuracy`` measures.

    Args:
        gamma: exponent :math:`\gamma \ge 0` of the counts. 0 gives FedAvg's generic model, and 1 is the paper's.
        head_init: personal head in a client's first visit: a ``copy`` of the received G, as in the code, or ``zero``.
            The personal logits then begin as :math:`2 G(z)` or as :math:`G(z)`.
        joint: use :math:`H_k(z)` alone as personal logits, and let the body learn from both terms, as in FL-bench.

    Raises:
        UsageError: ``gamma`` is below 0, clients have no label counts, or ``logits`` is not a linear layer that reads
            the representation.
    """

    requires = ("representation", "logits")
    needs_label_counts = True
    memory_keys: ClassVar = {"trained": "True: the client's entries of the state hold a personal head"}

    def __init__(self, gamma: float = 1.0, head_init: Literal["copy", "zero"] = "copy", joint: bool = False) -> None:
        require(gamma >= 0, "FedRoD.gamma", gamma, "give 0 or more")
        self.gamma, self.head_init, self.joint = gamma, head_init, joint

    def modules(self, module: nn.Module, taps: Mapping[str, str]) -> dict[str, nn.Module]:
        path, head = taps["logits"], module.get_submodule(taps["logits"])
        require(isinstance(head, nn.Linear), "FedRoD with the tap logits", path, "bind it to the last linear layer")
        # names of the personal head's entries by names of the generic head's
        names = [name for name, _ in head.named_parameters()]
        self.entries = {f"{path}.{name}": f"{self.name}.head.{name}" for name in names}
        return {"head": copy.deepcopy(head)}

    def exchanges(self, key: str) -> bool:
        return key not in self.entries.values()

    @torch.no_grad()
    def on_client_start(self, client: ClientContext) -> None:
        for generic, personal in self.entries.items() if not client.memory(self) else ():
            value = client.received[generic]
            client.live[personal].copy_(value if self.head_init == "copy" else torch.zeros_like(value))

    def transform_logits(self, client: ClientContext, logits: Tensor) -> Tensor:
        return adjusted_logits(logits, counts_on(client, logits), self.gamma)

    def penalty(self, client: ClientContext, step: Step) -> Tensor | None:
        if step.targets is None:
            return None
        head, z = client.module.get_submodule(f"{self.name}.head"), as_rows(step.taps["representation"])
        hint = f"the head reads {head.in_features} numbers; bind the tap to its input"
        require(z.shape[1] == head.in_features, "FedRoD: width of the representation", z.shape[1], hint)
        logits = head(z) if self.joint else head(z.detach()) + step.taps["logits"].detach()
        return in_full_precision(cross_entropy)(logits, step.targets)

    def on_client_end(self, client: ClientContext) -> None:
        client.memory(self)["trained"] = True

    def personal_state(self, client: ClientContext) -> State | None:
        if not client.memory(self):
            return None
        received, head = client.received, {}
        for generic, personal in self.entries.items():
            head[generic] = received[personal] + (0 if self.joint else received[generic])
        return head
