"""Server optimizers as published, which take the negative mean change of the clients as gradient."""

from fl_lightning.optim.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi

__all__ = ["FedAdagrad", "FedAdam", "FedAvgM", "FedYogi"]
