"""What attacks have in common: some clients send what harms the others."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, overrides
from fl_lightning.core.seeding import torch_rng
from fl_lightning.core.server import Server
from fl_lightning.core.updates import Updates
from fl_lightning.core.weighted import LazyEntries
from fl_lightning.utilities.errors import require

Clients = list[int] | None


class Attack(Method):
    """An attack by some of the clients, to test rules that resist it.

    In each round ``attack/clients`` counts the clients that attack in any way of the list. ``PersonalAccuracy`` and
    ``Scores`` leave the attackers out of their measurements on the clients.

    Args:
        clients: ids of the attackers; None draws them.
        share: share of all N clients that attack, in [0, 1], where ``clients`` is None; the first round(share N) of a
            permutation by the stream ``attackers``. 0 changes nothing.
        start: the round from which they attack.
    """

    name = "attack"
    needs_exchange = True

    def __init__(self, clients: list[int] | None = None, share: float = 0.2, start: int = 0) -> None:
        kind = type(self).__name__
        require(0 <= share <= 1, f"{kind}.share", share, "use a share in [0, 1]")
        require(start >= 0, f"{kind}.start", start, "give a round from 0")
        require(clients is None or min(clients, default=0) >= 0, f"{kind}.clients", clients, "ids count from 0")
        self.clients, self.share, self.start = clients, share, start
        self.round, self._attackers, self._earlier = 0, list[int](), list[Attack]()

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        methods = client.methods.methods
        earlier = methods[: methods.index(self)]
        self._earlier = [method for method in earlier if isinstance(method, Attack)]
        hint = "it mixes the clients' updates; list the attack first"
        for method in earlier:
            mixes = overrides(method, "transform_updates") and not isinstance(method, Attack)
            require(not mixes, f"{type(self).__name__} after method", type(method).__name__, hint)

    def attackers(self, server: Server) -> list[int]:
        order = torch.randperm(server.num_clients, generator=torch_rng(server.seed, "attackers")).tolist()
        return sorted(order[: round(self.share * len(order))] if self.clients is None else self.clients)

    def on_fit_start(self, server: Server) -> None:
        kind = type(self).__name__
        require(not server.at_sites, "method", kind, "real sites are not told to attack; take it out")
        self._attackers = self.attackers(server)
        hint = f"there are {server.num_clients} clients"
        require(max(self._attackers, default=0) < server.num_clients, f"{kind}.clients", self._attackers, hint)

    def on_round_start(self, server: Server) -> None:
        self.round = server.round
        attacks = [attack.attacks for attack in (*self._earlier, self)]
        server.metrics["attack/clients"] = sum(any(attack(k) for attack in attacks) for k in server.cohort)

    def attacks(self, k: int) -> bool:
        """Whether client k attacks in this round."""
        return self.round >= self.start and k in self._attackers


class ColludingAttack(Attack):
    """An attack in which all attackers send the same change, computed from those of the honest clients."""

    def sent(self, honest: Tensor, m: int) -> Tensor:
        """The change that attackers send, from honest ones ``(h, *shape)`` in a round of m clients."""
        raise NotImplementedError

    def transform_updates(self, server: Server, updates: Updates) -> Updates:
        is_attacker = torch.tensor([self.attacks(k) for k in updates])
        if not is_attacker.any():
            return updates
        if is_attacker.all():
            rank_zero_warn(
                f"{type(self).__name__}: all clients of round {server.round} attack, and send what they have"
            )
            return updates

        def attacked(rows: Tensor) -> Tensor:
            rows[is_attacker] = self.sent(rows[~is_attacker], len(rows))
            return rows

        return updates.replaced(LazyEntries(updates.names, lambda name: updates.by_coordinate(name, attacked)))
