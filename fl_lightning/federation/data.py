"""The data of a federation: on the server none but that of evaluation, at a site those of the site alone."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from fl_lightning.data.datamodule import ClientInfo, FederatedDataModule
from fl_lightning.data.loaders import num_batches
from fl_lightning.data.partitioned import Partitioned, own_module_of
from fl_lightning.data.partitioners import Pooled
from fl_lightning.data.plan import Plan
from fl_lightning.errors import UsageError, require
from fl_lightning.namespaces import LightningDataModule
from fl_lightning.seeding import base_seed

# rounds of a client whose memories a site keeps: those that the last two checkpoints begin with
CHECKPOINTS = 2


@dataclass(frozen=True)
class Facts:
    """A site's numbers of training examples, batches, and examples by phase, and the names of its classes."""

    num_examples: int = 0
    batches: int = 0
    evaluation: dict[str, int] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()


class PlanOfSites(Plan):
    """How many examples each site holds."""

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the sites' names: a late site tells its size late."""
        return hashlib.sha256("\n".join(self.domain_names).encode()).hexdigest()


class Sites(FederatedDataModule):
    """The data of a federation as its server has them: each client is a site, which alone reads its examples.

    Args:
        names: names of the sites; the place of a name is the number of its client. They stay the same as long as the
            run does; a site may join late.
        deadline: seconds in which a site must answer, else the round goes on without it; None waits until it answers
            or is lost.
        join_within: seconds in which the sites must join before the first round; then those that are there begin.
        evaluation: data of the server itself, whose validation and test data the global model is evaluated on; without
            them the sites evaluate it on theirs.
        largest: the largest number that an update may hold.
    """

    elsewhere = True

    def __init__(
        self,
        names: list[str],
        deadline: float | None = None,
        join_within: float = 300.0,
        evaluation: LightningDataModule | None = None,
        largest: float = 1e9,
    ) -> None:
        require(bool(names) and len({*names}) == len(names), "data.names", names, "give each site a name of its own")
        for name in names:
            # it is part of tags and of file names; the tags of "worst" are those of the worst of all
            plain = isinstance(name, str) and re.fullmatch("[a-zA-Z0-9][a-zA-Z0-9._-]{0,59}", name)
            hint = "give a name of up to 60 letters, digits, - . and _, other than worst"
            require(bool(plain) and name != "worst", "data.names", name, hint)
        require(deadline is None or deadline > 0, "data.deadline", deadline, "give seconds, or null")
        require(join_within > 0, "data.join_within", join_within, "give seconds")
        require(0 < largest < math.inf, "data.largest", largest, "give a number above 0")
        super().__init__(len(names))
        # under other names: what may change when a run resumes is no part of its description
        self.names, self.server_data, self.largest_number = names, evaluation, largest
        self.seconds_to_answer, self.seconds_to_join = deadline, join_within
        self.facts: dict[int, Facts] = {}
        # the run, and the last round of each client whose update the server has taken; of the last checkpoints, too
        self.run_id = ""
        self.accepted: dict[int, int] = {}
        self.saved: list[dict[int, int]] = []

    def prepare_data(self) -> None:
        if self.server_data is not None:
            self.server_data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up the server's own data, and take down how many examples the sites have."""
        for name in ("fit", "test") if self.server_data is not None else ():
            self.server_data.setup(name)  # type: ignore[union-attr]
        ends = np.cumsum([0, *(self.fact(k).num_examples for k in range(self.num_clients))])
        parts = [np.arange(*pair) for pair in pairwise(ends)]
        sites = np.repeat(np.arange(self.num_clients), np.diff(ends))
        self.plan = PlanOfSites(parts, domains=sites, domain_names=tuple(self.names))

    def fact(self, k: int) -> Facts:
        return self.facts.get(k, Facts())

    def info(self, k: int) -> ClientInfo:
        return ClientInfo(k, self.fact(k).num_examples, None, self.names[k])

    def train_dataloader(self, k: int = 0) -> range:
        """As many numbers as the site has batches, which nobody reads here."""
        return range(self.fact(k).batches)

    def val_dataloader(self) -> Any:
        return [] if self.server_data is None else self.server_data.val_dataloader()

    def test_dataloader(self) -> Any:
        return [] if self.server_data is None else self.server_data.test_dataloader()

    def state_dict(self) -> dict[str, Any]:
        if self.accepted not in self.saved:
            self.saved = [*self.saved, dict(self.accepted)][-CHECKPOINTS:]
        return {"run": self.run_id, "accepted": dict(self.accepted)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.run_id, self.accepted = state_dict["run"], dict(state_dict["accepted"])
        self.saved = [dict(self.accepted)]

    def kept_rounds(self, k: int) -> list[int]:
        """The rounds of a client after which its memory may still be asked for."""
        return sorted({rounds[k] for rounds in (*self.saved, self.accepted) if k in rounds})


class OneSite(Partitioned):
    """The data of one site: a data module, or ``part`` of a federated one, as one client."""

    def __init__(self, data: Any, part: int | None = None) -> None:
        federated = isinstance(data, FederatedDataModule)
        self.inner: Any = data if federated else Partitioned(data, Pooled(), 1)
        number = self.inner.num_clients
        hint = f"there are {number} clients; give the number of one, from 0"
        require(part is None or 0 <= part < number, "part", part, hint)
        hint = "a site has the data of one client; give 1, or part: the number of the client that it stands for"
        require(part is not None or number == 1, "data.num_clients", number, hint)
        self.part, self.is_whole = part or 0, part is None
        super().__init__(own_module_of(self.inner), num_clients=1)
        self.partitioner = self.inner.partitioner

    def setup(self, stage: str | None = None) -> None:
        if self._ready_for == base_seed():
            return
        self.inner.setup("fit")
        for name in getattr(self.inner, "measured", ()) if self.is_whole else ():
            found = self.inner.inference_arguments().get(name)
            raise UsageError(f"data.{name}: {found} was measured here, and other sites differ; give all sites the same")
        self.plan, self._ready_for = Plan([np.arange(self.inner.info(self.part).num_examples)]), base_seed()

    def prepare_data(self) -> None:
        self.inner.prepare_data()

    def teardown(self, stage: str | None = None) -> None:
        self._ready_for = None
        self.inner.teardown(stage)

    @property
    def num_classes(self) -> int | None:
        return getattr(self.inner, "num_classes", None)

    def info(self, k: int) -> ClientInfo:
        return replace(self.inner.info(self.part), id=k)

    def train_dataloader(self, k: int = 0) -> Any:
        return self.inner.train_dataloader(self.part)

    def val_dataloader(self) -> Any:
        return self.inner.val_dataloader()

    def test_dataloader(self, k: int | None = None) -> Any:
        return self.inner.test_dataloader()  # all of it is the site's

    def facts(self, evaluation: dict[str, int]) -> Facts:
        names = tuple(map(str, getattr(self.inner, "class_names", None) or ()))
        return Facts(self.info(0).num_examples, num_batches(self, 0), evaluation, names)
