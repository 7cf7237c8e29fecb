"""The server: keeper of the global state, and the optimizer that moves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from fl_lightning.state import State, clone

Buffers = Literal["average", "keep", "local"]


class Server:
    r"""Takes the mean change of a cohort as the negative gradient of an ordinary optimizer.

    With ``SGD(lr=1)``, the default, :math:`w^{t+1} = w^t + \sum_k p_k (y_k - w^t) = \sum_k p_k y_k`: FedAvg. Parameters
    are stepped in float64 and rounded to float32 after each step, so that the mean is rounded once. Buffers (and frozen
    parameters) never meet the optimizer: floating ones take the plain mean, integer ones its whole part in their dtype.

    Args:
        state: the initial global state by name.
        trainable: names of the parameters that the optimizer moves.
        optimizer: builds the server optimizer from parameters; None is ``SGD(lr=1)``.
        num_clients: N.

    Attributes:
        state: the global state w^t as it is sent.
        round: t, from 0.
        cohort: ids of the clients of this round.
    """

    def __init__(
        self,
        state: State,
        trainable: list[str],
        optimizer: Callable[[Iterable], Optimizer] | None = None,
        num_clients: int = 1,
    ) -> None:
        self.state = clone(state)
        self.num_clients = num_clients
        self.round = 0
        self.cohort: list[int] = []
        self.parameters = {name: nn.Parameter(self.state[name].double()) for name in trainable}
        build = optimizer or (lambda parameters: SGD(parameters, lr=1.0))
        self.optimizer = build(list(self.parameters.values())) if trainable else None

    def step(self, delta: State, others: State) -> None:
        """Move the parameters by the mean change ``delta``; take the mean ``others`` as they are."""
        for name, parameter in self.parameters.items():
            parameter.grad = -delta[name].double() if name in delta else None
        if self.optimizer is not None and delta:
            self.optimizer.step()
        for name in delta:
            self._round(name)
        for name, mean in others.items():
            self.state[name].copy_(mean)

    @torch.no_grad()
    def _round(self, name: str) -> None:
        parameter = self.parameters[name]
        parameter.copy_(parameter.float())
        self.state[name].copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The global state, the server optimizer's state and the number of rounds done."""
        optimizer = self.optimizer.state_dict() if self.optimizer else {}
        return {"state": self.state, "optimizer": optimizer, "round": self.round}
