"""The evaluation of clients' own models side by side: each batch is one program over their stacked tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from fl_lightning.client.lightning.module_snapshot import StateBinding
from fl_lightning.core.seeding import rng_scope
from fl_lightning.core.state import State
from fl_lightning.data.client_loaders import ClientLoader
from fl_lightning.engine.evaluation.evaluator import STAGES, step_name
from fl_lightning.engine.evaluation.loop import can_share, stage_of
from fl_lightning.engine.evaluation.metric_states import metrics_of
from fl_lightning.storage.metric_format import tagged
from fl_lightning.utilities.errors import LostWorkerError, Stopped, with_location
from fl_lightning.vectorized.group_log import GroupLog, Record
from fl_lightning.vectorized.group_size import GroupSize
from fl_lightning.vectorized.grouping import dealt_out
from fl_lightning.vectorized.vmap_views import not_mappable

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run


def groups_of_own_models(run: Run, choice: GroupSize) -> list[list[int]]:
    """Return the clients with a memory whose models this worker evaluates, by group; groups of one in sequence.

    Groups depend only on the clients, so that results are reproducible. Memories are sent to the worker of their group.
    """
    memories, workers = run.client.memories(), run.workers
    clients = sorted(memories.owners)
    is_watched = any(callback.needs_local_models(run.server.round) for callback in run.callbacks)
    if choice.size == 1 or len(clients) < choice.least or is_watched:
        return [[k] for k in memories]
    groups = dealt_out(clients, -(-len(clients) // choice.size))
    workers.barrier()  # a memory is sent when both sides are here
    shares = [groups[rank :: workers.size] for rank in range(workers.size)]
    memories.follow([[*chain(*share)] for share in shares], workers)
    return groups[workers.rank :: workers.size]


def metrics_of_group(run: Run, phase: str, state: State, group: Sequence[int]) -> list[dict[str, float]] | None:
    """Return the metrics of the own models of several clients by tag; None where they cannot be mapped."""
    module, worker_module = run.client.module, run.client.worker_module
    step, loaders = step_name(module, phase), run.loaders.evaluation(phase)
    # an evaluation that is nothing but its step: no hook of the module's around it, and no torchmetrics object
    hooked = "on_validation_model_zero_grad" in worker_module.hooks or bool(metrics_of(module))
    if step is None or len(loaders) != 1 or hooked or not can_share(run.client, stage_of(step)):
        return None
    entries = [run.client.lifecycle.personal_entries(run.data.info(k), state) for k in group]
    try:
        return evaluate_side_by_side(run, phase, step, state, loaders[0], entries)
    except (LostWorkerError, Stopped):
        raise
    except Exception as error:  # an error of a client occurs again
        reason = with_location(error)
        run.trainer.warn(f"personalized models are evaluated sequentially, since side by side fails: {reason}")
    return None


@torch.no_grad()
def evaluate_side_by_side(
    run: Run, phase: str, step: str, state: State, loader: ClientLoader, own: Sequence[State]
) -> list[dict[str, float]]:
    """Return the metrics by tag of several models: the global ``state``, updated by ``own`` entries of each.

    Raises:
        VmapUnsupported: the step cannot be mapped. Other errors pass through.
    """
    client, worker_module, loaders = run.client, run.client.worker_module, run.loaders
    worker_module.load(state)
    worker_module.trainer_shim.evaluated_batches = [loaders.length(loader)]
    takes_index = is_param_in_hook_signature(getattr(client.module, step), "batch_idx", min_args=2)
    log = GroupLog(client.module, len(own), examples=None)
    names = dict.fromkeys(name for entries in own for name in entries)
    stacked: State = {}
    for name in names:
        values = [entries.get(name, state[name]).to(client.live[name]) for entries in own]
        stacked[name] = torch.stack(values)
    places, records = StateBinding(client.module, client.live), list[Record]()

    def mapped(batch: Any, index: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        log.begin_batch(batch)
        of_one = {**client.live, **dict(zip(stacked, tensors, strict=True))}
        with places.swapped(of_one) as rebound, loaders.fabric.autocast():
            worker_module.call(step, batch, *([index] if takes_index else []))
        if rebound:
            raise not_mappable(f"{step}: {next(iter(rebound))}", "the buffer gets a new tensor")
        records[:], logged = log.take_records()
        return (*logged, torch.zeros(()))

    with worker_module.evaluating(STAGES[phase]), worker_module.taps.recorded(False):
        before = worker_module.logged
        worker_module.log_into(log)
        try:
            for index, batch in loaders.share(loader, 0, 1):
                run.workers.check()
                with rng_scope(loaders.seed, phase, 0, index):
                    step_of_one = partial(mapped, loaders.to_device(batch, 0), index)
                    tensors = torch.vmap(step_of_one)(*stacked.values())
                log.add_records(slice(0, len(own)), records, iter(tensors))
        finally:
            worker_module.log_into(before)
    log.end_epoch()
    metrics = []
    for row in range(len(own)):
        logged = worker_module.begin_logging()
        log.fill(logged, row)
        values_of_row = logged.end_evaluation()
        metrics.append({tagged(phase, name): value for name, value in values_of_row.items()})
    return metrics
