"""FixBN: Zhong et al., Making Batch Normalization Great in Federated Deep Learning, 2023.

Paper: https://arxiv.org/abs/2303.06530
"""

from __future__ import annotations

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.utilities.errors import require


class FixBN(Method):
    """Freezes the statistics of BatchNorm after a share of the rounds; until then it is FedAvg.

    Before, clients normalise by the mean and variance of the batch. In later rounds they normalise by the received
    running statistics, in training as in evaluation, and no longer change these. Scale and shift are always trained.
    Gradients are then computed for the evaluated network, so that one full-batch step by all clients is one step on the
    pooled data.

    Args:
        share: share of ``trainer.max_rounds`` before the statistics are frozen, 0 to 1; 1 is FedAvg, and 0 always uses
            the statistics of the initial model.

    Raises:
        UsageError: ``share`` is not from 0 to 1, the module has no BatchNorm layer that updates running statistics, or
            the statistics are not shared.
    """

    def __init__(self, share: float = 0.5) -> None:
        require(0 <= share <= 1, "FixBN.share", share, "use a number from 0 to 1")
        self.share = share

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        kind = type(client.module).__name__
        hint = "it has no BatchNorm layer that updates running statistics; take FixBN out"
        require(bool(client.batch_norms), "FixBN with the model", kind, hint)
        hint = "FixBN needs shared statistics; use average or recalibrate, or remove FixBN"
        require(client.shares_buffers, "FixBN with trainer.buffers", "keep or local", hint)

    def on_client_start(self, client: ClientContext) -> None:
        stay = [path for path in client.batch_norms if f"{path}.running_mean" in client.kept]
        hint = (
            "their statistics stay with the clients: take FixBN out, or the method that keeps them there, such as FedBN"
        )
        require(not stay, "FixBN with BatchNorm layers", stay, hint)
        fit_progress = client.visit.fit_progress
        if fit_progress.round >= self.share * fit_progress.rounds - 1e-9:
            for path in client.batch_norms:
                client.module.get_submodule(path).eval()
