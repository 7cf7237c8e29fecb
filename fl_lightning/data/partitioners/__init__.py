"""Partitioners assign samples to clients. Each finishes in bounded time, for any skew."""

from fl_lightning.data.partitioners.base import (
    IID,
    ClassesPerClient,
    FromPlan,
    Partitioner,
    Parts,
    Pooled,
    QuantityDirichlet,
    Shards,
)
from fl_lightning.data.partitioners.dirichlet import ClientDirichlet, Dirichlet, repair
from fl_lightning.data.partitioners.domains import ByDomain, DomainDirichlet, Natural

__all__ = [
    "IID",
    "ByDomain",
    "ClassesPerClient",
    "ClientDirichlet",
    "Dirichlet",
    "DomainDirichlet",
    "FromPlan",
    "Natural",
    "Partitioner",
    "Parts",
    "Pooled",
    "QuantityDirichlet",
    "Shards",
    "repair",
]
