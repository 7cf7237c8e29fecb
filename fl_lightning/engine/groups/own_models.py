"""The evaluation of clients' own models side by side: each batch is one program over their stacked tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from fl_lightning.client.mapped import not_mappable
from fl_lightning.client.module_snapshot import StateBinding
from fl_lightning.data.loaders import ClientLoader
from fl_lightning.engine.evaluation.evaluator import STAGES, step_name
from fl_lightning.engine.evaluation.loop import can_share, stage_of
from fl_lightning.engine.evaluation.metric_states import metrics_of
from fl_lightning.engine.groups.forming import dealt_out
from fl_lightning.engine.groups.logs import GroupLog, Record, filled
from fl_lightning.errors import LostWorkerError, Stopped, located
from fl_lightning.records.summary import tagged
from fl_lightning.seeding import ambient
from fl_lightning.state import State

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run


def groups_of_own_models(run: Run) -> list[list[int]] | None:
    """The clients whose own models this worker evaluates, by group; None where all are evaluated one by one.

    Groups depend on the clients alone, since the bits of a result do. Memories are sent to the worker of their group.
    """
    choice, memories, workers = run.local_training.choice, run.client.memories(), run.workers
    clients = sorted(memories.owners)
    if not run.client.kept or choice.size == 1 or len(clients) < choice.least:
        return None
    if any(callback.sees_own_models(run.server.round) for callback in run.callbacks):
        return None
    groups = dealt_out(clients, -(-len(clients) // choice.size))
    workers.barrier()  # a memory is sent when both sides are here
    memories.follow([[k for g in groups[rank :: workers.size] for k in g] for rank in range(workers.size)], workers)
    return groups[workers.rank :: workers.size]


def metrics_of_own_models(
    run: Run, phase: str, state: State, groups: Sequence[list[int]]
) -> Iterator[dict[str, float]]:
    """Metrics of each client's own model by tag; those of a group that cannot be mapped are evaluated one by one.

    Args:
        run: the run.
        phase: ``val`` or ``test``.
        state: the global state.
        groups: the clients.
    """
    module, resident = run.client.module, run.client.resident
    step, loaders = step_name(module, phase), run.loaders.evaluation(phase)
    # an evaluation that is nothing but its step: no hook of the module's around it, and no torchmetrics object
    hooked = "on_validation_model_zero_grad" in resident.hooks or bool(metrics_of(module))
    plain = step is not None and len(loaders) == 1 and not hooked and can_share(run.client, stage_of(step))
    for group in groups:
        own = {k: entries for k in group if (entries := run.client.own_entries(k))}
        if plain and len(own) > 1:
            try:
                yield from OwnModels(run, phase, str(step), state).evaluate(loaders[0], [*own.values()])
                continue
            except (LostWorkerError, Stopped):
                raise
            except Exception as error:  # if it is that of a client, it comes again
                run.trainer.warn(f"own models that cannot be evaluated side by side are, one by one: {located(error)}")
        for k, entries in own.items():
            yield run.evaluator.own_model(phase, state, k, entries)


class OwnModels:
    """Evaluates the own models of a group.

    Args:
        run: the run.
        phase: ``val`` or ``test``, the address of random numbers.
        step: name of the module's step.
        state: what they have alike.
    """

    def __init__(self, run: Run, phase: str, step: str, state: State) -> None:
        self.run, self.phase, self.step, self.state = run, phase, step, state
        self.client, self.resident, self.loaders = run.client, run.client.resident, run.loaders
        self._takes_index = is_param_in_hook_signature(getattr(run.client.module, step), "batch_idx", min_args=2)

    @torch.no_grad()
    def evaluate(self, loader: ClientLoader, own: Sequence[State]) -> list[dict[str, float]]:
        """Metrics by tag, with each of these entries in the place of those of the state.

        Raises:
            NotMappable: its step cannot be mapped; or any other error.
        """
        self.resident.load(self.state)
        self.resident.stand_in.evaluated_batches = [self.loaders.length(loader)]
        live, device = self.client.live, self.loaders.fabric.device
        log = GroupLog(self.client.module, len(own), device, examples=None)
        stacked = {name: torch.stack([entries[name] for entries in own]).to(live[name]) for name in own[0]}
        places = StateBinding(self.client.module, live)
        with self.resident.evaluating(STAGES[self.phase]), self.resident.taps.recorded(False):
            for index, batch in self.loaders.share(loader, 0, 1):
                self.run.workers.check()
                with ambient(self.loaders.seed, self.phase, 0, index):
                    batch = self.loaders.to_device(batch, 0)
                    log.add_records(slice(0, len(own)), self._batch(batch, index, stacked, places, log))
        log.end_epoch()
        found = []
        for row in range(len(own)):
            logged = self.resident.begin_logging()
            log.fill(logged, row)
            found.append({tagged(self.phase, name): value for name, value in logged.end_evaluation().items()})
        return found

    def _batch(self, batch: Any, index: int, stacked: State, places: StateBinding, log: GroupLog) -> list[Record]:
        """What the step logs on a batch."""
        records: list[tuple[Any, ...]] = []

        def mapped(*tensors: Tensor) -> tuple[Tensor, ...]:
            of_one = {**self.client.live, **dict(zip(stacked, tensors, strict=True))}
            log.begin_batch(batch)
            log.records = []
            with places.swapped(of_one) as rebound, self._logging(log), self.loaders.fabric.autocast():
                self.resident.call(self.step, batch, *([index] if self._takes_index else []))
            if rebound:
                raise not_mappable(f"{self.step}: {next(iter(rebound))}", "the buffer gets a new tensor")
            records[:] = [tuple(... if isinstance(part, Tensor) else part for part in one) for one in log.records]
            logged = [part for one in log.records for part in one if isinstance(part, Tensor)]
            return (*logged, torch.zeros(()))

        return filled(records, iter(torch.vmap(mapped)(*stacked.values())))

    @contextmanager
    def _logging(self, log: Any) -> Iterator[None]:
        before = self.resident.logged
        self.resident.log_into(log)
        try:
            yield
        finally:
            self.resident.log_into(before)
