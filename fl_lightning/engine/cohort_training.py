"""Draws the cohort of a round, trains its clients on the workers, and handles the clients that fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

from fl_lightning.aggregation import Totals, Update
from fl_lightning.aggregation.weighted import cloned
from fl_lightning.callbacks.base import Callback
from fl_lightning.distributed.workers import schedule
from fl_lightning.engine.evaluation.metric_states import VisitMetrics
from fl_lightning.engine.fingerprint import identity
from fl_lightning.engine.model_io import entries_of_module, state_of_data, storable
from fl_lightning.engine.run import Run
from fl_lightning.errors import ClientError, LostWorkerError, SharedStateError, UsageError, text_of, with_location
from fl_lightning.sampling import UniformSampler, size_of_cohort
from fl_lightning.storage.atomic_io import save
from fl_lightning.storage.checkpoint import FORMAT
from fl_lightning.systems import SystemOutcome
from fl_lightning.vectorized.group import Group, GroupMember
from fl_lightning.vectorized.grouping import cost, form_groups

# phases of local training
VISIT_PHASES = ("place", "load", "data", "forward_backward", "correct", "step", "collect", "wait")
# failures of a run whose visits are recorded: each file holds a model
MOST_RECORDED = 10


@dataclass
class Outcome:
    """The results of the visits on one worker, apart from their sums.

    Args:
        metrics: the torchmetrics objects that the visits have logged.
        counts: ``visits`` without failure; visits that ``stepped``, or that had no batch (``idle``); batches
            that the module ``skipped``, and steps that 16-mixed ``lost``.
        arrived: clients whose updates the server gets.
        rates: last learning rates of those that took a step.
        scalings: with 16-mixed, the gradient scales at the end of their visits.
        remembered: memories of the clients of the present group before it.
        errors: of the clients that failed.
    """

    metrics: VisitMetrics
    counts: Counter[str] = field(default_factory=Counter)
    arrived: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    scalings: list[tuple[float, int]] = field(default_factory=list)
    remembered: dict[int, dict] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def note_visit(self, k: int, steps: int, rate: float, skipped: int, idle: bool, arrived: bool = True) -> None:
        """Count the visit of client ``k``."""
        self.counts.update(visits=1, stepped=steps > 0, idle=idle, skipped=skipped)
        self.arrived += [k] * arrived
        self.rates += [rate] * (steps > 0 and arrived)


def draw_cohort(run: Run, round_: int) -> list[int]:
    """Draw the clients of a round from those that are present."""
    trainer, there = run.trainer, run.backend.present(run, round_)
    run.server.population = len(there) if type(trainer.sampler) is UniformSampler else 0
    if not there:
        return []
    size = min(size_of_cohort(len(there), trainer.participation, trainer.cohort_size), len(there))
    return [there[place] for place in trainer.sampler(run.seed, round_, len(there), size)]


def simulate_systems(run: Run, round_: int, chosen: list[int]) -> dict[int, SystemOutcome]:
    """Draw which clients of a cohort drop out or do less work, and log their numbers."""
    trainer = run.trainer
    if trainer.systems is None:
        return dict.fromkeys(chosen, SystemOutcome())
    simulated = trainer.systems.outcomes(run.seed, round_, chosen, trainer.local_steps or trainer.local_epochs)
    run.metrics.update({"clients/dropped": sum(one.lost is not None for one in simulated.values())})
    run.metrics.update({"clients/stragglers": sum(one.work is not None for one in simulated.values())})
    return simulated


def train_cohort(run: Run, round_: int, simulated: dict[int, SystemOutcome]) -> tuple[Totals, list[int]]:
    """Train the clients that are placed on this worker, and add up the updates of all workers.

    Returns:
        The sums, and the clients whose updates are in them.
    """
    totals, outcome = Totals(run.fabric.device), Outcome(VisitMetrics(run.client.module))
    run.stopwatch.reset()
    for group in place_cohort(run, simulated):
        run.workers.check()
        train = train_client if len(group) == 1 else train_group
        train(run, group, round_, simulated, totals, outcome)
        if outcome.errors and run.trainer.on_client_error == "raise":
            break
    arrived = share_outcome(run, round_, outcome)
    totals.all_reduce(run.workers)
    totals.merged = outcome.metrics.merged(run.workers)
    run.stopwatch.lap("wait")
    seconds = run.workers.gather(run.stopwatch.read())
    run.metrics.update({f"time/{p}": sum(s.get(p, 0.0) for s in seconds) / len(seconds) for p in VISIT_PHASES})
    return totals, arrived


def place_cohort(run: Run, simulated: dict[int, SystemOutcome]) -> list[list[int]]:
    """Place the cohort on the workers, send each client's memory along, and return the groups of this worker.

    They are in ascending order of their first clients.
    """
    memories = run.client.memories()
    steps = {k: run.local_training.steps(k, simulated[k].work) for k in run.server.cohort}
    groups = {group[0]: group for group in groups_of_cohort(run, steps)}
    of_groups = schedule(
        {first: cost(group, steps) for first, group in groups.items()}, run.workers.size, memories.owners
    )
    placed = [[k for first in firsts for k in groups[first]] for firsts in of_groups]
    if memories.owners:
        run.workers.barrier()  # a memory is sent when both sides are here
    memories.follow(placed, run.workers)
    for worker, clients in enumerate(placed if run.workers.size > 1 else ()):
        total = sum(steps[k] for k in clients)
        run.metrics.update({f"placed/{worker}/clients": len(clients), f"placed/{worker}/steps": total})
    run.stopwatch.lap("place")
    return [groups[first] for first in sorted(of_groups[run.workers.rank])]


def groups_of_cohort(run: Run, steps: dict[int, int]) -> list[list[int]]:
    """The groups of a cohort, by the expected local steps of its clients."""
    training, choice = run.local_training, run.local_training.choice
    return form_groups(steps, choice.least, choice.size, training.kind, choice.least > 2)


def train_client(
    run: Run, group: list[int], round_: int, simulated: dict[int, SystemOutcome], totals: Totals, outcome: Outcome
) -> None:
    """Train the only client of a group, and add its update."""
    (k,) = group
    with isolate_failure(run, k, outcome), run.client.memories().visit(k):
        update = run.local_training.visit(k, round_, run.server.state, simulated[k].work)
        add_update(run, k, round_, simulated[k], update, totals, outcome)


def train_group(
    run: Run, group: list[int], round_: int, simulated: dict[int, SystemOutcome], totals: Totals, outcome: Outcome
) -> None:
    """Train clients side by side, and add their updates; the failure of one does not touch the others."""
    memories = run.client.memories()
    # a visit can be repeated in its group alone, so its record holds the memories of all
    outcome.remembered = {k: memories.get(k, {}) for k in group}
    visits, why = side_by_side(run, group, round_, simulated), ""
    with ExitStack() as stack:
        stack.callback(memories.drop_all, group)
        try:
            stack.enter_context(visits.training_all())
        except LostWorkerError:
            raise
        except (ClientError, UsageError) as error:
            why = with_location(error.__cause__ or error)  # each reason is shown once
        if why:  # training in turn shows which client failed, if one did, once the group's memory is free
            del visits
            memories.drop_all(group)
            run.trainer.warn(f"clients that cannot train side by side are trained sequentially: {why}")
            outcome.remembered = {}
            for k in group:
                if not outcome.errors or run.trainer.on_client_error == "skip":
                    train_client(run, [k], round_, simulated, totals, outcome)
            return
        done = set[int]()
        if visits.sends_states_alone() and not is_watched(run) and all(simulated[k].lost is None for k in group):
            rows, updates, extremes = visits.updates()
            if rows:
                totals.add_rows(updates, extremes)
            for row in rows:
                k, steps, rate = group[row], int(visits.num_steps[row]), float(visits.lr[row])
                memories.commit_visit(k)
                outcome.note_visit(k, steps, rate, int(visits.num_skipped[row]), run.local_training.batches(k) == 0)
            done = {*rows}
        for row, k in enumerate(group):
            if row not in done:
                with isolate_failure(run, k, outcome), memories.visit(k):
                    add_update(run, k, round_, simulated[k], visits.update(row), totals, outcome)


def side_by_side(run: Run, group: list[int], round_: int, simulated: dict[int, SystemOutcome]) -> Group:
    """The visits of the clients of a group."""
    return Group(run.local_training, [GroupMember(k, simulated[k].work) for k in group], round_, run.server.state)


def add_update(
    run: Run, k: int, round_: int, simulated: SystemOutcome, update: Update, totals: Totals, outcome: Outcome
) -> None:
    """Show a client that has trained to the callbacks, and add its update, unless it is lost or took no step."""
    client = run.client
    arrives = simulated.lost is None and client.num_steps > 0
    if arrives:
        if is_watched(run):
            if client.has_large_model:
                # callbacks may load another state into the module, from which lazy values would then be computed
                update = replace(update, delta=dict(update.delta), payload=cloned(update.payload))
            show_client(run, k, round_)
        try:
            totals.add(update)
        except ArithmeticError as error:
            raise ClientError(f"client {k}, round {round_}: {error}") from error
        outcome.metrics.add(k, client.visit.logged)
    else:
        client.memories().drop(k)
    outcome.counts.update(lost=client.visit.num_lost)
    outcome.scalings += client.visit.scalings if simulated.lost is None else []
    idle = run.local_training.batches(k) == 0
    outcome.note_visit(k, client.num_steps, client.lr, client.visit.num_skipped, idle, arrives)


def is_watched(run: Run) -> bool:
    """Whether a callback is to see each client that has trained."""
    hooks = (getattr(callback.on_client_end, "__func__", None) for callback in run.callbacks)
    return any(hook is not Callback.on_client_end for hook in hooks)


def show_client(run: Run, k: int, round_: int) -> None:
    """Show the callbacks a client that has trained; where the run skips clients that fail, an error is the client's."""
    try:
        with run.workers.local_only():
            run.call("on_client_end", client=run.client)
    except (ClientError, UsageError):
        raise
    except Exception as error:
        if run.trainer.on_client_error == "raise":
            raise
        raise ClientError(f"client {k}, round {round_}: a callback's on_client_end: {with_location(error)}") from error


