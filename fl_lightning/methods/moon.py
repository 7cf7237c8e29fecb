r"""MOON: Li et al., Model-Contrastive Federated Learning, CVPR 2021, Eq. 3.

.. math:: \ell = -\mu \log \frac{e^{\cos(z, z_{glob})/T}}{e^{\cos(z, z_{glob})/T} + \sum_j e^{\cos(z, z_{prev,j})/T}}
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.errors import require
from fl_lightning.functional import model_contrastive_loss
from fl_lightning.method import Method, Step
from fl_lightning.seeding import ambient
from fl_lightning.state import State, Weighted, clone, tensors


class MOON(Method):
    r"""Draws the representation to the global model's and away from those of the client's own last visits.

    The previous models are the client's own at the end of the last rounds it took part in. Global and previous models
    are frozen, in eval mode; only z receives gradient.

    Args:
        mu: coefficient :math:`\mu \ge 0`; 0 gives FedAvg. The paper chooses among 0.1, 1, 5 and 10.
        temperature: T > 0. FedDecorr's MOON has 1.
        pool_size: how many previous models contrast, at least 1; the paper takes 1.
        first: what stands for the previous model in a client's first visit: nothing, so that there is no term
            (``none``), a model with initial weights of its own (``random``; layers' default initialisation), or the
            ``global`` one.
    """

    requires = ("representation",)

    def __init__(
        self,
        mu: float = 1.0,
        temperature: float = 0.5,
        pool_size: int = 1,
        first: Literal["none", "random", "global"] = "none",
    ) -> None:
        require(mu >= 0, "MOON.mu", mu, "give 0 or more")
        require(temperature > 0, "MOON.temperature", temperature, "give a number above 0")
        require(pool_size >= 1, "MOON.pool_size", pool_size, "give 1 or more")
        self.mu, self.temperature, self.pool_size, self.first = mu, temperature, pool_size, first

    def on_client_start(self, client: Client) -> None:
        pool = client.memory(self).get("pool") or self._first_pool(client)
        # the newest is called as in FedCKA, with which it is shared
        self._names = ["previous", *(f"previous.{age}" for age in range(1, len(pool)))][: len(pool)]
        for name, state in zip(self._names, reversed(pool), strict=True):
            client.load_reference(name, state, self.requires)
        if pool:
            client.load_reference("global", client.received, self.requires)

    def penalty(self, client: Client, step: Step) -> Tensor | None:
        if not self._names:
            return None
        to_global, *to_previous = (client.observe(name)["representation"] for name in ("global", *self._names))
        z = step.taps["representation"]
        return self.mu * model_contrastive_loss(z, to_global, to_previous, self.temperature)

    def on_client_end(self, client: Client) -> dict[str, Weighted] | None:
        pool = client.memory(self).get("pool", [])
        client.memory(self)["pool"] = [*pool, client.state()][-self.pool_size :]
        return None

    def _first_pool(self, client: Client) -> list[State]:
        if self.first == "random":
            return [random_state(client)]
        return [client.received] if self.first == "global" else []


def random_state(client: Client) -> State:
    """Initial weights drawn for this client alone, by the layers' own ``reset_parameters``."""
    module = client.frozen_copy()
    with ambient(client.seed, "moon", client.info.id):
        for part in module.modules():
            getattr(part, "reset_parameters", lambda: None)()
    return clone(tensors(module))
