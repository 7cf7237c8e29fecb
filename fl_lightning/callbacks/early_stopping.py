"""Ends a run when a metric no longer improves.

Lightning's private name that this needs is used here alone, as of lightning 2.6:
``EarlyStopping._evaluate_stopping_criteria``, the rule without the calls of Lightning's own trainer.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.base import Callback, logged_instead
from fl_lightning.errors import UsageError, require


class EarlyStopping(Callback):
    """Ends the run after a round in which a metric has not improved for ``patience`` evaluations.

    Arguments and rule are those of Lightning's ``EarlyStopping``. Any tag of ``metrics.csv`` can be monitored, because
    the other callbacks log first. Rounds that do not log the metric do not count.

    Args:
        monitor: tag of the metric, such as ``test/accuracy``.
        min_delta: change that counts as an improvement, at least 0.
        patience: evaluations without improvement to tolerate, at least 0.
        verbose: report each improvement too, not only why the run ends.
        mode: whether the metric improves when it falls (``min``) or rises (``max``).
        strict: raise where the first round that is evaluated does not log the metric; else warn, and go on.
        check_finite: end the run when the metric is nan or infinite.
        stopping_threshold: end the run when the metric is better than this; None for none.
        divergence_threshold: end the run when the metric is worse than this; None for none.

    Raises:
        UsageError: an argument out of its range; or ``strict``, and the metric is not logged by the end of a round that
            was evaluated.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        require(min_delta >= 0, "EarlyStopping.min_delta", min_delta, "give 0 or more")
        require(patience >= 0, "EarlyStopping.patience", patience, "give 0 or more")
        self.monitor, self.mode, self.verbose, self.strict = monitor, mode, verbose, strict
        how: dict[str, Any] = {"min_delta": min_delta, "patience": patience, "mode": mode}
        how |= {"stopping_threshold": stopping_threshold, "divergence_threshold": divergence_threshold}
        try:
            self._rule = LightningEarlyStopping(monitor, check_finite=check_finite, **how)
        except MisconfigurationException as error:
            raise UsageError(f"EarlyStopping.mode={mode!r}: give min or max") from error
        self._initial = self._rule.state_dict()

    def on_fit_start(self, trainer: RunAccess) -> None:
        self._rule.load_state_dict(self._initial)
        self._seen = False

    def on_round_end(self, trainer: RunAccess) -> None:
        value = trainer.metrics.get(self.monitor)
        if value is None:
            hint = None if self._seen else logged_instead(trainer)
            if hint is not None:
                require(not self.strict, "EarlyStopping.monitor", self.monitor, hint)
                trainer.warn(f"EarlyStopping.monitor={self.monitor!r}: {hint}")
                self._seen = True
            return
        self._seen = True
        stop, reason = self._rule._evaluate_stopping_criteria(torch.tensor(value))
        trainer.should_stop = trainer.should_stop or stop
        if reason and (stop or self.verbose):
            rank_zero_info(f"EarlyStopping, round {trainer.server.round}: {reason}")

    def state_dict(self) -> dict[str, Any]:
        return dict(self._rule.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # patience is an argument: the config's value counts, not the checkpoint's
        if state:
            self._rule.load_state_dict({**state, "patience": self._rule.patience})
