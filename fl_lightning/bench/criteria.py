"""How the runs of a table are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fl_lightning.bench.cell import Labels


@dataclass(frozen=True)
class Decide:
    """When a pair, which is a method and the baseline in one setting, has enough seeds.

    Args:
        margin: largest difference that does not matter, above 0, in the unit of the tables: points where they show
            percent.
        prior_scale: standard deviation of the prior of the mean difference, in standard deviations of a difference,
            above 0; the interval is shortest where the true one is about as large, and valid for any value.
        alpha: error of each pair, in (0, 1), over all looks together.
        max_seeds: most seeds of a pair.
    """

    margin: float
    prior_scale: float = 1.0
    alpha: float = 0.05
    max_seeds: int = 20


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """The metric, the baseline and the intervals of a comparison.

    Args:
        seeds: seeds of each combination of labels.
        metric: tag of the metric of the tables.
        minimize: whether smaller values of it are better.
        percent: whether tables show 100 times its value.
        baseline: labels of the cells that others are compared with.
        confidence: level of the confidence intervals of paired differences, in (0, 1).
        decide: when a pair has enough seeds, for ``--until-decided``; None for a fixed number.
    """

    seeds: tuple[int, ...] = ()
    metric: str = "test/accuracy"
    minimize: bool = False
    percent: bool = True
    baseline: Labels = field(default_factory=dict)
    confidence: float = 0.95
    decide: Decide | None = None

    @property
    def interval(self) -> Literal["t", "sequence"]:
        """The kind of the intervals: Student's or, with ``decide``, a confidence sequence."""
        return "sequence" if self.decide else "t"

    @property
    def unit(self) -> float:
        """Factor of the metric in tables."""
        return 100.0 if self.percent else 1.0

    @property
    def metric_name(self) -> str:
        """The metric with its unit."""
        return f"{self.metric} in %" if self.percent else self.metric

    @property
    def baseline_name(self) -> str:
        """The name of the baseline."""
        labels = self.baseline.items()
        words = [label if axis == "method" else f"{axis}={label}" for axis, label in labels]
        return ", ".join(words)

    def is_baseline(self, labels: Mapping[str, str]) -> bool:
        """Return whether a run with these labels belongs to the baseline."""
        return bool(self.baseline) and self.baseline.items() <= labels.items()
