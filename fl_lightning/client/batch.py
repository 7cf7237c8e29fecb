"""The number of examples in a batch, and their labels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from fl_lightning.client.lightning.private import extract_batch_sizes
from fl_lightning.data.labels import label_entries


def batch_size(batch: Any, warns: bool = True) -> int | None:
    """The size of a batch by Lightning's rule: the length of the first tensor in it; None without one.

    It ``warns``, once in a process, where there are several lengths.
    """
    if type(batch) in (tuple, list) and len(batch) == 2 and type(batch[0]) is Tensor is type(batch[1]):
        # the usual pair of tensors, at every step
        first, second = batch
        if first.ndim and second.ndim and first.size(0) == second.size(0):
            return first.size(0)
    sizes = list(extract_batch_sizes(batch))
    size = next((length for length in sizes if length is not None), None)
    if warns and size is not None and any(length != size for length in sizes[sizes.index(size) :]):
        _warn_of_ambiguous_size()
    return size


@cache
def _warn_of_ambiguous_size() -> None:
    rank_zero_warn(
        "A batch has parts of several lengths, or without a length: logged values are weighted by the length of its "
        "first tensor; pass batch_size to self.log"
    )


def count_examples(batch: Any) -> int:
    """Return the number of examples in a batch: graphs (PyG), or :func:`batch_size`; 1 if unknown."""
    graphs = None if type(batch) in (tuple, list) else getattr(batch, "num_graphs", None)
    size = graphs if isinstance(graphs, int) else batch_size(batch, warns=False)
    return 1 if size is None else size


def targets_of(batch: Any) -> Tensor | None:
    """The labels of a batch: the second entry of a pair, or the entry or attribute with a usual name of labels.

    Boolean labels become integers, and integers ``(N, 1)`` become ``(N,)``.
    """
    labels = next(iter(label_entries(batch)), None)
    if not isinstance(labels, Tensor):
        return None
    if not labels.is_floating_point() and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    return labels.long() if labels.dtype == torch.bool and labels.ndim == 1 else labels
