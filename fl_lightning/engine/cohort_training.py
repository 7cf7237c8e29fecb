"""Plans a round, trains its clients on the workers, and handles the clients that fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.core.clock import ServerStep, in_microseconds
from fl_lightning.core.sampling import UniformSampler
from fl_lightning.core.state import clone, select
from fl_lightning.core.systems import SystemOutcome
from fl_lightning.core.update import CohortMeans, Totals, Update, UpdateRows, VisitFacts
from fl_lightning.core.updates import ClientUpdate, Updates
from fl_lightning.core.weighted import LazyDifference, cloned
from fl_lightning.distributed.workers import schedule
from fl_lightning.engine.evaluation.metric_states import VisitMetrics
from fl_lightning.engine.run import Part, Run
from fl_lightning.engine.run_state import recorded_state
from fl_lightning.engine.update_codec import broadcast_bytes
from fl_lightning.storage.atomic_io import save
from fl_lightning.storage.checkpoint import FORMAT
from fl_lightning.training.local_training import PARTS_OF_STEP
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import (
    ClientError,
    LostWorkerError,
    SharedStateError,
    UsageError,
    text_of,
    with_location,
)

# phases of local training
VISIT_PHASES = ("place", "load", "data", "forward_backward", "correct", "step", "collect", "wait")
# server steps of an asynchronous run that are drawn before round 0
CHECKED = 100
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
        errors: of the clients that failed.
        updates: one by one, where a method's server hooks see them.
    """

    metrics: VisitMetrics
    counts: Counter[str] = field(default_factory=Counter)
    arrived: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    scalings: list[tuple[float, int]] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    updates: dict[int, ClientUpdate] = field(default_factory=dict)

    def note_visit(self, k: int, facts: VisitFacts, idle: bool, drops_out: bool = False) -> None:
        """Count the visit of client ``k``, whose update the server gets if it took a step and does not drop out."""
        self.counts.update(visits=1, stepped=facts.steps > 0, idle=idle, skipped=facts.skipped, lost=facts.lost)
        if not drops_out:
            self.scalings += facts.scalings
            if facts.steps:
                self.arrived.append(k)
                self.rates.append(facts.rate)


@dataclass(frozen=True)
class RoundPlan:
    """What is known of a round before its training.

    Args:
        systems: the outcomes of its clients, by id.
        step: of an asynchronous server, its step.
    """

    systems: dict[int, SystemOutcome]
    step: ServerStep | None = None

    @property
    def cohort(self) -> list[int]:
        """The clients that train."""
        return [k for k, system in self.systems.items() if system.lost != "before"]


def plan_round(run: Run, round_: int) -> RoundPlan:
    """Draw the clients of a round, and which of them drop out, do less work or miss the deadline.

    An asynchronous server uses the visits of its step.
    """
    trainer, clock = run.trainer, run.trainer.clock
    if trainer.asynchronous is not None:
        step = run.versions.step(round_)
        work = {visit.client: visit.work for visit in step.visits}
        return RoundPlan({k: SystemOutcome(work[k]) for k in sorted(work)}, step)
    available, clients = run.backend.present(run, round_), list[int]()
    number = len(available)
    run.server.population = number if type(trainer.sampler) is UniformSampler else 0
    if number:
        size = min(trainer.nominal_cohort(number), number)
        clients = [available[place] for place in trainer.sampler(run.seed, round_, number, size)]
    systems = dict.fromkeys(clients, SystemOutcome())
    if trainer.systems is not None:
        systems = trainer.systems.outcomes(run.seed, round_, clients, trainer.local_steps or trainer.local_epochs)
    if clock is not None and clock.deadline is not None:
        for k, duration in visit_durations(run, round_, RoundPlan(systems)).items():
            if duration > in_microseconds(clock.deadline):
                systems[k] = replace(systems[k], lost="late")
    return RoundPlan(systems)


def visit_durations(run: Run, round_: int, plan: RoundPlan) -> dict[int, int]:
    """Return the simulated microseconds of each client that trains in a round, which sends as much as it receives."""
    clock, sizes, durations = run.trainer.clock, broadcast_bytes(run, plan.cohort), {}
    assert clock is not None
    for k in plan.cohort:
        steps = run.local_training.steps(k, plan.systems[k].work)
        durations[k] = clock.duration(run.seed, k, round_, steps, 2 * sizes[k])
    return durations


