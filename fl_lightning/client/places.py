"""Where the tensors of a module's state are, so that others can stand in for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class TensorPlaces:
    """Where the tensors of a module's state are, so that others can stand in for them.

    Args:
        module: the module.
        live: the tensors of its state by name.
    """

    def __init__(self, module: nn.Module, live: Mapping[str, Tensor]) -> None:
        names = {id(value): name for name, value in live.items()}
        self._places: list[tuple[dict[str, Any], str, str, Tensor]] = [
            (entries, key, names[id(value)], value)
            for part in module.modules()
            for entries in held_by(part)
            for key, value in entries.items()
            if value is not None and id(value) in names
        ]

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """In this block the module has these tensors; gives those that took their places, at its end."""
        rebound: dict[str, Tensor] = {}
        try:
            for entries, key, name, _ in self._places:
                entries[key] = tensors[name]
            yield rebound
            for entries, key, name, _ in self._places:
                if entries[key] is not tensors[name]:
                    rebound[name] = entries[key]
        finally:
            for entries, key, _, value in self._places:
                entries[key] = value


def held_by(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers of a module itself, by name."""
    return part._parameters, part._buffers
