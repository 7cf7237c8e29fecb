"""Exact sums of the weighted values that clients send."""

from fl_lightning.sums.reduced import Reduced
from fl_lightning.sums.update import Totals, Update
from fl_lightning.sums.weighted import Sums, Weighted

__all__ = ["Reduced", "Sums", "Totals", "Update", "Weighted"]
