"""A bare PyTorch loop."""

from __future__ import annotations

import argparse

import torch
from overhead import bare_round

from sides.work import Gate, first_model, without_trainer

PACKAGES = ("torch",)


def run(args: argparse.Namespace, gate: Gate) -> None:
    torch.set_num_threads(args.threads)
    model, around = first_model(args), without_trainer(args)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gate.turn()
    for round_ in range(args.rounds):
        around.server.round = round_
        state, accuracy = bare_round(model, state, around)
        gate.turn(accuracy)
