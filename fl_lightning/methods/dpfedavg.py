r"""DP-FedAvg: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018, Algorithm 1.

Paper: https://arxiv.org/abs/1710.06963

.. math::
    w^{t+1} = w^t + \frac{1}{n} \Bigl( \sum_{k=1}^{n} \Delta_k \min\bigl(1, \tfrac{C}{\lVert \Delta_k \rVert}\bigr)
    + \mathcal{N}(0, \sigma^2 C^2 I) \Bigr)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, ServerValue, overrides
from fl_lightning.core.seeding import torch_rng
from fl_lightning.core.server import Server
from fl_lightning.core.state import State, changed_entries, norm
from fl_lightning.core.weighted import Weighted
from fl_lightning.utilities.errors import require

# orders of the Renyi divergence that are tried
ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512)

# hooks with which another method would bypass the noise or the bound
IN_THE_WAY = (
    "sent_state",
    "sent_extras",
    "start_state",
    "on_client_end",
    "transform_client_update",
    "client_weight",
    "transform_updates",
    "aggregate",
    "transform_update",
)


class DPFedAvg(Method):
    r"""Client-level differential privacy: bounds each client's change, adds noise, and accounts for the privacy loss.

    Each client's change, all entries together, is scaled to a Euclidean norm of at most :math:`C`. The server adds
    normal noise of standard deviation :math:`\sigma C / n` to each number of the mean, which has equal weights
    regardless of ``trainer.weighting``. After each round the run logs ``dpfedavg/epsilon``: with ``delta``, it bounds
    the information about any one client in the models of all rounds so far, under replacement of this client's data
    (Renyi accountant of the package dp-accounting, extra ``privacy``). The account uses amplification by sampling if
    ``trainer.sampler`` draws the cohort uniformly; otherwise each round counts in full.

    The server is trusted: it sees each change before the noise. The account also excludes logged means, such as
    ``train/loss``, the norms of changes, numbers of examples, and attacks on the rounding of floating-point noise. In a
    simulation, the noise comes from the run's seed, so that runs are reproducible. With real sites, which all know the
    seed, it comes from the operating system, and a resumed run has other noise.

    Args:
        clip: C, norm of a client's change at most; inf, allowed only without noise, is no bound.
        noise: :math:`\sigma`, noise in units of C; 0 adds no noise, without an account.
        delta: the probability :math:`\delta` with which the bound may fail, in (0, 1), below 1 / N for N clients.

    Raises:
        UsageError: an argument out of range, missing dp-accounting, buffers that would be sent without noise, or
            another method that sends a payload or changes the average.
    """

    needs_exchange = True
    assumes_fresh = True
    # how many rounds there were, by "clients in the cohort/clients it was drawn from"
    rounds = ServerValue[dict[str, int]](lambda server: {}, travels=False)

    def __init__(self, clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5) -> None:
        require(clip > 0, "DPFedAvg.clip", clip, "use a norm above 0")
        require(0 <= noise < math.inf, "DPFedAvg.noise", noise, "use a number from 0")
        require(clip < math.inf or not noise, "DPFedAvg.clip", clip, "noise is in units of it; use a finite norm")
        require(0 < delta < 1, "DPFedAvg.delta", delta, "use a probability above 0, well below 1 / clients")
        self.clip, self.noise, self.delta = clip, noise, delta

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        other_methods = [method for method in client.methods.methods if method is not self]
        for method in other_methods:
            hooks = [hook for hook in IN_THE_WAY if overrides(method, hook)]
            hint = f"its {' and '.join(hooks)} would pass by the bound or the noise; take one of them out"
            require(not hooks, "DPFedAvg beside method", type(method).__name__, hint)
        hint = "buffers travel without noise; give trainer.buffers=keep, or a model with GroupNorm"
        require(not (self.noise and client.sent_others), "DPFedAvg with buffers", [*client.sent_others][:1], hint)
        if self.noise:
            self.spent({"1/1": 1})  # names the missing package

    def client_weight(self, client: ClientContext) -> float | None:
        return 1.0

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted] | None:
        changed = changed_entries(client.live, client.received, client.sent_frozen)
        hint = "a frozen parameter that changes in a visit would be sent without noise; do not change it"
        require(not (self.noise and changed), "DPFedAvg with frozen parameters", changed[:1], hint)
        return {"clients": Weighted.summed(1.0, 1.0)}

    def transform_client_update(self, client: ClientContext, delta: State) -> State:
        size = float(norm({name: value.double() for name, value in delta.items()}))
        if size <= self.clip:
            return delta
        # in float32, as it travels; what rounding adds to the norm is less than is taken off here
        scale = self.clip / size * (1 - 1e-6)
        return {name: (value * scale).float().double() for name, value in delta.items()}

    def transform_update(self, server: Server, delta: State, payload: dict[str, Weighted]) -> State:
        if not self.noise:
            return delta
        number = float(payload["clients"].total)
        rng = torch_rng(server.seed, "privacy", server.round)
        if server.at_sites:
            rng.seed()
        drawn = len(server.cohort) if server.population else 1
        key = f"{drawn}/{server.population or 1}"
        self.rounds = {**self.rounds, key: self.rounds.get(key, 0) + 1}
        server.metrics["dpfedavg/epsilon"] = self.spent(self.rounds)
        deviation = self.clip / number
        noisy = {}
        for name, value in delta.items():
            noisy[name] = value + self._normal(value, rng) * deviation
        return noisy

    def _normal(self, like: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Normal numbers of standard deviation sigma, in the shape of ``like``, drawn on the CPU."""
        return (torch.randn(like.shape, generator=rng, dtype=torch.float64) * self.noise).to(like.device)

    def spent(self, rounds: dict[str, int]) -> float:
        """Return epsilon after the given numbers of rounds of each kind.

        Raises:
            UsageError: dp-accounting is not installed.
        """
        try:
            import dp_accounting as dp
            from dp_accounting.rdp import RdpAccountant
        except ImportError:
            hint = "epsilon needs dp-accounting; install fl-lightning[privacy], or give noise: 0"
            require(False, "DPFedAvg.noise", self.noise, hint)
        # one client's data replaced by others move the sum by up to 2 C
        noisy: Any = dp.GaussianDpEvent(self.noise / 2)
        accountant = RdpAccountant(ORDERS, neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
        for key, times in rounds.items():
            drawn, number = map(int, key.split("/"))
            sampled = dp.SampledWithoutReplacementDpEvent(number, drawn, noisy) if drawn < number else noisy
            accountant.compose(sampled, times)
        return float(accountant.get_epsilon(self.delta))
