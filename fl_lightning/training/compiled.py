"""``torch.compile`` of a module's forward, for batches of the usual size.

Private names of torch that this file alone uses, as of torch 2.6 and 2.15: the error of a failed compilation, the reset
of compiled code and the list of modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._inductor
from lightning.pytorch import LightningModule
from torch import Tensor

from fl_lightning.utilities.errors import truncate

MODES = tuple(torch._inductor.list_mode_options())


class CompiledForward:
    """Replaces the ``forward`` of a module, and runs it compiled in training.

    A client's last batch is mostly smaller than the others. It runs uncompiled, since torch would compile each
    size by itself, and with padding to one size BatchNorm would see the padding.
    """

    def __init__(self, module: LightningModule, mode: bool | str, warn: Callable[[str], None]) -> None:
        self.module, self.plain, self.warn = module, module.forward, warn
        self._compiled: Any = torch.compile(self.plain, dynamic=False, mode=None if mode is True else str(mode))
        self._usual = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module's own ``forward``."""
        rows = len(args[0]) if args and isinstance(args[0], Tensor) and args[0].ndim else 0
        self._usual = max(self._usual, rows)
        if self._compiled is None or not self.module.training or rows < self._usual:
            return self.plain(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:  # raised before anything has run
            self._compiled = None
            why = truncate((str(error).strip().splitlines() or [type(error).__name__])[0], 300)
            self.warn(f"trainer.compile: the model cannot be compiled and runs uncompiled: {why}")
            return self.plain(*args, **kwargs)


def replace_forward(module: LightningModule, mode: bool | str, warn: Callable[[str], None]) -> None:
    """Let a module run through :class:`CompiledForward`, until :meth:`Client.release` removes it."""
    # torch would reuse code compiled for another module of this class, without the hooks that record this one's taps
    torch._dynamo.reset()
    module.__dict__["forward"] = CompiledForward(module, mode, warn)
