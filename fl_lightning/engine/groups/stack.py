"""The stacked state of a group, and its optimizer, of which any rows may take a step.

The user's optimizer is given stacked tensors in the place of parameters. Those that act element by element then do for
each client what they would do for it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from fl_lightning.client.columns import Rows, numbers_of
from fl_lightning.errors import ClientError
from fl_lightning.state import State

# torch's optimizers whose step treats each element by itself
ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad)


def counts_steps(optimizer: Optimizer) -> bool:
    """Whether a step depends on how many came before it, so that clients in one must have taken as many."""
    return type(optimizer) is not SGD or any(group["dampening"] for group in optimizer.param_groups)


class Stack:
    """The states of a group's clients, and the optimizer's state.

    Args:
        state: by name, the tensors of all clients ``(G, ...)``.
        trainable: names of the parameters that are trained.
        live: the tensors that the optimizer was made for, by name.
        optimizer: the optimizer of a visit in its initial state.
    """

    def __init__(
        self,
        state: State,
        trainable: Iterable[str],
        live: Mapping[str, Tensor],
        optimizer: Optimizer,
    ) -> None:
        self.state, self.optimizer = state, optimizer
        self.size = len(next(iter(state.values())))
        self._trainable = set(trainable)
        names = {id(live[name]): name for name in live}
        self._originals = [list(group["params"]) for group in optimizer.param_groups]
        # a parameter that is not trained is left out: it has no gradient
        self._names = [
            [names[id(p)] for p in group if names.get(id(p)) in self._trainable] for group in self._originals
        ]
        self._slots: dict[str, dict[str, Tensor]] = {}
        self._scalars: dict[tuple[str, str], list[Any]] = {}
        # how often the optimizer has moved each entry of each client
        self.moves = {name: np.zeros(self.size, dtype=np.int64) for name in state if name in self._trainable}
        self._rows: Rows | None = None
        self.mounted: State = {}

    def mount(self, rows: Rows) -> State:
        """The tensors of these clients, which the optimizer moves from now on: views of the stack for a range."""
        if rows != self._rows:
            self.unmount()
            self._rows = rows
            parts = {name: values[rows].detach() for name, values in self.state.items()}
            self.mounted = {n: part.requires_grad_() if n in self._trainable else part for n, part in parts.items()}
            self.fill_groups(self.mounted)
            self.optimizer.state.clear()
            for name, slots in self._slots.items():
                if not self.moves[name][rows].any():
                    continue  # the optimizer begins its state at the first step
                state = self.optimizer.state[self.mounted[name]]
                state.update({slot: values[rows] for slot, values in slots.items()})
            for (name, slot), values in self._scalars.items():
                if not self.moves[name][rows].any():
                    continue
                self.optimizer.state[self.mounted[name]][slot] = self._common(
                    name, [values[r] for r in self._numbers()]
                )
        return self.mounted

    @property
    def optimized(self) -> list[str]:
        """Names of what the optimizer moves."""
        return [name for names in self._names for name in names]

    def note_step(self) -> None:
        """The optimizer has moved what is mounted and has a gradient."""
        for name, moves in self.moves.items():
            moves[self._rows] += self.mounted[name].grad is not None

    def fill_groups(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors into the optimizer's groups of parameters."""
        for group, names in zip(self.optimizer.param_groups, self._names, strict=True):
            group["params"] = [tensors[name] for name in names]

    @torch.no_grad()
    def unmount(self) -> None:
        """Write what is mounted back to the stack."""
        if self._rows is None:
            return
        rows, copies = self._rows, not isinstance(self._rows, slice)
        for name, part in self.mounted.items():
            if copies:
                self.state[name][rows] = part.detach()
            for slot, value in self.optimizer.state.get(part, {}).items():
                self._store(name, slot, value)
        self._rows = None

    def release(self) -> None:
        """Give the optimizer its own parameters back."""
        self.unmount()
        self.optimizer.state.clear()
        for group, parameters in zip(self.optimizer.param_groups, self._originals, strict=True):
            group["params"] = parameters

    def _store(self, name: str, slot: str, value: Any) -> None:
        shape = self.mounted[name].shape
        if isinstance(value, Tensor) and value.shape == shape:
            slots = self._slots.setdefault(name, {})
            if slot not in slots:
                slots[slot] = torch.zeros((self.size, *shape[1:]), dtype=value.dtype, device=value.device)
            if not isinstance(self._rows, slice) or slots[slot][self._rows].data_ptr() != value.data_ptr():
                slots[slot][self._rows] = value
        else:
            scalars = self._scalars.setdefault((name, slot), [value] * self.size)
            for row in self._numbers():
                scalars[row] = value.clone() if isinstance(value, Tensor) else value

    def _common(self, name: str, values: list[Any]) -> Any:
        first = values[0]
        if any(value is not first and value != first for value in values[1:]):
            raise ClientError(f"the optimizer has moved {name} of some clients of a group more often than of others")
        return first.clone() if isinstance(first, Tensor) else first

    def _numbers(self) -> Iterable[int]:
        assert self._rows is not None
        return numbers_of(self._rows, self.size)
