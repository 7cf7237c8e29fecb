r"""MOON: Li et al., Model-Contrastive Federated Learning, CVPR 2021, Eq. 3.

Paper: https://arxiv.org/abs/2103.16257
Code: https://github.com/QinbinLi/MOON

.. math:: \ell = -\mu \log \frac{e^{\cos(z, z_{glob})/T}}{e^{\cos(z, z_{glob})/T} + \sum_j e^{\cos(z, z_{prev,j})/T}}
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Step
from fl_lightning.core.seeding import rng_scope
from fl_lightning.core.state import State, clone, tensors
from fl_lightning.core.weighted import Weighted
from fl_lightning.functional import model_contrastive_loss
from fl_lightning.utilities.errors import require


class MOON(Method):
    r"""Pulls the representation z towards the global model's and away from the client's previous models'.

    The previous models are the client's local models at the end of its last visits. All reference models are frozen and
    in eval mode; gradients flow through z only.

    Args:
        mu: coefficient :math:`\mu \ge 0`; 0 gives FedAvg. The paper uses 0.1, 1, 5 and 10.
        temperature: T > 0; 0.5 in the paper, in effect 1 in FedDecorr's code.
        pool_size: number of previous models to contrast with, at least 1; 1 in the paper.
        first: the previous model in a client's first visit: no model and no term (``none``), a model with initial
            weights drawn for this client (``random``, by the layers' default initialisation), or the received model
            (``global``). A subclass can set another ``pool`` in ``initial_memory``.

    Raises:
        UsageError: ``mu`` is below 0, ``temperature`` is not above 0, ``pool_size`` is below 1, or the model cannot be
            copied.
    """

    requires = ("representation",)
    memory_keys: ClassVar = {"pool": "the client's last models, newest last, without unchanged frozen parameters"}

    def __init__(
        self,
        mu: float = 1.0,
        temperature: float = 0.5,
        pool_size: int = 1,
        first: Literal["none", "random", "global"] = "none",
    ) -> None:
        require(mu >= 0, "MOON.mu", mu, "give 0 or more")
        require(temperature > 0, "MOON.temperature", temperature, "use a number above 0")
        require(pool_size >= 1, "MOON.pool_size", pool_size, "give 1 or more")
        self.mu, self.temperature, self.pool_size, self.first = mu, temperature, pool_size, first

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        client.reference_copy()  # refuses a model that cannot be copied

    def on_client_start(self, client: ClientContext) -> None:
        pool = client.memory(self).get("pool") or self._first_pool(client)
        # FedCKA uses the same name for the newest, so that both methods share one reference model
        names = ["previous", *(f"previous.{age}" for age in range(1, len(pool)))][: len(pool)]
        client.scratch(self).names = names
        for name, state in zip(names, reversed(pool), strict=True):
            client.load_reference(name, client.received | state, self.requires)
        if pool:
            client.load_reference("global", client.received, self.requires)

    def penalty(self, client: ClientContext, step: Step) -> Tensor | None:
        names = client.scratch(self).names
        if not names:
            return None
        to_global = client.observe("global")["representation"]
        to_previous = [client.observe(name)["representation"] for name in names]
        z = step.taps["representation"]
        return self.mu * model_contrastive_loss(z, to_global, to_previous, self.temperature)

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted] | None:
        pool = client.memory(self).get("pool", [])
        client.memory(self)["pool"] = [*pool, client.state(own=True)][-self.pool_size :]
        return None

    def _first_pool(self, client: ClientContext) -> list[State]:
        if self.first != "random":
            return [client.received] if self.first == "global" else []
        module = client.reference_copy()
        with rng_scope(client.seed, "moon", client.info.id):  # leaves the client's other random numbers unchanged
            for part in module.modules():
                getattr(part, "reset_parameters", lambda: None)()
        return [clone(tensors(module))]
