"""What a module and methods see in a mapped step: one client, whose tensors stand for those of a whole group.

Clients of a group take a step together, as one program over stacked tensors: the step runs once, under ``torch.vmap``,
and each tensor in it has a hidden dimension for the clients. A value that differs by client is such a tensor; where it
cannot be one, as an id that user code would look something up by, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.batch import batch_size as size_of
from fl_lightning.client.batch import count_examples
from fl_lightning.client.clock import Clock
from fl_lightning.client.entry import Arguments
from fl_lightning.client.logged import METHODS_HOOK, check_kind
from fl_lightning.client.visit import Visit
from fl_lightning.errors import UsageError, require
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


class Record(NamedTuple):
    """A value that was logged in a mapped step.

    Args:
        key: the hook, the name and its arguments; of a term of the loss the name alone.
        weight: its weight in a mean.
        value: the value of each client ``(m,)``.
    """

    key: tuple[Any, ...]
    weight: float | Tensor
    value: Any


class MappedLog:
    """Collects what is logged in a mapped step, with the functions that :class:`Logged` has for a module and methods.

    Args:
        module: the user's module.
        batch: the batch of a client.
    """

    dataloader_idx = None

    def __init__(self, module: Any, batch: Any) -> None:
        self.module, self._batch = module, batch
        self.records: list[Record] = []
        self._counted: int | None = None

    @property
    def counted(self) -> int:
        """The number of examples of a client's batch."""
        if self._counted is None:
            self._counted = count_examples(self._batch)
        return self._counted

    def log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        """Lightning's ``LightningModule.log``."""
        if len(args) > len(Arguments._fields) - 2:  # batch_size stands before the last two
            raise not_mappable(f"self.log({name!r}, ...)", "it is given more than nine arguments without their names")
        options = {**dict(zip(Arguments._fields, args, strict=False)), **kwargs}
        hook = vars(self.module)["_current_fx_name"] or "training_step"
        size = batch_size if batch_size is not None else size_of(self._batch)
        self._add((hook, name, Arguments(**options)), value, 1 if size is None else size)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Lightning's ``log_dict``."""
        if isinstance(dictionary, MetricCollection):
            raise not_mappable("self.log_dict", "torchmetrics objects keep what they have seen of one client")
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def add(self, name: str, value: Any, weight: Any = None, **kwargs: Any) -> None:
        """Add a value that a method logs."""
        self._add((METHODS_HOOK, name, Arguments(**kwargs)), value, self.counted if weight is None else weight)

    def add_term(self, name: str, value: Tensor) -> None:
        """Add a term of the loss."""
        self._add((name,), value, self.counted)

    def begin_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Begin a batch."""
        self._batch, self._counted = batch, None

    def callback_metrics(self) -> dict[str, Tensor]:
        """What was logged in the visit so far differs by client."""
        raise not_mappable(
            "self.trainer.callback_metrics", "it differs by client, and a step is of several side by side"
        )

    def _add(self, key: tuple[Any, ...], value: Any, weight: Any) -> None:
        name = key[0] if len(key) == 1 else key[1]
        if isinstance(value, Metric):
            raise not_mappable(f"self.log({name!r}, ...)", "a torchmetrics object keeps what it has seen of one client")
        check_kind(name, value)
        if isinstance(value, Tensor):
            hint = f"a tensor of one element is logged; try value.mean(), not {tuple(value.shape)}"
            require(value.numel() == 1, f"self.log({name!r}, ...)", "tensor", hint)
            value = value.detach().reshape(())
        self.records.append(Record(key, weight, value))


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
