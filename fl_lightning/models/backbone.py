"""Classifiers of other libraries as encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fl_lightning.models.encoders import Encoder
from fl_lightning.utilities.errors import LONGEST_VALUE, UsageError, choices, require, truncate, with_location


class Backbone(Encoder):
    """A classifier without its last linear layer: ``network: {class_path: torchvision.models.efficientnet_b0}``.

    It has the input of the network, and returns the input ``(B, d)`` of the last layer.

    Args:
        network: a module, by ``class_path`` and ``init_args``; or a function or class that builds it, by its import
            path.
        options: arguments of that function or class; None if ``network`` is a module.
        early: submodules of the network whose outputs are the taps ``early.0``, ``early.1``, ..., from the input on.
        named: further submodules, by the names of their taps.
        head: path of the removed layer; None for the last linear layer.

    Raises:
        UsageError: the network cannot be built, a submodule does not exist, or the network has no linear layer.
    """

    def __init__(
        self,
        network: Callable[..., nn.Module] | nn.Module,
        options: dict[str, Any] | None = None,
        early: list[str] | None = None,
        named: dict[str, str] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(network, nn.Module):
            require(not options, "Backbone.options", options, "set them as network.init_args")
            self.network = network
        else:
            try:
                self.network = network(**(options or {}))
            except Exception as error:
                remedy = f"{with_location(error)}; give options with which network can be built"
                raise UsageError(f"Backbone.options={truncate(repr(options), LONGEST_VALUE)}: {remedy}") from error
        paths = dict(self.network.named_modules())
        linear = [path for path, part in paths.items() if path and isinstance(part, nn.Linear)]
        where = head if head is not None else (linear or [""])[-1]
        require(
            where in linear, "Backbone.head", where, f"give one of {choices(linear or ['(no linear layer)'], where)}"
        )
        self.out_features: int = paths[where].in_features
        self.network.set_submodule(where, nn.Identity())
        tap_paths = [("early", path) for path in early or []]
        tap_paths += [("named", path) for path in (named or {}).values()]
        for key, path in tap_paths:
            require(path in paths, f"Backbone.{key}", path, f"give one of {choices(filter(None, paths), path)}")
        for part in paths.values():
            # an in-place activation would overwrite the output that the previous tap recorded
            if getattr(part, "inplace", False):
                part.inplace = False
        self.early = tuple(f"network.{path}" for path in early or [])
        self.named = {name: f"network.{path}" for name, path in (named or {}).items()}

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)
