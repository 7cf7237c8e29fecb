"""FedCKA without its previous model: the paper does not show which part of the term is effective."""

from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning import ClientContext, Step
from fl_lightning.methods import FedCKA


class GlobalOnly(FedCKA):
    """Keeps early activations close to the global model's only: 1 minus the similarity, a mean over the layers.

    Unlike :class:`FedCKA` it acts from a client's first visit on, and its gradient is 0 at the start of each visit,
    where the client's model is the global one. The arguments are FedCKA's.
    """

    memory_keys: ClassVar[dict[str, str]] = {}

    def on_client_start(self, client: ClientContext) -> None:
        client.load_reference("global", client.received, self.requires)

    def penalty(self, client: ClientContext, step: Step) -> Tensor:
        of_global = client.observe("global")
        terms = [1 - self.similarity(step.taps[tap], of_global[tap])[0] for tap in self.requires]
        return self.mu * torch.stack(terms).mean()

    def on_client_end(self, client: ClientContext) -> None:
        return None
