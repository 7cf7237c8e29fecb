r"""NNM: Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS 2023.

Paper: https://arxiv.org/abs/2302.01772
Code: https://github.com/LPD-EPFL/byzfl

.. math:: x_k \leftarrow \frac{1}{m - f} \sum_{j \in N_k} x_j
"""

from __future__ import annotations

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.server import Server
from fl_lightning.core.updates import Updates
from fl_lightning.functional import chosen_by_score
from fl_lightning.methods.aggregation_rule import RobustRule
from fl_lightning.utilities.errors import require


class NNM(RobustRule):
    """Replaces each client's change by the mean of the m - f nearest ones, before a robust rule aggregates them.

    :math:`N_k` includes k itself; of equal distances the smaller ids count. Floating-point buffers are mixed likewise.
    Under label skew the changes of honest clients lie far apart; mixing brings them together. List it after attacks.

    Args:
        f: number of clients that may lie, 0 or more; with 0 all changes become the mean, and any rule gives FedAvg with
            ``trainer.weighting=uniform``.

    Raises:
        UsageError: ``f`` is below 0, the cohort has at most 2 f clients, another method's sums would pass by it, or
            another method gives clients different models.
    """

    name = "nnm"
    reads_weights = True

    def __init__(self, f: int = 1) -> None:
        require(f >= 0, "NNM.f", f, "give 0 or more")
        self.f = f

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        hooks = client.methods.overriding
        names = [type(method).__name__ for method in (*hooks("sent_state"), *hooks("start_state"))]
        require(not names, "NNM with method", names, "its clients' changes are of different models; take NNM out")

    def transform_updates(self, server: Server, updates: Updates) -> Updates:
        number = len(updates) - self.tolerated(len(updates))
        near = chosen_by_score(updates.squared_distances(), number)
        return updates.replaced(updates.combined(near, mean=True))
