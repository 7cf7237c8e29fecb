"""A bare PyTorch loop on a small model, one client after another, which logs nothing."""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy

from sides.small import CASES, State, Visit, first_model, play
from sides.work import Gate

PACKAGES = ("torch",)


def run(args: argparse.Namespace, gate: Gate) -> None:
    model, case = first_model(args), CASES[args.case]

    def train(state: State, visits: list[Visit]) -> State:
        total, number = {name: torch.zeros_like(v) for name, v in state.items()}, sum(len(y) for _, y in visits)
        for x, y in visits:
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
            for x_now, y_now in zip(x.split(case.batch), y.split(case.batch), strict=True):
                optimizer.zero_grad()
                cross_entropy(model(x_now), y_now).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name].add_(value, alpha=len(y) / number)
        return total

    start = {name: value.clone() for name, value in model.state_dict().items()}
    play(args, gate, train, prepare=list, start=start, weights=dict)
