"""What a module and methods see in a mapped step: one client, whose tensors stand for those of a whole group.

Clients of a group take a step together, as one program over stacked tensors: the step runs once, under ``torch.vmap``,
and each tensor in it has a hidden dimension for the clients. A value that differs by client is such a tensor; where it
cannot be one, as an id that user code would look something up by, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fl_lightning.client.clock import Clock
from fl_lightning.client.visit import Visit
from fl_lightning.errors import UsageError
from fl_lightning.state import State

REMEDY = "give trainer.clients_per_step=1"


class NotMappable(UsageError):
    """A step cannot be mapped over clients; says why."""


def not_mappable(what: str, why: str) -> NotMappable:
    """The error of something that a mapped step may not use."""
    return NotMappable(f"{what}: {why}; {REMEDY}")


class MappedInfo:
    """What is known about the client of a mapped step.

    Args:
        num_examples: n_k, the number of its training examples: a number where all clients have as many, else a tensor.
        label_counts: the number of its training examples of each class ``(C,)``; None if there are no labels.
    """

    def __init__(self, num_examples: Any, label_counts: Tensor | None) -> None:
        self.num_examples, self.label_counts = num_examples, label_counts

    def __getattr__(self, name: str) -> Any:
        raise not_mappable(f"client.info.{name}", "it differs by client, and a step is of several side by side")


class MappedClock:
    """The clock of several clients: an attribute in which theirs agree; another one is refused.

    Args:
        clocks: gives the clock of each.
        note: is told what is looked at, as it may be another in the next step.
    """

    def __init__(self, clocks: Callable[[], Sequence[Clock]], note: Callable[[str], None]) -> None:
        self._clocks, self._note = clocks, note

    def __getattr__(self, name: str) -> Any:
        self._note(f"self.trainer: {name}")
        values = [getattr(clock, name) for clock in self._clocks()]
        if any(value != values[0] for value in values):
            raise not_mappable(f"self.trainer: {name}", "it differs by client, and a step is of several side by side")
        return values[0]


class MappedVisit(Visit):
    """The visit of a mapped step.

    Args:
        info: the client.
        received: the state that the visit began with.
        clock: where it lies in the one fit of which it is a part.
        logged: collects what is logged.
        server: tensors that its hooks may not write to, beside what was received, each with a name for errors.
        scratch: what each method keeps for the visit, by the method's name.
        counts: ``num_steps``, ``lr`` and ``lr_total``.
        note: is told which of them is looked at, as it may be another in the next step.
    """

    def __init__(
        self,
        info: MappedInfo,
        received: State,
        clock: Any,
        logged: Any,
        server: Sequence[tuple[str, Tensor]],
        scratch: dict[str, SimpleNamespace],
        counts: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(info, received, clock, logged, server)  # type: ignore[arg-type]
        self.scratch = scratch
        self._counts, self._note = counts, note
        for name in counts:
            delattr(self, name)

    def __getattr__(self, name: str) -> Any:
        self._note(f"client.{name}")
        return self._counts[name]
