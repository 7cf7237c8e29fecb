"""Server optimizers, as published."""

from fl_lightning.optim.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi

__all__ = ["FedAdagrad", "FedAdam", "FedAvgM", "FedYogi"]
