"""fedjax: its model, its SGD, its local training of FedAvg and its mean, with one of its back-ends."""

from __future__ import annotations

import argparse
from typing import Any

import fedjax
import haiku as hk
import jax
import numpy as np
import torch
from fedjax.algorithms.fed_avg import create_train_for_each_client
from fedjax.core.metrics import unreduced_cross_entropy_loss
from fedjax.core.models import create_model_from_haiku
from fedjax.models.emnist import create_conv_model

from sides.small import CASES, State, Visit, first_model, play
from sides.work import Gate

# names that fedjax uses and jax has removed
jax.tree_map = jax.tree_util.tree_map
jax.device_put_sharded = lambda shards, _: jax.tree_util.tree_map(lambda *parts: np.stack(parts), *shards)
jax.device_put_replicated = lambda tree, devices: jax.device_put_sharded([tree] * len(devices), devices)

PACKAGES = ("fedjax", "jax")
# our name of each layer and its name in haiku
LAYERS = {
    "synthetic": {"classifier": "linear"},
    "femnist": {
        "encoder.conv1": "conv_dropout_module/conv2_d",
        "encoder.conv2": "conv_dropout_module/conv2_d_1",
        "encoder.linear": "conv_dropout_module/linear",
        "classifier": "conv_dropout_module/linear_1",
    },
}
MAPS = (64, 12, 12)  # input of the first linear layer of the CNN: channels, height, width


def build(args: argparse.Namespace) -> fedjax.Model:
    if args.case == "synthetic":
        forward = hk.transform(lambda batch: hk.Linear(10)(batch["x"]))
        sample = {"x": np.zeros((1, 60), np.float32)}
        return create_model_from_haiku(forward, sample, lambda batch, z: unreduced_cross_entropy_loss(batch["y"], z))
    model = create_conv_model()
    without = {"apply_for_train": lambda params, batch, rng: model.apply_for_eval(params, batch)}
    return model if args.dropout else model.replace(**without)


def to_haiku(weight: torch.Tensor) -> np.ndarray:
    """A weight in haiku's layout: inputs before outputs, the channels of an image after its height and width."""
    if weight.ndim == 2 and weight.shape[1] == np.prod(MAPS):
        return weight.unflatten(1, MAPS).permute(2, 3, 1, 0).flatten(0, 2).numpy()
    return (weight.permute(2, 3, 1, 0) if weight.ndim == 4 else weight.T).numpy()


def from_haiku(weight: np.ndarray) -> torch.Tensor:
    """The inverse of ``to_haiku``."""
    given, (channels, *size) = torch.tensor(np.asarray(weight)), MAPS
    if given.ndim == 2 and len(given) == np.prod(MAPS):
        return given.unflatten(0, (*size, channels)).permute(3, 2, 0, 1).flatten(1)
    return given.permute(3, 2, 0, 1) if given.ndim == 4 else given.T


def run(args: argparse.Namespace, gate: Gate) -> None:
    if args.backend == "pmap":  # trains one client per device in parallel
        jax.config.update("jax_num_cpu_devices", args.threads)
    case, layers, state = CASES[args.case], LAYERS[args.case], first_model(args).state_dict()
    grad = fedjax.model_grad(build(args))
    with fedjax.for_each_client_backend(args.backend):
        train_clients = create_train_for_each_client(grad, fedjax.optimizers.sgd(case.lr))

    def prepare(visits: list[Visit]) -> list[tuple[int, Any]]:
        columns = ((x.movedim(1, -1) if x.ndim == 4 else x, y) for x, y in visits)
        clients = [fedjax.ClientDataset({"x": x.numpy(), "y": y.int().numpy()}) for x, y in columns]
        if args.backend == "pmap":  # which needs batches of one size
            return [(len(client), client.padded_batch(batch_size=case.batch)) for client in clients]
        return [(len(client), client.batch(batch_size=case.batch)) for client in clients]

    def train(params: Any, clients: list[tuple[int, Any]]) -> Any:
        keys = jax.random.split(jax.random.PRNGKey(0), len(clients))
        numbered = [(k, batches, key) for k, ((_, batches), key) in enumerate(zip(clients, keys, strict=True))]
        updates = ((update, clients[k][0]) for k, update in train_clients(params, numbered))
        mean = fedjax.tree_util.tree_mean(updates)
        # with a jax of today the results of pmap have one axis more, of length 1
        return jax.block_until_ready(jax.tree_util.tree_map(lambda a, b: a - b.reshape(a.shape), params, mean))

    def weights(params: Any) -> State:
        back = {f"{ours}.weight": from_haiku(params[theirs]["w"]) for ours, theirs in layers.items()}
        return back | {f"{ours}.bias": torch.tensor(np.asarray(params[name]["b"])) for ours, name in layers.items()}

    ws = {theirs: to_haiku(state[f"{ours}.weight"]) for ours, theirs in layers.items()}
    start = {theirs: {"w": ws[theirs], "b": state[f"{ours}.bias"].numpy()} for ours, theirs in layers.items()}
    play(args, gate, train, prepare, jax.tree_util.tree_map(jax.numpy.array, start), weights)
