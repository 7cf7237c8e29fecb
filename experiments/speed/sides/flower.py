"""Flower's simulation on Ray, with actors of one CPU; a client is the bare loop's."""

from __future__ import annotations

import argparse
import os
from functools import lru_cache, partial
from types import SimpleNamespace

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import ray  # noqa: F401  # Flower's simulation needs it
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from overhead import CLIENTS, build, evaluate, visit

from fl_lightning.models import ImageClassifier
from sides.work import Gate, first_model, without_trainer

PACKAGES = ("torch", "flwr", "ray")
WORK = ("folder", "model", "images", "test")  # the arguments that clients receive

client_app = ClientApp()


@lru_cache(1)
def at_hand(*work: str | int) -> tuple[ImageClassifier, SimpleNamespace]:
    """The model and the data, which an actor makes once."""
    torch.set_num_threads(1)
    args = argparse.Namespace(**dict(zip(WORK, work, strict=True)))
    return build(args.model), without_trainer(args)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config, k = message.content["config"], int(context.node_config["partition-id"])
    model, around = at_hand(*(config[name] for name in WORK))
    around.server.round = int(config["server-round"]) - 1
    visit(model, message.content["arrays"].to_torch_state_dict(), around, k)
    metrics = MetricRecord({"num-examples": around.data.info(k).num_examples})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def serve(args: argparse.Namespace, gate: Gate, grid: Grid, context: Context) -> None:
    """The server: evaluation is the last thing in a round, and the gate stands behind it."""
    torch.set_num_threads(args.threads)
    model, around = first_model(args), without_trainer(args)

    def evaluated(round_: int, arrays: ArrayRecord) -> None:
        model.load_state_dict(arrays.to_torch_state_dict())
        gate.turn(evaluate(model, around) if round_ else None)

    everyone = {"min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS}
    FedAvg(fraction_evaluate=0.0, **everyone).start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=args.rounds,
        train_config=ConfigRecord({name: getattr(args, name) for name in WORK}),
        evaluate_fn=evaluated,
    )


def run(args: argparse.Namespace, gate: Gate) -> None:
    server_app = ServerApp()
    server_app.main()(partial(serve, args, gate))
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": args.threads}}
    run_simulation(server_app, client_app, CLIENTS, backend_config=resources)
