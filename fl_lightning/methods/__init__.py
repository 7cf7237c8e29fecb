"""The methods of the papers, one file each."""

from fl_lightning.methods.fedcka import FedCKA
from fl_lightning.methods.feddecorr import FedDecorr
from fl_lightning.methods.fedlc import FedLC
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.feduv import FedUV

__all__ = ["FedCKA", "FedDecorr", "FedLC", "FedProx", "FedUV"]
