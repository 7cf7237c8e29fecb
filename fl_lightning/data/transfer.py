"""Copies between main memory and a GPU through pinned memory, most of which the host need not wait for."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection, move_data_to_device
from torch import Tensor


def transferred(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of main memory on the device; a GPU takes it from pinned memory while the host goes on."""
    return tensor if device.type == "cpu" else pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor in pinned memory if it is on its way from main memory to a GPU, else the tensor itself.

    PyTorch keeps pinned blocks for later copies, and uses none again before its transfer has ended.
    """
    waits = pins(device) and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if waits else tensor


def fetched(value: Any, device: torch.device) -> Any:
    """Nested containers with their tensors copied from the device to main memory, with one wait for all of them."""
    if not pins(device):
        return move_data_to_device(value, torch.device("cpu"))
    # such a copy from a GPU ends in pinned memory, which is scarce
    copied = apply_to_collection(value, Tensor, Tensor.to, "cpu", non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    return apply_to_collection(copied, Tensor, torch.clone)


def pins(device: torch.device) -> bool:
    """Whether copies to and from a device go through pinned memory."""
    return device.type == "cuda" and torch.cuda.is_initialized()
