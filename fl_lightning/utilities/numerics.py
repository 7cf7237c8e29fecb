"""Settings of torch that decide the bits of a result on a GPU: deterministic algorithms, and TF32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import backends

# cuBLAS is deterministic with this workspace, and torch reads the variable once, at the first matrix product
WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@contextmanager
def deterministic_algorithms(mode: bool | Literal["warn"] | None) -> Iterator[None]:
    """In this block torch uses deterministic algorithms, as by Lightning's ``deterministic``; None changes nothing."""
    if mode is None:
        yield
        return
    debug_mode, benchmark = torch.get_deterministic_debug_mode(), backends.cudnn.benchmark
    missing = {name: value for name, value in WORKSPACE.items() if mode and name not in os.environ}
    torch.use_deterministic_algorithms(bool(mode), warn_only=mode == "warn")
    backends.cudnn.benchmark = benchmark and not mode  # the fastest algorithm may be another one in each process
    os.environ.update(missing)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(debug_mode > 0, warn_only=debug_mode == 1)
        backends.cudnn.benchmark = benchmark
        for name in missing:
            os.environ.pop(name, None)


def tf32_settings() -> dict[str, bool]:
    """Return whether convolutions and matrix products of float32 numbers may use TF32 on a GPU."""
    cudnn: Any = backends.cudnn
    if hasattr(cudnn, "conv"):  # since torch 2.9: the older names cannot be read where these were set
        return {
            "convolutions": cudnn.conv.fp32_precision == "tf32",
            "matmul": backends.cuda.matmul.fp32_precision == "tf32",
        }
    return {"convolutions": cudnn.allow_tf32, "matmul": backends.cuda.matmul.allow_tf32}