def end_of_round(run: Run, round_: int, plan: RoundPlan) -> int:
    """Return the simulated microseconds at which a round ends; the round before has ended at the server's time.

    A synchronous round takes as long as its slowest client, and at most until the deadline.
    """
    if plan.step is not None:
        return plan.step.time
    deadline = run.trainer.clock.deadline if run.trainer.clock is not None else None
    longest = max(visit_durations(run, round_, plan).values(), default=0)
    return run.server.microseconds + int(min(longest, in_microseconds(deadline)))


def is_over(run: Run, round_: int) -> bool:
    """Whether the run ends before this round, since it has all its rounds, or this one ends too late."""
    limit = run.trainer.max_seconds
    if round_ >= run.trainer.max_rounds or limit is None:
        return round_ >= run.trainer.max_rounds
    return end_of_round(run, round_, plan_round(run, round_)) > in_microseconds(limit)


def planned_rounds(run: Run, first: int) -> int:
    """The number of rounds of a run that goes on with the round ``first``, by the present sizes of what travels."""
    if run.trainer.max_seconds is None:
        return run.trainer.max_rounds
    number = first
    with patched(run.server, microseconds=run.server.microseconds):
        while not is_over(run, number):
            run.server.microseconds = end_of_round(run, number, plan_round(run, number))
            number += 1
    return number


def log_plan(run: Run, round_: int, plan: RoundPlan) -> None:
    """Log how many clients of a cohort drop out, do less work or miss the deadline, and how stale their states are."""
    trainer, step = run.trainer, plan.step
    numbers = Counter(system.lost for system in plan.systems.values())
    dropped = numbers["before"] + numbers["after"]
    if step is not None:
        dropped, staleness = step.num_lost, [round_ - visit.version for visit in step.visits]
        of_visits = {"staleness/mean": math.fsum(staleness) / len(staleness), "staleness/max": max(staleness)}
        run.metrics.update({**of_visits, "clients/in_flight": len(step.in_flight)})
    if trainer.systems is not None:
        stragglers = sum(system.work is not None for system in plan.systems.values())
        run.metrics.update({"clients/dropped": dropped, "clients/stragglers": stragglers})
    if trainer.clock is not None and trainer.clock.deadline is not None:
        run.metrics.update({"clients/late": numbers["late"]})


def follow_schedule(run: Run) -> None:
    """Let an asynchronous run follow its schedule, in which clients without a batch have no visits.

    Raises:
        UsageError: too few clients are available.
    """
    trainer, training = run.trainer, run.local_training
    clock, asynchronous, systems = trainer.clock, trainer.asynchronous, trainer.systems
    if clock is None or asynchronous is None:
        return
    clients, full_work = [*range(run.data.num_clients)], trainer.local_steps or trainer.local_epochs
    sizes = broadcast_bytes(run, clients)

    def plan_visit(k: int, visit: int, start: int) -> tuple[int, SystemOutcome]:
        outcome = SystemOutcome()
        if systems is not None:  # the share of stragglers is that of all clients at this start
            outcome = systems.outcomes(run.seed, start, clients, full_work)[k]
        steps = training.steps(k, outcome.work)
        return clock.duration(run.seed, k, visit, steps, 2 * sizes[k]), outcome

    def present(version: int) -> list[int]:
        return [k for k in run.backend.present(run, version) if training.num_batches(k)]

    run.versions.schedule = asynchronous.schedule(run.seed, trainer.sampler, plan_visit, present)
    if trainer.max_rounds:
        run.versions.step(min(trainer.max_rounds, CHECKED) - 1)  # refuses too few clients


