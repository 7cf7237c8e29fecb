r"""IFCA: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020.

Paper: https://arxiv.org/abs/2006.04088
Code: https://github.com/jichan3751/ifca

.. math::
    c_k = \arg\min_c f_k(w_c), \qquad w_c \leftarrow w_c + \frac{\sum_{c_k = c} p_k (y_k - w_c)}{\sum_{c_k = c} p_k}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import ServerValue
from fl_lightning.core.seeding import torch_rng
from fl_lightning.core.server import Server
from fl_lightning.core.state import State, select
from fl_lightning.core.updates import Updates
from fl_lightning.core.weighted import Weighted
from fl_lightning.data.client_loaders import leaves_of
from fl_lightning.methods.aggregation_rule import AggregationRule
from fl_lightning.methods.fedas import evaluating
from fl_lightning.utilities.errors import ClientError, require


class IFCA(AggregationRule):
    r"""Trains a model for each of K clusters, of which each client takes the one with the lowest loss on its data.

    All models travel to each client of a cohort, which computes their mean losses on its training data in eval mode,
    by the module's own loss, and trains the best; the first of equal ones. A model moves by the weighted mean change of
    the clients that chose it, and its floating-point buffers take their mean; one that no client chose stays. The
    server optimizer moves shared entries alone. ``ifca/clients/<c>`` logs how many clients chose model c.

    Model 0 is the global model. A client is evaluated with the model of its last choice (evaluation point R); a new
    client chooses by its training data.

    Args:
        clusters: number K of models, at least 1; 1 gives FedAvg.
        init_std: standard deviation, at least 0, of the noise that is added to the parameters of models 1 to K - 1
            before round 0, where the authors' code draws K models. With 0, all clients choose model 0.
        shared: paths of submodules, or names of entries, of which all models share one that is averaged over all
            clients, such as ``["encoder"]``.

    Raises:
        UsageError: an argument is out of range, the model has no such submodule, another method gives each client
            its own model, or the sums of another method would pass by the clusters.
    """

    name = "ifca"
    reads_weights = True
    memory_keys: ClassVar = {"choice": "the index of the model that it chose in its last visit"}
    models = ServerValue[dict[str, State]](lambda server: {})

    def __init__(self, clusters: int = 2, init_std: float = 0.01, shared: Sequence[str] = ()) -> None:
        require(clusters >= 1, "IFCA.clusters", clusters, "use 1 or more")
        require(0 <= init_std < math.inf, "IFCA.init_std", init_std, "use a number from 0")
        self.clusters, self.init_std, self.shared = clusters, init_std, shared

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        for path in self.shared:
            names = [name for name in client.live if f"{name}.".startswith(f"{path}.")]
            require(bool(names), "IFCA.shared", path, "the model has no such submodule; see model.named_modules()")

    def on_fit_start(self, server: Server) -> None:
        prefixes = tuple(f"{path}." for path in self.shared)
        self.clustered: list[str] = []
        for name in server.travelling if self.clusters > 1 else ():
            if server.state[name].is_floating_point() and not f"{name}.".startswith(prefixes):
                self.clustered.append(name)
        for c in range(1, self.clusters):
            model, rng = dict[str, Tensor](), torch_rng(server.seed, self.name, c)
            for name in self.clustered:
                value = server.state[name].double()
                if name in server.optimized:
                    noise = torch.randn(value.shape, generator=rng, dtype=torch.float64)
                    value = value + self.init_std * noise.to(value)
                model[name] = value.to(server.state[name].dtype, copy=True)
            self.models = {**self.models, str(c): model}

    def start_state(self, client: ClientContext) -> State | None:
        if not self.clustered:
            return None
        losses = self.losses(client)
        # of an evaluation, the memory is dropped
        client.memory(self)["choice"] = choice = losses.index(min(losses))
        return self.models.get(str(choice))

    def losses(self, client: ClientContext) -> list[float]:
        """Return the mean loss of each model on the client's training data, times their number."""
        losses = []
        with evaluating(client.module):
            for batch in client.batches(self.name):
                size = next((len(part) for part in leaves_of(batch) if isinstance(part, Tensor) and part.ndim), 1)
                of_batch = []
                for c in range(self.clusters):
                    model = dict(self.models.get(str(c), {}))
                    of_batch.append(client.gradients(model, batch, "own", names=()).loss)
                losses.append(torch.stack(of_batch) * size)
        sums = torch.stack(losses).double().sum(0).tolist() if losses else [0.0]
        for c, total in enumerate(sums):
            if not math.isfinite(total):
                raise ClientError(f"IFCA: the loss of model {c} is nan or infinite")
        return sums

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted] | None:
        if not self.clustered:
            return None
        return {"choice": Weighted.of(float(client.memory(self)["choice"]))}

    def personal_state(self, client: ClientContext) -> State | None:
        choice = client.memory(self).get("choice")
        if choice is None:
            return None
        return select(client.received, self.clustered) | self.models.get(str(choice), {})

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        if not self.clustered:
            return updates.combined(updates.weights, mean=True)
        choices = torch.tensor([int(update.payload["choice"].mean()) for update in updates.values()])
        is_chosen = choices == torch.arange(self.clusters)[:, None]
        # the last row is of all clients, for shared entries
        weights = torch.cat([is_chosen * updates.weights, updates.weights[None]])
        moves, result = weights.any(1).tolist(), dict[str, Tensor]()
        # without recomputed statistics of BatchNorm, which are the same for all models
        names = [name for name in self.clustered if name in updates.entries]
        models = {c: select(model, names) for c, model in self.models.items()} | {"0": select(server.state, names)}
        for name, means in updates.combined(weights, mean=True).items():
            result[name] = means[-1]
            if name not in names:
                continue
            for c in range(self.clusters):
                before = models[str(c)][name]
                value = before.double() + means[c] if name in updates.names else means[c]
                models[str(c)][name] = value.to(before.dtype) if moves[c] else before
            # no change of a parameter is left for the server optimizer
            result[name] = torch.zeros_like(means[-1]) if name in updates.names else models["0"][name].double()
        for c, number in enumerate(is_chosen.sum(1).tolist()):
            server.metrics[f"ifca/clients/{c}"] = number
        server.assign(models.pop("0"))
        self.models = models
        return result
