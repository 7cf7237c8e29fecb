"""The stacked state of a group and its optimizer, in which any rows may take a step.

The user's optimizer gets stacked tensors in place of parameters. An elementwise optimizer then treats each client as it
would treat the client alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from fl_lightning.core.state import State
from fl_lightning.vectorized.batched_tree import RowIndex

# torch's optimizers whose step treats each element by itself
ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad)


class StackedState:
    """The ``state`` of a group's clients ``(G, ...)`` by name, and of the ``optimizer`` that was made for ``live``.

    ``moves`` counts how often the optimizer has moved each trained entry of each client; ``optimized`` names the
    entries of its parameter groups; ``mounted`` are the tensors of the clients that take a step.
    """

    def __init__(
        self, state: State, trainable: Iterable[str], live: Mapping[str, Tensor], optimizer: Optimizer
    ) -> None:
        self.state, self.optimizer, self._trainable = state, optimizer, set(trainable)
        self.size = len(next(iter(state.values())))
        names = {id(live[name]): name for name in self._trainable}
        self._originals = [list(group["params"]) for group in optimizer.param_groups]
        # a frozen parameter has no gradient
        self.optimized: list[list[str]] = []
        for parameters in self._originals:
            self.optimized.append([names[id(parameter)] for parameter in parameters if id(parameter) in names])
        trained = [name for name in state if name in self._trainable]
        self.moves = {name: np.zeros(self.size, dtype=np.int64) for name in trained}
        # the optimizer's state by entry and name: tensors of all clients, and values shared after equal moves
        self._slots: dict[tuple[str, str], Tensor] = {}
        self._scalars: dict[tuple[str, str], dict[int, Any]] = {}
        self._rows: RowIndex | None = None
        self.mounted: State = {}

    def mount(self, rows: RowIndex) -> State:
        """The tensors of these clients, which the optimizer moves from now on: views of the stack for a range."""
        if rows != self._rows:
            self.unmount()
            self._rows = rows
            self.mounted = {name: values[rows].detach() for name, values in self.state.items()}
            for name in self.moves:
                self.mounted[name].requires_grad_()
            self.fill_groups(self.mounted)
            self.optimizer.state.clear()
            # it begins the state of the others
            moved = {name for name, moves in self.moves.items() if moves[rows].any()}
            for (name, slot), values in self._slots.items():
                if name in moved:
                    self.optimizer.state[self.mounted[name]][slot] = values[rows]
            for (name, slot), by_moves in self._scalars.items():
                if name in moved:
                    value = by_moves[self._moves_of(name)]
                    scalar = value.clone() if isinstance(value, Tensor) else value
                    self.optimizer.state[self.mounted[name]][slot] = scalar
        return self.mounted

    def note_step(self) -> None:
        """Mark that the optimizer has moved the mounted entries with gradients."""
        for name, moves in self.moves.items():
            if self.mounted[name].grad is not None:
                moves[self._rows] += 1

    def fill_groups(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors into the optimizer's groups of parameters."""
        for group, names in zip(self.optimizer.param_groups, self.optimized, strict=True):
            group["params"] = [tensors[name] for name in names]

    @torch.no_grad()
    def unmount(self) -> None:
        """Write the mounted entries back to the stack."""
        if self._rows is None:
            return
        rows, copies = self._rows, not isinstance(self._rows, slice)
        for name, part in self.mounted.items():
            if copies:
                self.state[name][rows] = part.detach()
            for slot, value in self.optimizer.state.get(part, {}).items():
                if not isinstance(value, Tensor) or value.shape != part.shape:
                    self._scalars.setdefault((name, slot), {})[self._moves_of(name)] = value
                    continue
                if (name, slot) not in self._slots:
                    self._slots[name, slot] = value.new_zeros((self.size, *part.shape[1:]))
                slots = self._slots[name, slot]
                if copies or slots[rows].data_ptr() != value.data_ptr():
                    slots[rows] = value
        self._rows = None

    def release(self) -> None:
        """Restore the optimizer's own parameters."""
        self.unmount()
        self.optimizer.state.clear()
        for group, parameters in zip(self.optimizer.param_groups, self._originals, strict=True):
            group["params"] = parameters

    def _moves_of(self, name: str) -> int:
        """Return the number of moves of an entry of the mounted clients, equal for clients that share a scalar."""
        return int(self.moves[name][self._rows][0])
