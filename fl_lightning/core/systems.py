"""Simulates system heterogeneity: clients that drop out, stragglers, and clients that are not available.

Everything is a pure function of seed, round and client: methods that are compared on one seed have the same clients,
and a resumed run needs no saved generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fl_lightning.core.seeding import numpy_rng
from fl_lightning.utilities.errors import require

Lost = Literal["before", "after", "late"]
# first and last round of a window; None for no last one
Window = tuple[int, int | None]


@dataclass(frozen=True)
class SystemOutcome:
    """The outcome of a client in a round.

    Args:
        work: local epochs, or steps with ``local_steps``, that it trains; None for all.
        lost: whether it drops out ``before`` or ``after`` its training, or its update comes too ``late``; None if the
            server gets its update.
    """

    work: int | None = None
    lost: Lost | None = None


class SystemsHeterogeneity:
    r"""Clients that drop out, stragglers that train for fewer epochs, and clients that are not always available.

    FedProx's protocol (Li et al., MLSys 2020, Section 5.2): ``stragglers`` 0, 0.5 or 0.9 of the cohort train for a
    number of epochs drawn uniformly below E; ``late`` is ``keep`` for FedProx and ``drop`` for FedAvg.
    FedNova's protocol (Wang et al., NeurIPS 2020, Section 6): ``stragglers=1.0, least=2, most=5`` with
    ``local_epochs=5``, so that each client draws its number of epochs uniformly from 2 to 5 in each round.

    A client that drops out before its training is treated as absent from the cohort. If it drops out after its
    training, its update and the changes of its memory are lost. A straggler's next visit starts as after a complete
    visit: epochs and learning rates follow the rounds, not the work.

    Args:
        stragglers: share of each cohort that trains an incomplete visit, in [0, 1], rounded to a number of clients.
        least: epochs of a straggler at least, from 1 on; steps with ``local_steps``.
        most: epochs of a straggler at most, up to a complete visit; None is one less than a complete visit.
        late: ``keep`` the stragglers' updates, or ``drop`` stragglers, which are then not trained.
        dropout_before: probability that a client of the cohort drops out before its training, in [0, 1].
        dropout_after: probability that it drops out after its training, in [0, 1]; both add up to at most 1.
        available: windows of rounds in which clients are available, by ids such as ``3`` or ``5-9``: the first and the
            last round, or only the first as in ``[10]``. All other clients are always available.

    Raises:
        UsageError: an argument out of its range.
    """

    def __init__(
        self,
        stragglers: float = 0.0,
        least: int = 1,
        most: int | None = None,
        late: Literal["keep", "drop"] = "keep",
        dropout_before: float = 0.0,
        dropout_after: float = 0.0,
        available: dict[str, list[list[int]]] | None = None,
    ) -> None:
        shares = {"stragglers": stragglers, "dropout_before": dropout_before, "dropout_after": dropout_after}
        for name, share in shares.items():
            require(0 <= share <= 1, f"trainer.systems.{name}", share, "use a share in [0, 1]")
        dropout = dropout_before + dropout_after
        require(dropout <= 1, "trainer.systems: dropout_before + dropout_after", dropout, "give at most 1 in all")
        require(least >= 1, "trainer.systems.least", least, "give 1 or more")
        require(most is None or most >= least, "trainer.systems.most", most, f"give at least {least}, or null")
        require(late in ("keep", "drop"), "trainer.systems.late", late, "give keep or drop")
        self.stragglers, self.least, self.most, self.late = stragglers, least, most, late
        self.dropout_before, self.dropout_after = dropout_before, dropout_after
        self.available = available or {}
        self._windows: dict[int, list[Window]] = {}
        for ids, windows in self.available.items():
            low, _, high = str(ids).partition("-")
            high = high or low
            ordered = low.isdecimal() and high.isdecimal() and int(low) <= int(high)
            require(ordered, "trainer.systems.available", ids, "name clients as 3 or as 5-9")
            for window in windows:
                rounds = list(window) if isinstance(window, (list, tuple)) else []
                integers = all(isinstance(round_, int) and round_ >= 0 for round_ in rounds)
                fits = integers and len(rounds) in (1, 2) and rounds == sorted(rounds)
                require(
                    fits, "trainer.systems.available", window, "give windows of rounds as [first, last], or [first]"
                )
                for k in range(int(low), int(high) + 1):
                    self._windows.setdefault(k, []).append((rounds[0], rounds[1] if len(rounds) > 1 else None))

    def check(self, num_clients: int, rounds: int, full_work: int) -> None:
        """Refuse settings that do not fit the run.

        Args:
            num_clients: number of all clients.
            rounds: rounds of the run.
            full_work: epochs, or steps, of a complete visit.

        Raises:
            UsageError: complete visits cannot be shortened, or are shorter than ``most``; an unknown client; or a round
                without an available client.
        """
        most_work = full_work - 1 if self.most is None else self.most
        complete = f"a complete visit has {full_work} epochs or steps"
        hint = f"{complete}; set trainer.local_epochs or local_steps above {self.least}"
        require(not self.stragglers or most_work >= self.least, "trainer.systems.stragglers", self.stragglers, hint)
        hint = f"{complete}; use at most {full_work}"
        require(not self.stragglers or most_work <= full_work, "trainer.systems.most", self.most, hint)
        unknown = [k for k in self._windows if k >= num_clients][:1]
        require(not unknown, "trainer.systems.available", unknown, f"clients are 0 to {num_clients - 1}")
        # before a round without clients, a client leaves
        windows = [window for of_client in self._windows.values() for window in of_client]
        ends = {0, *(end + 1 for _, end in windows if end is not None)}
        empty = [r for r in sorted(ends) if r < rounds and not self.present(r, num_clients)]
        require(
            not empty, "trainer.systems.available", empty, "no client is available in these rounds; change the windows"
        )

    def present(self, round_: int, num_clients: int) -> list[int]:
        """Return the clients that are available in a round, in ascending order."""
        clients = []
        for k in range(num_clients):
            windows = self._windows.get(k, [(0, None)])
            if any(start <= round_ and (end is None or round_ <= end) for start, end in windows):
                clients.append(k)
        return clients

    def outcomes(self, seed: int, round_: int, cohort: list[int], full_work: int) -> dict[int, SystemOutcome]:
        """Return the outcomes of the clients of a cohort by id.

        Args:
            seed: base seed of the run.
            round_: number of the round.
            cohort: clients of the cohort.
            full_work: epochs, or steps, of a complete visit.
        """
        number = math.floor(self.stragglers * len(cohort) + 0.5)
        places = numpy_rng(seed, "stragglers", round_).permutation(len(cohort))
        late = {cohort[place] for place in places[:number]}
        most_work = full_work - 1 if self.most is None else self.most
        outcomes = {}
        for k in cohort:
            drawn = numpy_rng(seed, "dropout", round_, k).random()
            if drawn < self.dropout_before or (k in late and self.late == "drop"):
                outcomes[k] = SystemOutcome(lost="before")
                continue
            work = int(numpy_rng(seed, "work", round_, k).integers(self.least, most_work + 1)) if k in late else None
            drops = drawn < self.dropout_before + self.dropout_after
            outcomes[k] = SystemOutcome(None if work == full_work else work, "after" if drops else None)
        return outcomes
