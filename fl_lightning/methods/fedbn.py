"""FedBN: Li et al., Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021, Algorithm 1.

Paper: https://arxiv.org/abs/2102.07623
Code: https://github.com/med-air/FedBN
"""

from __future__ import annotations

# private base of BatchNorm and InstanceNorm, as of torch 2.6 and 2.15
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.utilities.errors import require


class FedBN(Method):
    """Keeps the normalisation layers (scale, shift and running statistics) with each client and averages the rest.

    Each client that has trained has a personalized model. Metrics are means over these models on the same test data.

    Raises:
        UsageError: the module has no BatchNorm or InstanceNorm layer with parameters or statistics.
    """

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        self.local = set()
        for path, part in client.module.named_modules():
            if isinstance(part, _NormBase):
                self.local |= {name for name in client.live if name.startswith(f"{path}.")}
        kind = type(client.module).__name__
        require(bool(self.local), "FedBN with the model", kind, "it has no BatchNorm layer; take FedBN out")

    def exchanges(self, key: str) -> bool:
        return key not in self.local
