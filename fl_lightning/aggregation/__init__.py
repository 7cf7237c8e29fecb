"""Exact sums of the weighted values that clients send."""

from fl_lightning.aggregation.reduced import Reduced
from fl_lightning.aggregation.update import Totals, Update, UpdateRows
from fl_lightning.aggregation.weighted import LazyWeighted, Sums, Weighted

__all__ = ["LazyWeighted", "Reduced", "Sums", "Totals", "Update", "UpdateRows", "Weighted"]
