"""The data of a federation: the server has at most evaluation data; each site has its own data only."""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from fl_lightning.core.client_info import ClientInfo
from fl_lightning.core.seeding import base_seed
from fl_lightning.data.client_loaders import num_batches
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partition_adapter import Partitioned, own_module_of
from fl_lightning.data.partitioners import Pooled
from fl_lightning.data.plan import Plan
from fl_lightning.training.device_loaders import TRANSFER_HOOKS
from fl_lightning.utilities.errors import UsageError, count, require
from fl_lightning.utilities.lightning_compat import LightningDataModule

# checkpoints with which a site can resume: it keeps the client's state at the start of each
CHECKPOINTS = 2


@dataclass(frozen=True)
class SiteSummary:
    """A site's numbers of training examples, batches, and examples by phase, and the names of its classes."""

    num_examples: int = 0
    batches: int = 0
    evaluation: dict[str, int] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()


class Sites(FederatedDataModule):
    """The server's data module of a federation: each client is a site, the only party that reads its examples.

    Args:
        names: names of the sites; the index of a name is the number of its client. The names must not change during a
            run; a site may join late.
        deadline: seconds in which a site must answer, else the round continues without it; None waits until the site
            answers or is lost.
        join_within: seconds in which the sites must join before the first round; then the sites that have joined begin.
        evaluation: the server's own data module, on whose validation and test data the global model is evaluated; with
            None, the sites evaluate it on their data.
        largest: the largest number that an update may hold.
    """

    is_remote = True

    def __init__(
        self,
        names: list[str],
        deadline: float | None = None,
        join_within: float = 300.0,
        evaluation: LightningDataModule | None = None,
        largest: float = 1e9,
    ) -> None:
        require(bool(names) and len({*names}) == len(names), "data.names", names, "pass a different name for each site")
        for name in names:
            # names are part of tags and file names; "worst" is the tag of the worst site
            fits = isinstance(name, str) and bool(re.fullmatch("[a-zA-Z0-9][a-zA-Z0-9._-]{0,59}", name))
            hint = "use up to 60 letters, digits, - . and _, and not the name worst"
            require(fits and name != "worst", "data.names", name, hint)
        require(deadline is None or deadline > 0, "data.deadline", deadline, "pass seconds, or null")
        require(join_within > 0, "data.join_within", join_within, "pass seconds")
        require(0 < largest < math.inf, "data.largest", largest, "pass a number above 0")
        super().__init__(len(names))
        # attributes that are named as arguments are part of the run's fingerprint, and these may change on resuming
        self.names, self.server_data, self.largest_number = names, evaluation, largest
        self.seconds_to_answer, self.seconds_to_join = deadline, join_within
        for hook in TRANSFER_HOOKS if evaluation is not None else ():
            setattr(self, hook, getattr(own_module_of(evaluation), hook))
        self.facts: defaultdict[int, SiteSummary] = defaultdict(SiteSummary)
        # the last round of each client whose update the server has accepted: now, and in the last checkpoints
        self.run_id = ""
        self.accepted: dict[int, int] = {}
        self.saved: list[dict[int, int]] = []

    def prepare_data(self) -> None:
        if self.server_data is not None:
            self.server_data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up the server's own data, and the plan with the number of examples of each site."""
        for name in ("fit", "test") if self.server_data is not None else ():
            self.server_data.setup(name)  # type: ignore[union-attr]
        ends = np.cumsum([0, *(self.facts[k].num_examples for k in range(self.num_clients))])
        parts = [np.arange(*pair) for pair in pairwise(ends)]
        sites = np.repeat(np.arange(self.num_clients), np.diff(ends))
        self.plan = Plan(parts, domains=sites, domain_names=tuple(self.names))
        # without the sizes, since a late site reports its size late
        self.plan.hash = hashlib.sha256("\n".join(self.names).encode()).hexdigest()

    def info(self, k: int) -> ClientInfo:
        return ClientInfo(k, self.facts[k].num_examples, None, self.names[k])

    def train_dataloader(self, k: int = 0) -> range:
        """Return an object with the site's number of batches; its items are never read."""
        return range(self.facts[k].batches)

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
        """Return the rounds of a client after which the server may still request its memory."""
        return sorted({rounds[k] for rounds in (*self.saved, self.accepted) if k in rounds})


class SingleSite(Partitioned):
    """The data of one site: a data module, or ``part`` of a federated one, as a single client."""

    def __init__(self, datamodule: Any, part: int | None = None) -> None:
        federated = isinstance(datamodule, FederatedDataModule)
        self.inner: Any = datamodule if federated else Partitioned(datamodule, Pooled(), 1)
        number = self.inner.num_clients
        hint = f"the data have {count(number, 'client')}; pass the number of one of them, from 0"
        require(part is None or 0 <= part < number, "part", part, hint)
        hint = "a site has the data of one client; set num_clients to 1, or pass part, the client of this site"
        require(part is not None or number == 1, "data.num_clients", number, hint)
        self.part, self.is_whole = part or 0, part is None
        super().__init__(own_module_of(self.inner), num_clients=1)
        self.partitioner = self.inner.partitioner

    def setup(self, stage: str | None = None) -> None:
        if self._ready_for == base_seed():
            return
        self.inner.setup("fit")
        for name in getattr(self.inner, "measured", ()) if self.is_whole else ():
            value = self.inner.inference_arguments().get(name)
            raise UsageError(f"data.{name}: {value} was measured on this site alone; pass the same value to all sites")
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
        return self.inner.test_dataloader()  # all of it belongs to the site

    def facts(self, evaluation: dict[str, int]) -> SiteSummary:
        names = tuple(map(str, getattr(self.inner, "class_names", None) or ()))
        return SiteSummary(self.info(0).num_examples, num_batches(self, 0), evaluation, names)
