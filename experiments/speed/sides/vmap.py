"""The clients of a round side by side, by hand: their weights are stacked, and ``torch.vmap`` maps the loss over them.

The clients with the most examples come first, so that those which are done drop off the end of the stack. Of the
others, each step takes those with a full batch at once, and after them those whose last batch has the same size.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from sides.small import CASES, State, Visit, first_model, play
from sides.work import Gate

PACKAGES = ("torch",)


class Stack(NamedTuple):
    """Return the padded examples of all clients ``(K, n, ...)``, and their numbers in descending order."""

    x: Tensor
    y: Tensor
    sizes: list[int]


def stacked(visits: list[Visit]) -> Stack:
    ordered = sorted(visits, key=lambda visit: -len(visit[1]))
    x, y = (pad_sequence(list(column), batch_first=True) for column in zip(*ordered, strict=True))
    return Stack(x, y, [len(y) for _, y in ordered])


def run(args: argparse.Namespace, gate: Gate) -> None:
    model, case = first_model(args), CASES[args.case]
    losses = torch.vmap(lambda state, x, y: cross_entropy(functional_call(model, state, x), y), randomness="different")

    def train(state: State, stack: Stack) -> State:
        clients = {name: value.expand(len(stack.sizes), *value.shape).clone() for name, value in state.items()}
        for begin in range(0, stack.sizes[0], case.batch):
            first = 0
            for size, same in groupby(min(n - begin, case.batch) for n in stack.sizes if n > begin):
                some = slice(first, first := first + len(list(same)))
                step(clients, some, stack.x[some, begin : begin + size], stack.y[some, begin : begin + size])
        shares = torch.tensor(stack.sizes) / sum(stack.sizes)
        return {name: torch.tensordot(shares, value, 1) for name, value in clients.items()}

    def step(clients: State, some: slice, x: Tensor, y: Tensor) -> None:
        weights = {name: value[some].detach().requires_grad_() for name, value in clients.items()}
        losses(weights, x, y).sum().backward()
        with torch.no_grad():
            for value in weights.values():
                value.sub_(value.grad, alpha=case.lr)

    start = {name: value.clone() for name, value in model.state_dict().items()}
    play(args, gate, train, prepare=stacked, start=start, weights=dict)
