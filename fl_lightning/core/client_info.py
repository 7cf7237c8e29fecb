"""Description of a client."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ClientInfo:
    """Description of a client.

    Args:
        id: its number, from 0.
        num_examples: n_k, the number of its training examples.
        label_counts: number of its training examples of each class ``(C,)``; None without labels.
        domain: the domain of all its data; None if that is unknown, or if there are several.
    """

    id: int
    num_examples: int
    label_counts: Tensor | None
    domain: str | None = None
