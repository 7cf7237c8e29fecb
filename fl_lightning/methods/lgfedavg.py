"""LG-FedAvg: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020.

Paper: https://arxiv.org/abs/2001.01523
Code: https://github.com/pliang279/LG-FedAvg

The first layers stay with each client and learn its representation. The last layers are averaged.
"""

from __future__ import annotations

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.state import is_frozen
from fl_lightning.methods.fedper import FedPer


class LGFedAvg(FedPer):
    """Averages the last layers and keeps the others with each client, the reverse of :class:`FedPer`.

    A client that has trained is evaluated with the averaged last layers and its own first layers of its last visit
    (evaluation point R); metrics are means over these models on the same test data. A new client starts with the
    initial first layers. To start from a model of FedAvg, as the authors do, pass it as ``--weights``.

    Args:
        layers: number m of last layers that are averaged, at least 0, counted as in :class:`FedPer`. 0 gives Local,
            all layers give FedAvg.

    Raises:
        UsageError: ``layers`` is below 0 or above the number of layers, or the tap ``logits`` has no trained parameter
            or all of them.
    """

    name = "lgfedavg"

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        self.frozen = {name for name, value in client.live.items() if is_frozen(value)}

    def exchanges(self, key: str) -> bool:
        return key in self.last or key in self.frozen
