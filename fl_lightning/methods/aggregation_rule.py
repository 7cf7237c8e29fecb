"""What methods with an aggregation of their own have in common, and those for clients that may lie."""

from __future__ import annotations

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, overrides
from fl_lightning.core.server import Server
from fl_lightning.methods.fedbuff import FedBuff
from fl_lightning.utilities.errors import require

# names of methods whose sums over the clients move the model, and pass by the rule; subclasses inherit them
MOVED_BY_SUMS = ("scaffold", "feddyn", "fednova", "fedexp", "loraproduct", "fedexlora")


class AggregationRule(Method):
    """A rule that aggregates the updates of a cohort.

    Attributes:
        reads_weights: whether the clients' weights count; otherwise methods that give weights are refused.
    """

    needs_exchange = True
    reads_weights = False

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        kind = type(self).__name__
        for method in client.methods.methods:
            name, key = type(method).__name__, f"{kind} with method"
            hint = "its sums would pass by the rule; take one of them out"
            require(method.name not in MOVED_BY_SUMS, key, name, hint)
            hint = "the rule ignores the clients' weights; take one of them out"
            weighs = overrides(method, "client_weight") and not isinstance(method, FedBuff)  # whose weights are equal
            require(self.reads_weights or not weighs, key, name, hint)
            reads_sums = overrides(method, "transform_update") or overrides(method, "on_round_end")
            if reads_sums and overrides(method, "on_client_end"):
                rank_zero_warn(f"method={[name]}: the sums of what its clients send pass by {kind}")


class RobustRule(AggregationRule):
    """A rule for the updates of a cohort of which at most ``f`` lie.

    Attributes:
        f: number of clients that may lie.
    """

    f = 0

    def least_cohort(self, f: int) -> int:
        """The size that a cohort with ``f`` liars must have."""
        return 2 * f + 1

    def on_fit_start(self, server: Server) -> None:
        least, hint = self.least_cohort(self.f), "lower it, or raise trainer.cohort_size or trainer.participation"
        key = f"{type(self).__name__} in cohorts of {server.cohort_size}: f"
        fits = server.cohort_size >= least or server.num_clients == 1  # one client, or one site
        require(fits, key, self.f, f"it needs {least} clients; {hint}")

    def tolerated(self, m: int) -> int:
        """The number of liars in a round of m clients: ``f``, or with a warning the most that the rule allows."""
        f = self.f
        while f and m < self.least_cohort(f):
            f -= 1
        if f < self.f:
            rank_zero_warn(f"{type(self).__name__}.f={self.f}: a round of {m} clients allows {f}")
        return f
