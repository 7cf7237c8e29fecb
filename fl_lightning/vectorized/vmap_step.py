"""A part of a step of several clients, as one program over stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.client.lightning.fit_progress import FitProgress
from fl_lightning.client.lightning.module_snapshot import StateBinding
from fl_lightning.client.visit import Visit
from fl_lightning.core.client_info import ClientInfo
from fl_lightning.core.state import State
from fl_lightning.training.local_training import LocalTraining
from fl_lightning.utilities.errors import ClientError
from fl_lightning.vectorized.batched_tree import (
    BatchedTree,
    Column,
    RowIndex,
    describe,
    numbers_of,
    put_together,
    take_apart,
)
from fl_lightning.vectorized.group_log import GroupLog, Record
from fl_lightning.vectorized.one_client import one_client
from fl_lightning.vectorized.op_trace import Recordings
from fl_lightning.vectorized.vmap_views import View, not_mappable

# results of a part of a step for one client, by name; None is a removed gradient
Results = dict[str, Tensor | None]


class StepPhase(NamedTuple):
    """A part of a step: ``work`` does it for one client, whose module, visit and values are loaded.

    ``columns`` are the arguments of ``work``, each with a flag for stacked ones. ``finish`` takes the results of
    ``work`` and the states of all clients, and returns the gradients of the states. ``about`` and the arguments
    distinguish parts with one name.
    """

    name: str
    about: Any
    columns: Sequence[tuple[Any, bool]]
    work: Callable[[list[Any]], Results]
    finish: Callable[[Results, State], State] | None = None


@dataclass
class TraceMetadata:
    """Metadata of a program's outputs; ``...`` stands for a tensor among them."""

    # names of the results, with whether each is a tensor
    results: dict[str, bool] = field(default_factory=dict)
    # parameters with a gradient, and buffers with new tensors
    graded: list[str] = field(default_factory=list)
    rebound: list[str] = field(default_factory=list)
    # replaced leaves of client.scratch, by place
    changes: dict[int, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    # why the program cannot be repeated
    obstacle: str | None = None


class GroupContext(Protocol):
    """The values of a group that its programs use."""

    size: int
    client: Client
    training: LocalTraining
    settings: str
    recordings: Recordings
    # the global state, and the received entries in which clients may differ
    received: State
    received_own: State
    # frozen parameters
    shared: State
    infos: list[ClientInfo]
    counts: dict[str, Column]
    log: GroupLog
    places: StateBinding

    def fit_progress(self, row: int) -> FitProgress:
        """Return the progress of a client."""

    def table_of(self, row: int) -> tuple[str, BatchedTree]:
        """Return the table of the methods' scratch for a client, and its distinguishing key."""

    def note_settings(self) -> bool:
        """Store the optimizer's settings, and return whether they changed."""


class VmapStep:
    """A part of a step of some clients of a group, whose ``mounted`` tensors are their states."""

    def __init__(self, group: GroupContext, rows: RowIndex, mounted: State, part: StepPhase) -> None:
        self.group, self.rows, self.mounted, self.part = group, rows, mounted, part
        self.number = len(numbers_of(rows, group.size))
        self.kind, self.table = group.table_of(numbers_of(rows, group.size)[0])
        # values of each client that methods see: its own entries of the received state, and scratch
        self.own = {name: values[rows] for name, values in group.received_own.items()}
        self.arguments = [*part.columns, *(column.take(rows) for column in self.table.columns)]
        columns = [value for value, batched in self.arguments if batched]
        self.stacked = [*mounted.values(), *self.own.values(), *columns]

    def results(self) -> Results:
        """Run or repeat it; keep its effects and return the results of all clients."""
        recordings, name = self.group.recordings, self.part.name
        versions = [value._version if isinstance(value, Tensor) else 0 for value, _ in self.arguments]
        outputs: Sequence[Tensor]
        inputs, key = self._inputs()
        recording = recordings.find(name, key)
        if recording is None:
            outputs, notes = recordings.run(name, key, inputs, self._run)
        else:
            outputs, notes = recording.repeat(inputs), recording.notes
        return self._kept(iter(outputs), notes, versions)

    def _inputs(self) -> tuple[list[Tensor], Any]:
        """The input tensors, each once, and a key; programs with equal keys differ in their tensors alone."""
        group = self.group
        shared = [value for value, batched in self.arguments if not batched]
        server = [tensor for _, tensor in group.client.methods.attributes.server]
        tensors = [*self.stacked, *filter(torch.is_tensor, shared), *group.received.values(), *server]
        inputs = {id(tensor): tensor for tensor in tensors}
        leaves = [
            (value.shape[batched:], value.dtype, batched) if isinstance(value, Tensor) else value
            for value, batched in self.arguments
        ]
        key: tuple[Any, ...] = (self.number, self.kind, self.part.about, group.settings, tuple(self.own), *leaves)
        if len(inputs) < len(tensors):
            places = {tensor: place for place, tensor in enumerate(inputs)}
            key = (*key, tuple(places[id(tensor)] for tensor in tensors))
        return [*inputs.values()], key

    def _run(self) -> tuple[list[Tensor], TraceMetadata]:
        """The outputs of the program, and its notes."""
        group, part, client = self.group, self.part, self.group.client
        number, names, size = len(part.columns), [*self.mounted, *self.own], len(self.mounted)
        counts = [column.take(self.rows) for column in group.counts.values()]
        arguments, notes, log = [*self.arguments, *counts], TraceMetadata(), group.log

        def note(what: str) -> None:
            notes.obstacle = notes.obstacle or f"a step reads {what}"

        row_numbers = numbers_of(self.rows, group.size)
        fit_progress: Any = View("self.trainer: ", lambda: [*map(group.fit_progress, row_numbers)], note)

        def mapped(*tensors: Tensor) -> tuple[Tensor, ...]:
            log.take_records()  # values of a failed step
            values = iter(tensors[len(names) :])
            leaves = [next(values) if batched else value for value, batched in arguments]
            tree_leaves, counted = leaves[number : len(self.arguments)], leaves[len(self.arguments) :]
            tree = put_together(self.table.shape, tree_leaves)
            everything = {**group.shared, **dict(zip(names[:size], tensors, strict=False))}
            received = {**group.received, **dict(zip(names[size:], tensors[size:], strict=False))}
            scratch = namespaces_of(tree["scratch"])
            infos = [group.infos[row] for row in row_numbers]
            info: Any = View("client.info.", lambda: infos, note, **tree["info"])
            visit = Visit(info, received, fit_progress, log, client.methods.attributes.server)
            numbers = SimpleNamespace(**dict(zip(group.counts, counted, strict=True)))
            visit.scratch, visit.counts = scratch, View("client.", lambda: [numbers], note)
            live = {name: everything[name] for name in client.live}
            with group.places.swapped(everything) as rebound, one_client(client, live, visit, tree["references"]):
                results = part.work(leaves[:number])
            notes.results = {name: value is not None for name, value in results.items()}
            notes.rebound, fresh = list(rebound), list[Tensor]()
            if scratch:
                changed = self._changed(
                    tree, tree_leaves, {name: vars(values_by_name) for name, values_by_name in scratch.items()}
                )
                fresh = [leaf for leaf in changed.values() if isinstance(leaf, Tensor)]
                notes.changes = changed | {place: ... for place in changed if isinstance(changed[place], Tensor)}
            notes.records, logged = log.take_records()
            if any(record.value is not ... for record in notes.records):
                note("a number to be logged, which may be another in the next step")
            given_back = [value for value in results.values() if value is not None]
            return (*given_back, *rebound.values(), *map(torch.detach, fresh), *logged)

        # a number that differs by client is a tensor, and as precise as a run in 64-true
        with group.training.fabric.autocast():
            differing = (value for value, batched in counts if batched)
            outputs = [*torch.vmap(mapped, randomness="different")(*self.stacked, *differing)]
        if group.note_settings():
            raise ClientError("a step changes the optimizer's settings, which these clients have in common")
        gradients: State = {}
        if part.finish is not None:
            places = [name for name, is_tensor in notes.results.items() if is_tensor]
            mounted = dict(zip(self.mounted, self.stacked, strict=False))
            gradients = part.finish(dict(zip(places, outputs, strict=False)), mounted)
        notes.graded = list(gradients)
        return [*gradients.values(), *outputs], notes

    def _changed(self, tree: Any, before: Sequence[Any], scratch: Any) -> dict[int, Any]:
        """Return the leaves of ``client.scratch`` that the step has replaced, by place.

        Raises:
            VmapUnsupported: its structure has changed in the step, or a value has moved to another name.
        """
        after: list[Any] = []
        shape = take_apart({**tree, "scratch": scratch}, after)
        is_same = shape == self.table.shape and [*map(describe, after)] == [*map(describe, before)]
        replaced = [place for place, leaf in enumerate(after) if is_same and leaf is not before[place]]
        changed = {place: after[place] for place in replaced}
        ids_before = {id(leaf) for leaf in before if isinstance(leaf, Tensor)}
        if not is_same or any(id(leaf) in ids_before for leaf in changed.values()):
            why = "a step changes which values it holds, or their types; set them all in on_client_start"
            raise not_mappable("client.scratch", why)
        return changed

    @torch.no_grad()
    def _kept(self, outputs: Iterator[Tensor], notes: TraceMetadata, versions: list[int]) -> Results:
        """Keep gradients, buffers, values of the methods and logs, and return the results."""
        group, rows = self.group, self.rows
        for name in notes.graded:
            self.mounted[name].grad = next(outputs)
        results: Results = dict.fromkeys(notes.results)
        for name, is_tensor in notes.results.items():
            if is_tensor:
                results[name] = next(outputs)
        for name in notes.rebound:
            self.mounted[name].copy_(next(outputs))
        number = len(self.part.columns)
        columns = zip(self.arguments[number:], versions[number:], strict=True)
        for place, ((value, batched), version) in enumerate(columns):
            if batched and value._version != version:
                self.table.columns[place].put(rows, value, group.size)
        for place, leaf in notes.changes.items():
            self.table.columns[place].put(rows, next(outputs) if leaf is ... else leaf, group.size)
        group.log.add_records(rows, notes.records, outputs)
        return results


def namespaces_of(scratch: Mapping[str, Mapping[str, Any]]) -> dict[str, SimpleNamespace]:
    """The scratch of each method, as :meth:`.Client.scratch` returns it."""
    return {name: SimpleNamespace(**values) for name, values in scratch.items()}
