"""The one rule by which methods read a representation of more than two dimensions: it is flattened, never pooled.

As ``torch.flatten`` does: https://docs.pytorch.org/docs/stable/generated/torch.flatten.html
"""

from __future__ import annotations

from torch import Tensor


def as_rows(z: Tensor) -> Tensor:
    """A row for each example: all dimensions but the first are flattened.

    So are the tokens ``(B, T, d)`` of a sequence and the maps ``(B, C, H, W)`` of a convolution. Nothing is pooled, as
    no rule could tell which dimension holds the features. To pool, bind the tap to a submodule that does, or to an
    output that is pooled already.

    Args:
        z: ``(B, ...)``.

    Returns:
        ``(B, d)``; ``(B, 1)`` for a vector ``(B,)``.

    Example:
        >>> import torch
        >>> as_rows(torch.zeros(8, 16, 4, 4)).shape, as_rows(torch.zeros(8)).shape
        (torch.Size([8, 256]), torch.Size([8, 1]))
    """
    return z.flatten(1) if z.ndim > 1 else z[:, None]
