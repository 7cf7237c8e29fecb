"""Callbacks that end a run when a metric no longer improves, and that keep the checkpoint of its best round.

The only use of this private name of Lightning (as of 2.6):
``EarlyStopping._evaluate_stopping_criteria``, the rule without the calls of Lightning's own trainer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping

from fl_lightning.callbacks.base import Callback, logged_instead
from fl_lightning.client.run_context import RunContext
from fl_lightning.utilities.errors import require

# the end of the name of a metric that usually improves when it rises
RISES = re.compile("(accuracy|acc|f1|auroc|precision|recall|iou|dice|map|r2)$", re.IGNORECASE)


class MonitoringCallback(Callback):
    """A callback that compares a metric of the run by round.

    Args:
        monitor: tag of the metric.
        mode: whether it improves when it falls (``min``) or rises (``max``).
        strict: raise if the run does not log the metric; otherwise warn and continue.
    """

    def __init__(self, monitor: str, mode: Literal["min", "max"] | None, strict: bool = True) -> None:
        require(mode in ("min", "max", None), f"{type(self).__name__}.mode", mode, "use min or max")
        self.monitor, self.mode, self.strict = monitor, mode, strict

    def check_monitor(self, logged: Mapping[str, Collection[str]]) -> None:
        """Refuse a metric of validation or test data, before round 0, that the module's step does not log.

        Args:
            logged: the tags that a sanity check has seen for ``val`` and ``test``; empty for a phase that is not
                evaluated. A phase whose tags are unknown is missing.
        """
        tags = sorted(itertools.chain(*logged.values()))
        hint = f"the run does not log it; its steps log {', '.join(tags) or 'no metric'}"
        absent = self.strict and re.split("[/_]", self.monitor)[0] in logged and self.monitor not in tags
        require(not absent, f"{type(self).__name__}.monitor", self.monitor, hint)

    def on_fit_start(self, trainer: RunContext) -> None:
        self._seen = False
        if self.mode is None and RISES.search(self.monitor):
            hint = f"{self.monitor} usually rises, and None keeps the lowest value; set max, or min"
            trainer.warn(f"{type(self).__name__}.mode=None: {hint}")

    def check_seen(self, trainer: RunContext) -> None:
        """Refuse a metric that no round before the end of the first evaluated one has logged."""
        hint = None if self._seen else logged_instead(trainer)
        if hint is not None:
            require(not self.strict, f"{type(self).__name__}.monitor", self.monitor, hint)
            trainer.warn(f"{type(self).__name__}.monitor={self.monitor!r}: {hint}")
            self._seen = True


class EarlyStopping(MonitoringCallback):
    """Ends the run after a round in which a metric has not improved for ``patience`` evaluations.

    Arguments and rule are as in Lightning's ``EarlyStopping``. Any tag of ``metrics.csv`` can be monitored, because the
    other callbacks log first. Rounds that do not log the metric do not count, nor do evaluations that only other
    callbacks or the end of the run require.

    Args:
        monitor: tag of the metric, such as ``test/accuracy``.
        min_delta: change that counts as an improvement, at least 0.
        patience: evaluations without improvement to tolerate, at least 0.
        verbose: also report each improvement, not only the reason of the end.
        mode: whether the metric improves when it falls (``min``) or rises (``max``). None is ``min``, with a warning
            for a metric that usually rises.
        strict: raise if the run does not log the metric; otherwise warn and continue.
        check_finite: end the run when the metric is nan or infinite.
        stopping_threshold: end the run when the metric is better than this; None for none.
        divergence_threshold: end the run when the metric is worse than this; None for none.

    Raises:
        UsageError: an argument out of its range; or, with ``strict``, a metric that the run does not log.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] | None = None,
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode, strict)
        require(min_delta >= 0, "EarlyStopping.min_delta", min_delta, "use 0 or more")
        require(patience >= 0, "EarlyStopping.patience", patience, "use 0 or more")
        self.verbose = verbose
        how: dict[str, Any] = {"min_delta": min_delta, "patience": patience, "mode": mode or "min"}
        how |= {"stopping_threshold": stopping_threshold, "divergence_threshold": divergence_threshold}
        self._rule = LightningEarlyStopping(monitor, check_finite=check_finite, **how)
        self._initial = self._rule.state_dict()

    def on_fit_start(self, trainer: RunContext) -> None:
        super().on_fit_start(trainer)
        self._rule.load_state_dict(self._initial)

    def on_round_end(self, trainer: RunContext) -> None:
        value = trainer.metrics.get(self.monitor)
        if re.split("[/_]", self.monitor)[0] in ("val", "test") and not trainer.evaluation_is_due:
            value = None  # what other callbacks ask for must not end the run
        self._seen = self._seen or value is not None
        self.check_seen(trainer)
        if value is None:
            return
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


class BestCheckpoint(MonitoringCallback):
    """Keeps the checkpoint of the round in which a metric is best so far, as ``checkpoints/best.ckpt``.

    Arguments are as in Lightning's ``ModelCheckpoint``. Any tag of ``metrics.csv`` can be monitored, because the
    other callbacks log first. Rounds that do not log the metric, or log nan, do not count. A round that improves the
    metric has a checkpoint, whatever ``trainer.checkpoint_every_n_rounds`` says.

    Args:
        monitor: tag of the metric, such as ``test/accuracy``.
        mode: whether the metric improves when it falls (``min``) or rises (``max``). None is ``min``, with a warning
            for a metric that usually rises.

    Raises:
        UsageError: an unknown mode, a metric that the run does not log, or two of these callbacks.
    """

    file = "checkpoints/best.ckpt"

    def __init__(self, monitor: str, mode: Literal["min", "max"] | None = None) -> None:
        super().__init__(monitor, mode)

    def on_fit_start(self, trainer: RunContext) -> None:
        super().on_fit_start(trainer)
        self._best: float | None = None
        self._round = -1

    def on_round_end(self, trainer: RunContext) -> None:
        self._compare(trainer)
        self.check_seen(trainer)

    def on_last_round_end(self, trainer: RunContext) -> None:
        self._compare(trainer)  # the final model may have been evaluated since on_round_end

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "round": self._round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._best, self._round = state["best"], state["round"]

    def _compare(self, trainer: RunContext) -> None:
        """Request a checkpoint of this round if the metric has improved; all workers call this."""
        value = trainer.gather(trainer.metrics.get(self.monitor))[0]
        self._seen = self._seen or value is not None
        if value is None or math.isnan(value) or self._round == trainer.server.round:
            return
        if self._best is None or (value > self._best if self.mode == "max" else value < self._best):
            self._best, self._round = float(value), trainer.server.round
            trainer.save_best = True
