r"""LabelFlip: Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning, USENIX Security 2020.

Paper: https://arxiv.org/abs/1911.11815
Code: https://github.com/epfml/byzantine-robust-noniid-optimizer

.. math:: y \leftarrow C - 1 - y
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.client_context import ClientContext
from fl_lightning.methods.attack import Attack, Clients


class LabelFlip(Attack):
    """Attackers train on wrong labels.

    The module's loss sees the logits in the order in which the label's place is that of the wrong label, which is the
    same for a cross-entropy. Label counts, penalties of other methods and test data keep the true labels.

    Args:
        clients: ids of the attackers; null draws a ``share`` of all clients.
        share: in [0, 1]; 0 changes nothing.
        start: the round from which they attack.
        to: ``reverse``, C - 1 - y among C classes, or ``next``, y + 1, and 0 for the last class.

    Raises:
        UsageError: an argument is out of range, clients are real sites, or a method before it mixes updates.
    """

    name = "labelflip"
    requires = ("logits",)

    def __init__(
        self, clients: Clients = None, share: float = 0.2, start: int = 0, to: Literal["reverse", "next"] = "reverse"
    ) -> None:
        super().__init__(clients, share, start)
        self.to = to

    def on_client_start(self, client: ClientContext) -> None:
        client.scratch(self).attacks = torch.tensor(self.attacks(client.info.id))

    def transform_logits(self, client: ClientContext, logits: Tensor) -> Tensor:
        flipped = logits.flip(-1) if self.to == "reverse" else logits.roll(-1, -1)
        return torch.where(client.scratch(self).attacks.to(logits.device), flipped, logits)