def train_cohort(run: Run, round_: int, simulated: dict[int, SystemOutcome]) -> tuple[CohortMeans, list[int]]:
    """Train the clients that are placed on this worker, and add up the updates of all workers.

    Returns:
        The means, and the clients whose updates are in them.
    """
    totals, outcome = Totals(run.fabric.device), Outcome(VisitMetrics(run.client.module))
    run.stopwatch.reset()
    work = {k: system.work for k, system in simulated.items()}
    for part in place_cohort(run, simulated):
        run.workers.check()
        observed = is_watched(run) or any(simulated[k].lost is not None for k in part)
        observed |= bool(run.methods.seeing_updates)
        for result in run.runner.run(run, part, round_, work, observed):
            if isinstance(result, UpdateRows):
                add_rows(run, result, totals, outcome)
            else:
                add_result(run, round_, simulated, result, totals, outcome)
            number = len(result.clients) if isinstance(result, UpdateRows) else 1
            del result  # before the next client trains, since an update is as large as a model
            run.call("on_visits_end", number=number)
        if outcome.errors and run.trainer.on_client_error == "raise":
            break
    arrived = share_outcome(run, round_, outcome)
    totals.all_reduce(run.workers)
    means = totals.close()
    means.updates = shared_updates(run, outcome)
    of_objects = outcome.metrics.merged(run.workers)
    counted = {f"{name}/clients" for name in of_objects}
    logged = {**means.logged, **of_objects}
    means.logged = {name: value for name, value in logged.items() if name not in counted}
    run.stopwatch.lap("wait")
    seconds_of_workers = run.workers.gather(run.stopwatch.read(), "seconds of a cohort")
    for phase in VISIT_PHASES:
        if not (run.stopwatch.events and phase in PARTS_OF_STEP):
            seconds = [worker_seconds.get(phase, 0.0) for worker_seconds in seconds_of_workers]
            run.metrics.update({f"time/{phase}": sum(seconds) / len(seconds)})
    return means, arrived


def place_cohort(run: Run, simulated: dict[int, SystemOutcome]) -> list[Part]:
    """Place the cohort on the workers, send each client's memory along, and return the parts of this worker.

    They are in ascending order of their first clients.
    """
    memories = run.client.memories()
    steps = {k: run.local_training.steps(k, simulated[k].work) for k in run.server.cohort}
    costs = run.runner.divide(run, steps)
    parts = {part[0]: part for part in costs}
    costs_by_head = {part[0]: cost for part, cost in costs.items()}
    heads_of_workers = schedule(costs_by_head, run.workers.size, memories.owners)
    placed = [[k for head in heads for k in parts[head]] for heads in heads_of_workers]
    if memories.owners:
        run.workers.barrier()  # a memory is sent when both sides are here
    memories.follow(placed, run.workers)
    for worker, clients in enumerate(placed if run.workers.size > 1 else ()):
        total = sum(steps[k] for k in clients)
        run.metrics.update({f"placed/{worker}/clients": len(clients), f"placed/{worker}/steps": total})
    run.stopwatch.lap("place")
    return [parts[head] for head in sorted(heads_of_workers[run.workers.rank])]


def add_rows(run: Run, rows: UpdateRows, totals: Totals, outcome: Outcome) -> None:
    """Add the updates of clients that nothing observes one by one."""
    if rows.clients:
        totals.add_rows(rows)
    for k, facts in zip(rows.clients, rows.facts, strict=True):
        run.client.memories().commit_visit(k)
        outcome.note_visit(k, facts, run.local_training.num_batches(k) == 0)


