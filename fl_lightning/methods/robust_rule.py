"""What rules for clients that may lie have in common."""

from __future__ import annotations

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from fl_lightning.core.server import Server
from fl_lightning.methods.aggregation_rule import AggregationRule
from fl_lightning.utilities.errors import require


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
