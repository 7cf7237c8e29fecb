"""What clients send up: totals with weights, added exactly."""

from fl_lightning.sums.reduced import Reduced
from fl_lightning.sums.update import Totals, Update
from fl_lightning.sums.weighted import Sums, Weighted

__all__ = ["Reduced", "Sums", "Totals", "Update", "Weighted"]
