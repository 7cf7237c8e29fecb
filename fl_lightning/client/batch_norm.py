"""Layers whose running statistics a server can recompute, and the contribution of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# private base of BatchNorm1d, 2d, 3d and SyncBatchNorm, as of torch 2.6 and 2.15
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.core.weighted import Weighted


def batch_norms(module: nn.Module) -> list[str]:
    """Paths of the BatchNorm layers that update running statistics: those that have some and are in training mode."""
    paths = []
    for path, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.training:
            paths.append(path)
    return paths


def statistics_of(path: str) -> tuple[str, str]:
    """Names in the state of the running mean and the running variance of the layer at ``path``."""
    prefix = f"{path}." if path else ""
    return f"{prefix}running_mean", f"{prefix}running_var"


def sums_of(x: Tensor, device: torch.device) -> Weighted:
    """Count, sums and sums of squares ``(2, C)`` of the channels of a layer's input ``(B, C, ...)``, in float64."""
    wide = x.detach().to(device).double()
    dims = [dim for dim in range(x.ndim) if dim != 1]
    return Weighted.summed(torch.stack([wide.sum(dims), wide.square().sum(dims)]), x.numel() / x.shape[1])
