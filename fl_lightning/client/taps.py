"""Taps: names bound to submodules, whose outputs a forward hook records.

A penalty on a representation then needs neither a second forward nor a base class for models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fl_lightning.errors import UsageError


class _Reached(BaseException):
    """Leaves the forward once the last tap is recorded. A BaseException, so that no model's ``except`` catches it."""


class Taps:
    """Records the outputs of the submodules at ``paths``.

    Args:
        module: the model.
        paths: tap name to the submodule's path in ``module``.
        transform: given to the tap ``logits`` only; what it returns replaces that output for the rest of the forward,
            while the raw output is what is recorded.

    Attributes:
        values: tap name to the last recorded output, ``(B, ...)``.
    """

    def __init__(
        self, module: nn.Module, paths: Mapping[str, str], transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.paths = dict(paths)
        self.values: dict[str, Tensor] = {}
        self.recording = True
        self.stop_after: frozenset[str] = frozenset()
        self._transform = transform
        # the tap whose output is replaced comes last: others of the same submodule record the raw one
        names = sorted(self.paths, key="logits".__eq__)
        self._handles = [module.get_submodule(self.paths[n]).register_forward_hook(self._hook(n)) for n in names]

    def _hook(self, name: str) -> Callable[[nn.Module, tuple, Tensor], Tensor | None]:
        @torch.compiler.disable  # what a compiler records is not what a later forward computes
        def record(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
            if not self.recording:
                return None
            self.values[name] = output
            if self.stop_after and self.stop_after <= self.values.keys():
                raise _Reached
            return self._transform(output) if self._transform and name == "logits" else None

        return record

    def run_until(self, names: Collection[str], forward: Callable[[], object]) -> dict[str, Tensor]:
        """Run ``forward`` and leave it as soon as all of ``names`` are recorded."""
        self.values, self.stop_after = {}, frozenset(names)
        try:
            forward()
        except _Reached:
            pass
        finally:
            self.stop_after = frozenset()
        return self.values

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In this block nothing is recorded and no output replaced."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def resolve_taps(module: nn.Module, extra: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """The paths of the taps in ``wanted`` (tap name to the name of who wants it).

    A module names its own in an attribute ``taps``; ``extra`` (``trainer.taps``) adds to them or replaces them.

    Raises:
        UsageError: a wanted tap has no path, or no submodule has its path.
    """
    known = {**getattr(module, "taps", {}), **extra}
    submodules = [name for name, _ in module.named_modules() if name]
    for name, asker in wanted.items():
        if known.get(name) not in submodules:
            raise UsageError(
                f"trainer.taps: {asker} needs the tap {name!r}, which is "
                f"{f'bound to {known[name]!r}, no submodule of' if name in known else 'not bound in'} "
                f"{type(module).__name__}; add trainer.taps: {{{name}: SUBMODULE}}, SUBMODULE being one of "
                f"{', '.join(submodules)}"
            )
    return {name: known[name] for name in wanted}
