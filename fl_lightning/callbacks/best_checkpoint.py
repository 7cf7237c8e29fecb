"""Keeps the checkpoint of the round in which a metric is best."""

from __future__ import annotations

import math
from typing import Any, Literal

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.base import Callback, logged_instead
from fl_lightning.errors import require


class BestCheckpoint(Callback):
    """Keeps the checkpoint of the round in which a metric is best so far, as ``checkpoints/best.ckpt``.

    Arguments are those of Lightning's ``ModelCheckpoint``. Any tag of ``metrics.csv`` can be monitored, because the
    other callbacks log first. Rounds that do not log the metric, or log nan, do not count. A round that improves the
    metric has a checkpoint, whatever ``trainer.checkpoint_every_n_rounds`` says.

    Args:
        monitor: tag of the metric, such as ``test/accuracy``.
        mode: whether the metric improves when it falls (``min``) or rises (``max``).

    Raises:
        UsageError: a mode that there is not; or the first round that is evaluated does not log the metric.
    """

    def __init__(self, monitor: str, mode: Literal["min", "max"] = "min") -> None:
        require(mode in ("min", "max"), "BestCheckpoint.mode", mode, "give min or max")
        self.monitor, self.mode = monitor, mode

    def on_fit_start(self, trainer: RunAccess) -> None:
        self._best: float | None = None
        self._round = -1
        self._seen = False

    def on_round_end(self, trainer: RunAccess) -> None:
        self._compare(trainer)
        hint = logged_instead(trainer)
        require(self._seen or hint is None, "BestCheckpoint.monitor", self.monitor, hint or "")

    def on_last_round_end(self, trainer: RunAccess) -> None:
        self._compare(trainer)  # the final model may have been evaluated since

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "mode": self.mode, "best": self._best, "round": self._round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # the best of another metric means nothing
        if (state.get("monitor"), state.get("mode")) == (self.monitor, self.mode):
            self._best, self._round = state["best"], state["round"]

    def _compare(self, trainer: RunAccess) -> None:
        """Ask for a checkpoint of this round where the metric has improved; all workers do."""
        value = trainer.gather(trainer.metrics.get(self.monitor))[0]
        self._seen = self._seen or value is not None
        if value is None or math.isnan(value) or self._round == trainer.server.round:
            return
        if self._best is None or (value < self._best if self.mode == "min" else value > self._best):
            self._best, self._round = float(value), trainer.server.round
            trainer.keep_as_best = True