def add_result(
    run: Run,
    round_: int,
    simulated: dict[int, SystemOutcome],
    result: tuple[int, Update | Exception],
    totals: Totals,
    outcome: Outcome,
) -> None:
    """Add the update of a client, or note its failure, before which neither the sums nor its memory have changed."""
    k, update = result
    try:
        with run.client.memories().committing(k):
            if isinstance(update, Exception):
                raise update
            add_update(run, k, round_, simulated[k], update, totals, outcome)
    except LostWorkerError:
        raise
    except (ClientError, UsageError) as error:
        outcome.errors[k] = error
        record_failure(run, k, error)
        # it may have changed the state of later clients, and a full memory is not the client's fault
        cause = error.__cause__
        full = isinstance(cause, (MemoryError, torch.OutOfMemoryError))
        full = full or (isinstance(cause, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(cause))
        if (full or isinstance(error, SharedStateError)) and run.trainer.on_client_error != "raise":
            raise


def add_update(
    run: Run, k: int, round_: int, simulated: SystemOutcome, update: Update, totals: Totals, outcome: Outcome
) -> None:
    """Show a client that has trained to the callbacks, and add its update, unless it is lost or took no step."""
    client, drops_out = run.client, simulated.lost is not None
    if update.facts.steps and not drops_out:
        single = single_update(run, update) if run.methods.seeing_updates else None
        if single is not None:
            update = replace(update, delta={})  # its sum is not needed
        if is_watched(run):
            if client.has_large_model:
                # callbacks may load another state into the module, from which lazy values would then be computed
                update = replace(update, delta=dict(update.delta), payload=cloned(update.payload))
            show_client(run, k, round_)
        try:
            totals.add(update)
        except ArithmeticError as error:
            raise ClientError(f"client {k}, round {round_}: {error}") from error
        if single is not None:
            outcome.updates[k] = single
        outcome.metrics.add(k, update.metric_states)
    else:
        client.memories().drop(k)
    outcome.note_visit(k, update.facts, run.local_training.num_batches(k) == 0, drops_out)


def single_update(run: Run, update: Update) -> ClientUpdate:
    """The update of the client in the module, in tensors of its own, with payloads by the names of the methods.

    Parameters keep their type, and the change is computed when it is read, unless a method has transformed it.
    """
    client, methods, state = run.client, run.methods, run.server.state
    change: Mapping[str, Tensor] = LazyDifference(clone(select(client.live, client.sent)), client.received, client.sent)
    if methods.overriding("transform_client_update"):
        change = clone(update.delta)
    replaced = [name for name in client.sent if client.received[name] is not state[name]]
    payload = {m.name: cloned(update.payload.get(m.name, {})) for m in methods.seeing_updates}
    facts = float(update.weight), client.info.num_examples, update.facts.steps, client.staleness
    return ClientUpdate(client.info.id, *facts, change, update.others, select(client.received, replaced), payload)


def shared_updates(run: Run, outcome: Outcome) -> Updates | None:
    """Return the updates one by one, where a method's server hooks see them; all workers call this."""
    if not run.methods.seeing_updates:
        return None
    client, state = run.client, run.server.state
    buffers = [name for name in client.sent_others if state[name].is_floating_point()]
    return Updates(outcome.updates, state, client.sent, buffers, run.workers, run.fabric.device)


def is_watched(run: Run) -> bool:
    """Whether a callback is to see each client that has trained."""
    return any(callback.needs_client_access for callback in run.callbacks)


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


def record_path(run: Run, k: int) -> Path | None:
    """The file that records a visit of client ``k`` in the present round; None where the run writes nothing."""
    folder = run.folder.shared
    return None if folder is None else folder / "failures" / f"round-{run.server.round}-client-{k}.pt"


def record_failure(run: Run, k: int, error: Exception) -> None:
    """Write all that ``replay`` needs, apart from config and data, to repeat the visit of a client that has failed.

    Only the first :data:`MOST_RECORDED` failures of a run are recorded.
    """
    path = record_path(run, k)
    if path is None or len(list(path.parent.glob("*.pt"))) >= MOST_RECORDED:
        return
    server, client, beside = run.server, run.client, run.runner.beside(k)
    try:
        term, step = client.worker_module.logged.first_nonfinite_term() or (None, client.num_steps)
        record = {
            "failure": {"round": server.round, "client": k, "error": str(error), "term": term, "step": step},
            "state_dict": server.state,
            "cohort": server.cohort,
            "memory": beside.get(k) or client.memories().get(k, {}),
            "memories": {neighbour: memory for neighbour, memory in beside.items() if memory},
            "format": FORMAT,
            **recorded_state(run),
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
    errors = outcome.errors
    failures = {k: (isinstance(error, UsageError), str(error)) for k, error in errors.items()}
    # clients without memory have no owner: a run whose methods keep no memories moves nothing
    owned = memories.keys() & {*run.server.cohort}
    of_visits = (dict(outcome.counts), outcome.arrived, outcome.rates, outcome.scalings)
    shared = run.workers.gather((failures, owned, run.metrics.current, *of_visits), "outcome of a cohort")
    all_failures, all_owned, metrics, all_counts, all_arrived, all_rates, scalings = zip(*shared, strict=True)
    memories.owners |= {k: rank for rank, clients in enumerate(all_owned) for k in clients}
    for measured in metrics:
        run.metrics.current = {**measured, **run.metrics.current}
    failed = dict(chain.from_iterable(failures_of_worker.items() for failures_of_worker in all_failures))
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
        handle_failures(run, failed, errors, len(arrived))
    idle = counts["visits"] == counts["idle"] and not (failed and run.trainer.min_clients)
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
    module = run.client.module
    skips = counts["skipped"] and not hasattr(module, "min_batch_size")  # which says that it skips some
    if skips and not any("batches/skipped" in row for row in run.metrics.history):
        text = "training_step returns None, which skips the batch; batches/skipped counts these batches"
        run.trainer.warn(f"model={type(module).__name__}: {text}")
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
        raise ClientError(f"trainer.min_clients={trainer.min_clients}, but {left} of the cohort remain: {texts[-1]}")
