"""The number of examples in a batch."""

from __future__ import annotations

from functools import cache
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from fl_lightning.client.lightning.private import extract_batch_sizes


def batch_size(batch: Any, warns: bool = True) -> int | None:
    """The size of a batch by Lightning's rule: the length of the first tensor in it; None without one.

    It ``warns``, once in a process, where there are several lengths.
    """
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
