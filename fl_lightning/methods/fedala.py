r"""FedALA: Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023, Eq. 5 to 7.

Paper: https://arxiv.org/abs/2212.01197
Code: https://github.com/TsingZ0/FedALA

.. math::
    y \leftarrow l_k + (w^t - l_k) \odot \Omega_k, \qquad
    \Omega_k \leftarrow \mathrm{clip}\big(\Omega_k - \eta \nabla_y f_k(y) \odot (w^t - l_k), 0, 1\big)
"""

from __future__ import annotations

from statistics import pstdev
from typing import ClassVar

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.state import State, clone, copy_into, select
from fl_lightning.methods.fedper import last_layers
from fl_lightning.methods.fedsam import reading_sums
from fl_lightning.utilities.errors import require

MOST_PASSES = 100


class FedALA(Method):
    r"""Starts a client's visit between the received model and its own last one, at a point learned on its data.

    :math:`l_k` is the model at the end of the client's last visit, and :math:`\Omega_k` has a weight from 0 to 1 for
    each trained parameter of the last layers, 1 at first. Other entries start as received. The weights are learned
    before the local steps, by the loss of the module alone; the client then trains and sends its change as in FedAvg.
    The first time, passes over the sample of its data continue until the last batch's losses in the last
    ``window`` passes have a standard deviation below ``threshold``; later it is one pass.

    A client's model is the point at which it would begin its next visit (evaluation point R), with weights that are
    learned for the evaluation alone. A new client begins with the received model.

    Args:
        layers: number of last layers with weights, at least 0, counted as in :class:`FedPer`; 0 gives FedAvg.
        rate: learning rate :math:`\eta \ge 0` of the weights; 0 gives FedAvg.
        sample: share of a client's batches on which the weights are learned, in (0, 1].
        window: number of passes that must agree, at least 2.
        threshold: standard deviation of their losses, at least 0.

    Raises:
        UsageError: an argument is out of range, or SCAFFOLD, FedDyn, FedNova, or another method that gives each client
            its own model is in the list.
    """

    requires = ("logits",)
    memory_keys: ClassVar = {
        "last": "l_k, the last layers at the end of the last visit",
        "weights": "Omega_k, from the second visit on",
    }

    def __init__(
        self, layers: int = 1, rate: float = 1.0, sample: float = 0.8, window: int = 10, threshold: float = 0.1
    ) -> None:
        require(layers >= 0, "FedALA.layers", layers, "give 0 or more")
        require(rate >= 0, "FedALA.rate", rate, "give 0 or more")
        require(0 < sample <= 1, "FedALA.sample", sample, "use a share in (0, 1]")
        require(window >= 2, "FedALA.window", window, "give 2 or more")
        require(threshold >= 0, "FedALA.threshold", threshold, "give 0 or more")
        self.layers, self.rate, self.sample, self.window, self.threshold = layers, rate, sample, window, threshold

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        hint = "a client's steps do not start at the received model, as it assumes; take it out"
        require(not reading_sums(client), "FedALA with method", reading_sums(client), hint)
        last_entries = last_layers(client, self.layers, "FedALA")
        self.upper = [name for name in client.trainable if name in last_entries]

    def on_client_start(self, client: ClientContext) -> None:
        weights = self.learned(client)
        if weights:
            client.memory(self)["weights"] = weights
            copy_into(client.live, self.start(client, weights))

    def on_client_end(self, client: ClientContext) -> None:
        client.memory(self)["last"] = clone(select(client.live, self.upper))

    def personal_state(self, client: ClientContext) -> State | None:
        weights = self.learned(client)
        return self.start(client, weights) if weights else None

    def start(self, client: ClientContext, weights: State) -> State:
        """The entries with weights at the beginning of a visit; where the weight is 1, they are the received ones."""
        previous, received = client.memory(self)["last"], client.received
        return {name: torch.lerp(previous[name], received[name], w) for name, w in weights.items()}

    @torch.no_grad()
    def learned(self, client: ClientContext) -> State:
        """The weights as this visit learns them; empty in a client's first visit."""
        last_values, last_weights = client.memory(self).get("last", {}), client.memory(self).get("weights", {})
        gaps = {name: client.received[name] - value for name, value in last_values.items()}
        weights = {name: torch.ones_like(gap) for name, gap in gaps.items()} | last_weights
        losses: list[float] = []
        while gaps and self.rate:
            for batch in client.batches(self.name, fraction=self.sample):
                gradients = client.gradients(self.start(client, weights), batch, "own")
                for name, gap in gaps.items():
                    weights[name] = (weights[name] - self.rate * gradients[name] * gap).clamp(0, 1)
            if last_weights:
                break
            losses.append(float(gradients.loss))
            if len(losses) > self.window and pstdev(losses[-self.window :]) < self.threshold:
                break
            if len(losses) == MOST_PASSES:
                rank_zero_warn(f"method=FedALA: the weights of a client may still change after {MOST_PASSES} passes")
                break
        return weights
