"""What clients send up: totals with weights, added exactly."""

from fl_lightning.sums.update import Totals, Update
from fl_lightning.sums.weighted import Sums, Weighted

__all__ = ["Sums", "Totals", "Update", "Weighted"]