@contextmanager
def isolate_failure(run: Run, k: int, outcome: Outcome) -> Iterator[None]:
    """In this block a failure is one of client ``k``; neither the sums nor its memory may have changed before it."""
    try:
        yield
    except LostWorkerError:
        raise
    except (ClientError, UsageError) as error:
        outcome.errors[k] = error
        record_failure(run, k, error, outcome.remembered if k in outcome.remembered else {})
        # it may have changed the state of later clients, and a full memory is not the client's fault
        cause = error.__cause__
        full = isinstance(cause, (MemoryError, torch.OutOfMemoryError))
        full = full or (isinstance(cause, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(cause))
        if (full or isinstance(error, SharedStateError)) and run.trainer.on_client_error != "raise":
            raise


def record_path(run: Run, k: int) -> Path | None:
    """The file that records a visit of client ``k`` in the present round; None where the run writes nothing."""
    folder = run.folder.shared
    return None if folder is None else folder / "failures" / f"round-{run.server.round}-client-{k}.pt"


def record_failure(run: Run, k: int, error: Exception, group: dict[int, dict]) -> None:
    """Write all that ``replay`` needs, apart from config and data, to repeat the visit of a client that has failed.

    ``group`` has the memories of the clients that trained side by side with it. Only the first :data:`MOST_RECORDED`
    failures of a run are recorded.
    """
    path = record_path(run, k)
    if path is None or len(list(path.parent.glob("*.pt"))) >= MOST_RECORDED:
        return
    server, client = run.server, run.client
    try:
        term, step = client.worker_module.logged.first_nonfinite_term() or (None, client.num_steps)
        record = {
            "failure": {"round": server.round, "client": k, "error": str(error), "term": term, "step": step},
            "state_dict": server.state,
            "cohort": server.cohort,
            "memory": group.get(k) or client.memories().get(k, {}),
            "memories": {other: memory for other, memory in group.items() if memory},
            "methods": run.methods.state_dict(),
            "module": storable(entries_of_module(run)),
            "datamodule": state_of_data(run.data),
            "client_schedulers": run.local_training.monitored.state_dict(),
            "scaling": run.local_training.scaling,
            "evaluated": client.worker_module.evaluated,
            "format": FORMAT,
            **identity(run),
        }
        save(record, path)
    except Exception as problem:  # the user has to see the failure itself
        run.trainer.warn(f"{path} could not be written: {text_of(problem)}")


def share_outcome(run: Run, round_: int, outcome: Outcome) -> list[int]:
    """Share the failed clients, the measurements and the owners of memories with the other workers.

    The mean of the clients' last learning rates is logged as ``lr``. A round whose clients have all dropped out, or
    have no batch, does not change the global model.

    Returns:
        The clients whose updates the server gets, in ascending order.

    Raises:
        ClientError: a client failed and must not be skipped, too few clients remain, or no client took a local step
            despite having batches.
    """
    training, memories = run.local_training, run.client.memories()
    failures = {k: (isinstance(error, UsageError), str(error)) for k, error in outcome.errors.items()}
    # clients without memory have no owner: a run whose methods keep no memories moves nothing
    owned = memories.owned(run.server.cohort)
    of_visits = (dict(outcome.counts), outcome.arrived, outcome.rates, outcome.scalings)
    shared = run.workers.gather((failures, owned, run.metrics.current, *of_visits))
    all_failures, all_owned, metrics, all_counts, all_arrived, all_rates, scalings = zip(*shared, strict=True)
    memories.note_owners([*all_owned])
    for measured in metrics:
        run.metrics.fill(measured)
    failed = {k: failure for some in all_failures for k, failure in some.items()}
    counts = sum(map(Counter, all_counts), Counter[str]())
    arrived, rates = sorted(chain(*all_arrived)), [*chain(*all_rates)]
    training.scaling = scaling = min(chain(*scalings), default=training.scaling)
    if rates:
        # rounded once, so that it does not depend on the order
        run.metrics.update({"lr": math.fsum(rates) / len(rates)})
    for tag, kind in (("batches/skipped", "skipped"), ("steps/lost", "lost")):
        if counts[kind]:
            run.metrics.update({tag: counts[kind]})
    if failed:
        handle_failures(run, failed, outcome.errors, len(arrived))
    idle = counts["visits"] == counts["idle"] and not failed
    # a smaller scale helps, down to the scale 1
    if not (idle or counts["stepped"] or (counts["lost"] and scaling is not None and scaling[0] >= 1)):
        model = type(run.client.module).__name__
        why = f"the hooks of {model} left out every batch"
        if counts["skipped"]:
            hint = "change data.batch_size or the model"
            why = f"{model}.training_step returned no loss for all {counts['skipped']} batches; {hint}"
        if counts["lost"]:
            hint = "whatever scale 16-mixed gives them; give trainer.precision=bf16-mixed or 32-true"
            why = f"the gradients of {model} overflow in all {counts['lost']} steps, {hint}"
        raise ClientError(f"round {round_}: no client took a local step: {failed[max(failed)][1] if failed else why}")
    if not arrived:
        run.trainer.warn(f"round {round_}: no update arrives, and the global model does not change")
    return arrived


def handle_failures(run: Run, failed: dict[int, tuple[bool, str]], errors: dict[int, Exception], left: int) -> None:
    """Warn of the clients that failed, and continue with the others where the trainer's arguments allow it.

    Args:
        run: the run.
        failed: of each of them, on any worker, whether its error is a UsageError, and the text of the error.
        errors: of those that failed on this worker; another error has no cause and no traceback.
        left: the number of the others.
    """
    trainer = run.trainer
    if trainer.on_client_error == "raise":
        k, (usage, text) = min(failed.items())
        error = errors.get(k) or (UsageError(text) if usage else ClientError(text))
        path = record_path(run, k)
        if isinstance(error, ClientError) and path is not None and path.is_file():
            error.record = path
        raise error
    texts = [text for _, (_, text) in sorted(failed.items())]
    for text in texts:
        trainer.warn(f"skipped: {text}")
    run.metrics.update({"clients/failed": len(failed)})
    if left < trainer.min_clients:
        raise ClientError(f"trainer.min_clients={trainer.min_clients}, but only {left} clients are left: {texts[-1]}")
