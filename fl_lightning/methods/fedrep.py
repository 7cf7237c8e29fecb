"""FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.

Paper: https://arxiv.org/abs/2102.07078
Code: https://github.com/lgcollins/FedRep

A client trains its head on the received body, then the body below this head. Bodies are averaged.
"""

from __future__ import annotations

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.methods.fedper import FedPer
from fl_lightning.utilities.errors import require


class FedRep(FedPer):
    r"""Keeps the head with each client, trains it for :math:`E - E_b` local epochs, then the body for :math:`E_b`.

    E is ``trainer.local_epochs``. The gradients of the part that does not train are dropped before each step, so that
    neither momentum nor weight decay changes it. The head, buffers, evaluation and new clients are as in
    :class:`FedPer` (evaluation point R). The paper's training of the head alone before an evaluation is not included.
    A straggler does the first of these epochs, so that it may train its head alone.

    Args:
        body_epochs: :math:`E_b`, the last local epochs of a visit, at least 1 and at most E. With
            :math:`E_b = E`, the head is never trained, as in FedBABU, and a run warns.

    Raises:
        UsageError: ``body_epochs`` is out of its range, visits are counted in ``local_steps``, or the tap ``logits``
            has no trained parameter or all of them.
    """

    name = "fedrep"

    def __init__(self, body_epochs: int = 1) -> None:
        require(body_epochs >= 1, "FedRep.body_epochs", body_epochs, "use 1 or more")
        super().__init__()
        self.body_epochs = body_epochs

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        visit = client.visit.fit_progress
        require(visit.local_steps is None, "trainer.local_steps", visit.local_steps, "FedRep counts epochs; set null")
        hint = f"trainer.local_epochs is {visit.local_epochs}; use at most that"
        require(self.body_epochs <= visit.local_epochs, "FedRep.body_epochs", self.body_epochs, hint)
        self.head_epochs = visit.local_epochs - self.body_epochs
        if self.head_epochs == 0:
            rank_zero_warn(
                f"FedRep.body_epochs={self.body_epochs}: the head is never trained; set trainer.local_epochs above it"
            )

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        for name in client.trainable:
            if (name in self.last) == (client.epoch >= self.head_epochs):
                client.live[name].grad = None
