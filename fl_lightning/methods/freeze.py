"""Freeze: a random head that is never trained, a baseline of FedUV (Son et al., CVPR 2024, Table 1).

Paper: https://arxiv.org/abs/2402.18372
Code: https://github.com/sonhamin/FedUV
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.seeding import torch_rng
from fl_lightning.core.server import Server
from fl_lightning.core.state import State
from fl_lightning.utilities.errors import require


class Freeze(Method):
    """Keeps the global head at its random initial weights, so that label skew cannot collapse it.

    The head is the module that the tap ``logits`` is bound to.

    Args:
        mode: ``frozen``: the head does not change, as the paper says. ``reset_each_round``: clients train it and the
            server discards the result, as in the authors' code.
        orthogonal: initialise the head's matrix with orthonormal rows (columns if there are more classes than
            features), which the paper's text assumes. If not, it keeps the initial weights that the module gave it.
    """

    requires = ("logits",)

    def __init__(self, mode: Literal["frozen", "reset_each_round"] = "frozen", orthogonal: bool = False) -> None:
        self.mode, self.orthogonal = mode, orthogonal

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        self.head = client.parameters_under("logits")
        hint = "the tap logits is bound to a module without trained parameters; take Freeze out"
        require(bool(self.head), "Freeze with the head", client.tap_paths["logits"], hint)

    def on_fit_start(self, server: Server) -> None:
        if not self.orthogonal:
            return
        for name in [name for name in self.head if server.state[name].ndim == 2]:
            drawn = torch.empty(server.state[name].shape)
            server.assign({name: nn.init.orthogonal_(drawn, generator=torch_rng(server.seed, "head"))})

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        for name in self.head if self.mode == "frozen" else ():
            client.live[name].grad = None

    def transform_client_update(self, client: ClientContext, delta: State) -> State:
        return delta | {name: torch.zeros_like(delta[name]) for name in delta if name in self.head}
