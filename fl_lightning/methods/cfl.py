r"""CFL: Sattler, Mueller and Samek, Clustered Federated Learning, IEEE TNNLS 2021.

Paper: https://arxiv.org/abs/1910.01991
Code: https://github.com/felisat/clustered-federated-learning

.. math::
    \Bigl\lVert \frac{1}{|C|} \sum_{k \in C} x_k \Bigr\rVert < \epsilon_1, \quad
    \max_{k \in C} \lVert x_k \rVert > \epsilon_2 \quad \Rightarrow \quad C = C_1 \cup C_2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.method import ServerValue
from fl_lightning.core.server import Server
from fl_lightning.core.state import State
from fl_lightning.core.updates import Updates
from fl_lightning.methods.aggregation_rule import AggregationRule, move_models
from fl_lightning.utilities.errors import require


class CFL(AggregationRule):
    r"""Splits a cluster of clients in two where their changes :math:`x_k` have become large, but cancel out.

    Each cluster has a model, which moves by the plain mean of its clients' changes. All clients begin in one. The
    clients of a round decide on the split of their cluster, by the cosines of their changes, and leave it; the others
    stay. Clusters never merge. ``cfl/clusters`` logs their number.

    The global model is that of the first cluster, which the server optimizer moves until the first split; a new client
    starts with it. A client is evaluated with the model of its cluster (evaluation point R).

    Args:
        eps1: :math:`\epsilon_1`, from 0 to ``eps2``; 0, for no split, gives FedAvg with ``trainer.weighting=uniform``.
        eps2: :math:`\epsilon_2`. Both have the unit of a change.
        least: size from which on a cluster is split, at least 2.
        start: number of rounds before the first split, at least 0.
        split: ``optimal``, by which the largest cosine between the two parts is least, or ``complete``, by complete
            linkage as in the authors' code.

    Raises:
        UsageError: an argument is out of range, another method gives each client its own model or weights clients, or
            its sums would pass by the clusters.
    """

    name = "cfl"
    clusters = ServerValue[dict[str, int]](lambda server: {}, travels=False)
    models = ServerValue[dict[str, State]](lambda server: {}, travels=False)

    def __init__(
        self,
        eps1: float = 0.4,
        eps2: float = 1.6,
        least: int = 3,
        start: int = 20,
        split: Literal["optimal", "complete"] = "optimal",
    ) -> None:
        require(0 <= eps1 <= eps2, "CFL.eps1", eps1, f"use a number from 0 to eps2={eps2:g}")
        require(least >= 2, "CFL.least", least, "use 2 or more")
        require(start >= 0, "CFL.start", start, "give 0 or more")
        self.eps1, self.eps2, self.least, self.start, self.split = eps1, eps2, least, start, split

    def sent_state(self, server: Server, k: int) -> State | None:
        return self.models.get(str(self.clusters.get(str(k), 0)))

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        clusters, models, members = dict(self.clusters), dict(self.models), dict[int, list[int]]()
        for place, k in enumerate(updates):
            members.setdefault(clusters.get(str(k), 0), []).append(place)
        parts = self.parts(server, updates, members) if server.round >= self.start and self.eps1 else {}
        for c, halves in parts.items():
            del members[c]
            for half in halves:
                number = 1 + max([0, *clusters.values(), *members])
                members[number] = half
                models[str(number)] = models.get(str(c)) or {name: server.state[name] for name in updates.entries}
                clusters |= {str(k): number for place, k in enumerate(updates) if place in half}
        weights = {}
        for c, places in members.items():
            weights[str(c)] = torch.tensor([float(place in places) for place in range(len(updates))]).double()
        server.metrics["cfl/clusters"] = float(len({*clusters.values(), 0}))
        if not models:
            return updates.combined(weights["0"], mean=True)
        result, self.models = move_models(server, updates, models, weights, updates.entries)
        self.clusters = clusters
        return result

    def parts(self, server: Server, updates: Updates, members: dict[int, list[int]]) -> dict[int, list[list[int]]]:
        """The two parts of each cluster that is split, as places of its clients among those of the round."""
        squares = updates.squared_distances(to=server.zeros())
        products = (squares[:, None] + squares - updates.squared_distances()) / 2
        norms, parts = squares.sqrt(), {}
        cosines = products / (norms[:, None] * norms).where(products != 0, 1.0)
        for c, places in members.items():
            mean, largest = products[places][:, places].mean().clamp_min(0).sqrt(), norms[places].max()
            if len(places) >= self.least and mean < self.eps1 and largest > self.eps2:
                halves = two_groups(cosines[places][:, places].cpu(), complete=self.split == "complete")
                parts[c] = [sorted(places[place] for place in half) for half in halves]
        return parts


def two_groups(similarity: Tensor, complete: bool = False) -> list[list[int]]:
    """Split rows in two groups by agglomerative clustering of their ``similarity (m, m)``.

    With single linkage, the largest similarity between the groups is the least of all splits.
    """
    linkage, groups = similarity.clone().fill_diagonal_(-torch.inf), [[row] for row in range(len(similarity))]
    join = torch.minimum if complete else torch.maximum
    while len(groups) > 2:
        i, j = divmod(int(linkage.argmax()), len(groups))
        linkage[i] = linkage[:, i] = join(linkage[i], linkage[j])
        linkage[i, i] = -torch.inf
        kept_rows = [row for row in range(len(groups)) if row != j]
        linkage, groups[i] = linkage[kept_rows][:, kept_rows], groups[i] + groups[j]
        del groups[j]
    return groups
