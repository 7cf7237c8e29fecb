"""The rounds of a run, and the clients that fail in them."""

from __future__ import annotations

import math
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fl_lightning.callbacks.base import Callback
from fl_lightning.client.client import RECALIBRATES
from fl_lightning.distributed.workers import schedule
from fl_lightning.engine.evaluation.evaluator import PHASES
from fl_lightning.engine.evaluation.metric_states import VisitMetrics
from fl_lightning.engine.fingerprint import identity
from fl_lightning.engine.groups.forming import cost, form_groups
from fl_lightning.engine.groups.group import Group, Member
from fl_lightning.engine.groups.own_models import groups_of_own_models, metrics_of_own_models
from fl_lightning.engine.model_files import entries_of_module, state_of_data, storable
from fl_lightning.engine.run import Run
from fl_lightning.engine.sent import sent_down
from fl_lightning.errors import ClientError, LostWorkerError, SharedStateError, UsageError, add_note, located, text_of
from fl_lightning.records.summary import tagged
from fl_lightning.sampling import UniformSampler, size_of_cohort
from fl_lightning.state import State, checksums, norm, num_bytes, select
from fl_lightning.storage.atomic_io import save
from fl_lightning.storage.checkpoint import FORMAT
from fl_lightning.sums import Totals, Update
from fl_lightning.systems import Fate

# phases that the stopwatch of local training measures, beside those that :func:`play_round` times
VISIT_PHASES = ("place", "load", "data", "forward_backward", "correct", "step", "collect", "wait")


# failures of a run whose visits are recorded: each file holds a model
MOST_RECORDED = 10


@dataclass
class Outcome:
    """What the visits on one worker came to.

    Args:
        metrics: the torchmetrics objects that the visits on this worker have logged.
        counts: how many ``visits`` there were, but for those that failed; how many of them ``stepped`` at all, or were
            ``idle`` since they had no batch; batches that the module ``skipped``, and steps that 16-mixed ``lost``.
        arrived: clients whose updates the server gets.
        rates: last learning rate of each client that took a step and sent its update.
        scalings: with 16-mixed, the gradient scales at the end of the visits whose updates the server gets.
        remembered: what the clients of the present group remembered before it.
        errors: of the clients that failed.
    """

    metrics: VisitMetrics
    counts: Counter[str] = field(default_factory=Counter)
    arrived: list[int] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)
    scalings: list[tuple[float, int]] = field(default_factory=list)
    remembered: dict[int, dict] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)


class ClientsOnWorkers:
    """The clients of a run are trained by the workers of this program."""

    def present(self, run: Run, round_: int) -> Sequence[int]:
        """All clients, but for those that ``trainer.systems`` has absent."""
        number, systems = run.data.num_clients, run.trainer.systems
        return range(number) if systems is None else systems.present(round_, number)

    def train(self, run: Run, round_: int, fates: dict[int, Fate]) -> tuple[Totals, list[int]]:
        """Train the clients that are placed on this worker, and add up what the clients of all workers send."""
        return train_cohort(run, round_, fates)

    def evaluate(self, run: Run) -> None:
        """Evaluate on the workers."""
        evaluate(run)


def play_round(run: Run, round_: int) -> bool:
    """Broadcast, train the cohort, aggregate, step the server, evaluate, log; returns whether the round is the last."""
    run.metrics.begin(round_)
    fates = draw_fates(run, round_, cohort(run, round_))
    run.server.begin_round(round_, [k for k, fate in fates.items() if fate.lost != "before"])
    run.resident.begin_round(round_)
    run.workers.begin(round_)
    run.methods.on_round_start(run.server)
    run.call("on_round_start")
    with run.metrics.timed("train"):
        totals, arrived = run.clients.train(run, round_, fates)
    run.workers.signals.keeps_round = True  # what is left is short beside the training
    run.client.end_round()
    with run.metrics.timed("server"):
        aggregate(run, totals)
    if arrived and run.trainer.buffers in RECALIBRATES:
        with run.metrics.timed("recalibrate"):
            recalibrate(run, arrived)
    due = (round_ + 1) % run.trainer.eval_every_n_rounds == 0 or round_ + 1 == run.trainer.max_rounds
    evaluated = due or any(callback.wants_evaluation(round_) for callback in run.callbacks)
    if evaluated:
        run.clients.evaluate(run)
    # the schedulers that watch a metric
    run.local_training.monitored.after_round(round_, run.metrics.current, evaluated)
    with run.metrics.timed("log"):
        run.call("on_round_end")
    last = agree_to_stop(run) or round_ + 1 == run.trainer.max_rounds
    if last:
        if not evaluated:  # a callback, or a signal, has ended the run
            run.clients.evaluate(run)
        run.call("on_last_round_end")
    check_metrics(run, run.metrics.current, f"round {round_}")
    run.metrics.end()
    with run.metrics.timed_writing():
        run.folder.log(run.metrics.current, round_)
    return last


def cohort(run: Run, round_: int) -> list[int]:
    """Draw the clients of a round, from those that are there."""
    trainer, there = run.trainer, run.clients.present(run, round_)
    run.server.population = len(there) if type(trainer.sampler) is UniformSampler else 0
    if not there:
        return []
    size = min(size_of_cohort(len(there), trainer.participation, trainer.cohort_size), len(there))
    return [there[place] for place in trainer.sampler(run.seed, round_, len(there), size)]


def draw_fates(run: Run, round_: int, chosen: list[int]) -> dict[int, Fate]:
    """What befalls the clients of a cohort beside training, and how many of them drop out."""
    trainer = run.trainer
    if trainer.systems is None:
        return dict.fromkeys(chosen, Fate())
    fates = trainer.systems.fates(run.seed, round_, chosen, trainer.local_steps or trainer.local_epochs)
    late = sum(fate.work is not None for fate in fates.values())
    run.metrics.update({"clients/dropped": sum(fate.lost is not None for fate in fates.values())})
    run.metrics.update({"clients/stragglers": late})
    return fates


def train_cohort(run: Run, round_: int, fates: dict[int, Fate]) -> tuple[Totals, list[int]]:
    """Train the clients that are placed on this worker, and add up what the clients of all workers send.

    Returns:
        The sums, and the clients whose updates are in them.
    """
    totals, outcome = Totals(run.fabric.device), Outcome(VisitMetrics(run.client.module))
    run.stopwatch.reset()
    for group in place_cohort(run, fates):
        run.workers.check()
        train = train_client if len(group) == 1 else train_group
        train(run, group, round_, fates, totals, outcome)
        if outcome.errors and run.trainer.on_client_error == "raise":
            break
    arrived = share_outcome(run, round_, outcome)
    totals.all_reduce(run.workers)
    totals.merged = outcome.metrics.merged(run.workers)
    run.stopwatch.lap("wait")
    seconds = run.workers.gather(dict(run.stopwatch.seconds))
    run.metrics.update({f"time/{p}": sum(s.get(p, 0.0) for s in seconds) / len(seconds) for p in VISIT_PHASES})
    return totals, arrived


def train_client(
    run: Run, group: list[int], round_: int, fates: dict[int, Fate], totals: Totals, outcome: Outcome
) -> None:
    """Train the only client of a group, and add what it sends."""
    (k,) = group
    with failing_alone(run, k, outcome), run.client.memories().visit(k):
        update = run.local_training.visit(k, round_, run.server.state, fates[k].work)
        add_update(run, k, round_, fates[k], update, totals, outcome)


def train_group(
    run: Run, group: list[int], round_: int, fates: dict[int, Fate], totals: Totals, outcome: Outcome
) -> None:
    """Train clients side by side, and add what they send; the failure of one leaves the others as they are."""
    memories = run.client.memories()
    # a visit can be repeated in its group alone; that of a client that fails is recorded with what all remembered
    outcome.remembered = {k: memories.get(k, {}) for k in group}
    visits, why = side_by_side(run, group, round_, fates), ""
    with ExitStack() as stack:
        stack.callback(memories.drop_all, group)
        try:
            stack.enter_context(visits.training_all())
        except LostWorkerError:
            raise
        except (ClientError, UsageError) as error:
            why = located(error.__cause__ or error)  # each reason is shown once
        if why:  # which client failed, if it is one, is found one by one, once the group's memory is free
            del visits
            memories.drop_all(group)
            run.trainer.warn(f"clients that cannot train side by side are trained one by one: {why}")
            outcome.remembered = {}
            for k in group:
                if not outcome.errors or run.trainer.on_client_error == "skip":
                    train_client(run, [k], round_, fates, totals, outcome)
            return
        done = add_updates(run, group, visits, totals, outcome) if all(fates[k].lost is None for k in group) else set()
        for row, k in enumerate(group):
            if row not in done:
                with failing_alone(run, k, outcome), memories.visit(k):
                    add_update(run, k, round_, fates[k], visits.update(row), totals, outcome)


def add_updates(run: Run, group: list[int], visits: Group, totals: Totals, outcome: Outcome) -> set[int]:
    """Add at once what clients send of which no hook wants to see more; returns their rows in the group."""
    if not visits.sends_states_alone() or is_watched(run):
        return set()
    rows, updates, extremes = visits.updates()
    if rows:
        totals.add_rows(updates, extremes)
    for row in rows:
        run.client.memories().settle(group[row])
        counts = int(visits.num_steps[row]), float(visits.lr[row]), int(visits.num_skipped[row])
        note_visit(run, group[row], *counts, outcome)
    return {*rows}


def side_by_side(run: Run, group: list[int], round_: int, fates: dict[int, Fate]) -> Group:
    """The visits of the clients of a group."""
    members = [Member(k, fates[k].work) for k in group]
    return Group(run.local_training, members, round_, run.server.state)


@contextmanager
def failing_alone(run: Run, k: int, outcome: Outcome) -> Iterator[None]:
    """In this block a failure is that of client ``k``; neither the sums nor its memory may have changed before it."""
    try:
        yield
    except LostWorkerError:
        raise
    except (ClientError, UsageError) as error:
        note_failure(run, k, error, outcome)


def note_failure(run: Run, k: int, error: Exception, outcome: Outcome) -> None:
    """Record that client ``k`` failed."""
    outcome.errors[k] = error
    record_failure(run, k, error, outcome.remembered if k in outcome.remembered else {})
    # later clients would begin with what it has written; and it is not the client that lacks memory
    lasting = isinstance(error, SharedStateError) or is_out_of_memory(error.__cause__)
    if lasting and run.trainer.on_client_error != "raise":
        raise error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that the memory of a GPU, or of the machine, is used up."""
    of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return of_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def add_update(run: Run, k: int, round_: int, fate: Fate, update: Update, totals: Totals, outcome: Outcome) -> None:
    """Show a client that has trained to the callbacks, and add its update, unless it is lost or took no step."""
    client = run.client
    arrives = fate.lost is None and client.num_steps > 0
    if arrives:
        if is_watched(run):
            observe(run, k, round_)
        try:
            totals.add(update)
        except ArithmeticError as error:
            raise ClientError(f"client {k}, round {round_}: {error}") from error
        outcome.metrics.add(k, client.visit.logged)
    else:
        client.memories().drop(k)
    outcome.counts.update(lost=client.visit.num_lost)
    outcome.scalings += client.visit.scalings if fate.lost is None else []
    note_visit(run, k, client.num_steps, client.lr, client.visit.num_skipped, outcome, arrives)


def note_visit(run: Run, k: int, steps: int, rate: float, skipped: int, outcome: Outcome, arrived: bool = True) -> None:
    """Count a visit, and what came of it."""
    outcome.arrived += [k] * arrived
    outcome.counts.update(visits=1, stepped=steps > 0, idle=run.local_training.batches(k) == 0, skipped=skipped)
    if steps and arrived:
        outcome.rates[k] = rate


def is_watched(run: Run) -> bool:
    """Whether a callback is to see each client that has trained."""
    hooks = (getattr(callback.on_client_end, "__func__", None) for callback in run.callbacks)
    return any(hook is not Callback.on_client_end for hook in hooks)


def observe(run: Run, k: int, round_: int) -> None:
    """Show the callbacks a client that has trained; where the run skips clients that fail, an error is the client's."""
    try:
        with run.workers.local_only():
            run.call("on_client_end", client=run.client)
    except (ClientError, UsageError):
        raise
    except Exception as error:
        if run.trainer.on_client_error == "raise":
            raise
        raise ClientError(f"client {k}, round {round_}: a callback's on_client_end: {located(error)}") from error


def place_cohort(run: Run, fates: dict[int, Fate]) -> list[list[int]]:
    """Place the cohort on the workers, send each client's memory along, and return the groups of this worker.

    They are in ascending order of their first clients.
    """
    steps = {k: run.local_training.steps(k, fates[k].work) for k in run.server.cohort}
    groups = {group[0]: group for group in groups_of_cohort(run, steps)}
    costs = {first: cost(group, steps) for first, group in groups.items()}
    of_groups = schedule(costs, run.workers.size, run.client.memories().owners)
    placed = [[k for first in firsts for k in groups[first]] for firsts in of_groups]
    if run.client.memories().owners:
        run.workers.barrier()  # a memory is sent when both sides are here
    run.client.memories().follow(placed, run.workers)
    for worker, clients in enumerate(placed if run.workers.size > 1 else ()):
        total = sum(steps[k] for k in clients)
        run.metrics.update({f"placed/{worker}/clients": len(clients), f"placed/{worker}/steps": total})
    run.stopwatch.lap("place")
    return [groups[first] for first in sorted(of_groups[run.workers.rank])]


def groups_of_cohort(run: Run, steps: dict[int, int]) -> list[list[int]]:
    """The groups of a cohort, whose clients are expected to take so many local steps."""
    training, choice = run.local_training, run.local_training.choice
    return form_groups(steps, choice.least, choice.size, training.kind, choice.least > 2)


def share_outcome(run: Run, round_: int, outcome: Outcome) -> list[int]:
    """Share with the other workers which clients failed, what was measured and whose memories lie here.

    The mean of the clients' last learning rates is logged as ``lr``. A round whose clients have all dropped out, or
    have no batch, leaves the global model as it is.

    Returns:
        The clients of all workers whose updates the server gets, in ascending order.

    Raises:
        ClientError: a client failed and must not be skipped, too few clients are left, or clients had batches, and none
            took a local step.
    """
    # clients without memory have no owner: a run in which none remembers anything moves nothing
    owned = run.client.memories().owned(run.server.cohort)
    messages = {k: (isinstance(error, UsageError), str(error)) for k, error in outcome.errors.items()}
    counted = (dict(outcome.counts), outcome.arrived, outcome.rates, outcome.scalings)
    mine = (messages, run.metrics.current, *counted, owned)
    shared = run.workers.gather(mine)
    run.client.memories().note_owners([owned for *_, owned in shared])
    failed: dict[int, tuple[bool, str]] = {}
    counts, arrived, rates, scalings = Counter[str](), list[int](), list[float](), list[tuple[float, int]]()
    for messages, metrics, theirs, their_clients, their_rates, their_scalings, _ in shared:
        failed |= messages
        counts.update(theirs)
        arrived += their_clients
        rates += their_rates.values()
        scalings += their_scalings
        run.metrics.fill(metrics)
    skipped, lost, training = counts["skipped"], counts["lost"], run.local_training
    training.scaling = scaling = min(scalings, default=training.scaling)
    if rates:
        # rounded once, so that it does not depend on the order
        run.metrics.update({"lr": math.fsum(rates) / len(rates)})
    if skipped:
        run.metrics.update({"batches/skipped": skipped})
    if lost:
        run.metrics.update({"steps/lost": lost})
    texts = [text for _, (_, text) in sorted(failed.items())]
    if failed:
        tolerate(run, failed, outcome.errors, len(arrived))
    idle = counts["visits"] == counts["idle"] and not failed
    # a smaller scale helps, down to that of a loss as it is
    if not (idle or counts["stepped"] or (lost and scaling is not None and scaling[0] >= 1)):
        model = type(run.client.module).__name__
        why = f"the hooks of {model} left out every batch"
        if skipped:
            hint = "give another data.batch_size or model"
            why = f"{model}.training_step returned no loss for all {skipped} batches; {hint}"
        if lost:
            hint = "give trainer.precision=bf16-mixed or 32-true"
            why = f"the gradients of {model} overflow in all {lost} steps, whatever scale 16-mixed gives them; {hint}"
        raise ClientError(f"round {round_}: no client took a local step: {[why, *texts][-1]}")
    if not arrived:
        run.trainer.warn(f"round {round_}: no update arrives, and the global model stays as it is")
    return sorted(arrived)


def tolerate(run: Run, failed: dict[int, tuple[bool, str]], errors: dict[int, Exception], left: int) -> None:
    """Warn of the clients that failed, and continue with the others where the trainer's arguments allow it.

    Args:
        run: the run.
        failed: for each of them, on any worker, whether its error is a UsageError, and the text of the error.
        errors: of those that failed on this worker; another error has no cause and no traceback.
        left: the number of the others.

    Raises:
        UsageError: as the first client did, where none may fail.
        ClientError: likewise, or too few clients are left.
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


def aggregate(run: Run, totals: Totals) -> None:
    """Divide the totals once, let the methods and the server optimizer move the global state, and log the means.

    A round without an update leaves the server and the methods' server values as they are.
    """
    client, server = run.client, run.server
    down = num_bytes(select(server.state, sent_down(run))) * len(server.cohort)
    run.metrics.update({"clients": totals.num_clients, "bytes/down": down, "bytes/up": totals.num_bytes})
    delta: State = {}
    if totals.num_clients:
        payload, mean = totals.payload, totals.delta
        if client.sent and not mean:
            why = "all clients that sent an update have the weight 0"
            run.trainer.warn(f"round {server.round}: {why}, and the global model stays as it is")
        delta = run.methods.transform_update(server, mean, payload)
        frozen = {name: server.state[name].double() + change for name, change in totals.frozen.items()}
        server.step(delta, totals.others | frozen)
        run.methods.on_round_end(server, payload)
        run.metrics.update(server.metrics)
    run.metrics.update({tagged("train", name): value for name, value in totals.logged.items()})
    run.metrics.update({"drift/client": totals.drift, "drift/global": float(norm(delta))})


def recalibrate(run: Run, clients: list[int]) -> None:
    """Recompute the running statistics of the model that is evaluated, on the data of the clients that sent an update.

    The next round begins with them. Each client is sent the aggregated model again, and the statistics of each layer;
    it sends a count and two sums a channel for each layer, in float64.
    """
    client, server, current = run.client, run.server, run.metrics.current
    once = run.trainer.buffers == "recalibrate_once"
    found = run.recalibration.statistics(run.methods.evaluated_state(server), clients, server.round, once)
    server.assign(found)
    server.moved |= found.keys()
    travels = select(server.state, dict.fromkeys([*client.sent, *client.sent_others, *found]))
    sums = sum(value.numel() for value in found.values()) + len(found) // 2
    added = {"bytes/down": num_bytes(travels), "bytes/up": 8 * sums}
    run.metrics.update({tag: current[tag] + size * len(clients) for tag, size in added.items()})


def evaluate(run: Run) -> None:
    """Evaluate the global model, or the clients' own models where entries of the state do not travel."""
    state, memories = run.methods.evaluated_state(run.server), run.client.memories()
    with run.metrics.timed("evaluate"):
        groups = groups_of_own_models(run)
        for phase in PHASES:
            try:
                if groups is not None:
                    own = metrics_of_own_models(run, phase, state, groups)
                    run.metrics.update(run.evaluator.means(own))
                elif run.client.kept and memories.owners:
                    run.metrics.update(run.evaluator.own_models(phase, state, own_entries(run)))
                else:
                    run.metrics.update(run.evaluator.one_model(phase, state))
            except Exception as error:
                add_note(error, f"in the evaluation on the {phase} data, round {run.server.round}")
                raise


def own_entries(run: Run) -> Iterator[tuple[int, State]]:
    """The clients whose memories lie on this worker, each with the state entries that stay with it.

    They are read one by one: those on disk need not fit into memory together.
    """
    for k in run.client.memories():
        entries = run.client.own_entries(k)
        if entries:
            yield k, entries


def check_metrics(run: Run, metrics: dict[str, float], where: str) -> None:
    """Refuse a loss that is nan or infinite, and warn, once, of another metric that is.

    A metric may have no value, as the accuracy of a class that is not there; a loss without one is a failure.

    Args:
        run: the run.
        metrics: by tag.
        where: what they are of, for the message.

    Raises:
        ClientError: a loss is nan or infinite.
    """
    bad = {tag: value for tag, value in metrics.items() if not math.isfinite(value)}
    for tag, value in bad.items():
        if "loss" in re.split("[/_]", tag):
            raise ClientError(f"{where}: {tag} is {value}; the model has diverged, or its step has a mistake")
    for tag in sorted(bad.keys() - run.metrics.not_finite):
        run.trainer.warn(f"{where}: {tag} is {bad[tag]}")
    run.metrics.not_finite |= bad.keys()


def agree_to_stop(run: Run) -> bool:
    """Whether a callback of any worker has set ``should_stop``; all workers call this.

    They agree on a signal that has come, too, and compare the global state, of which all must have the same bits.

    Raises:
        ClientError: a worker has another one; names the workers.
    """
    trainer, workers = run.trainer, run.workers
    mine = checksums(run.server.state) if workers.size > 1 else {}
    asked = workers.gather((bool(trainer.should_stop), workers.signals.caught, hash(tuple(mine.values()))))
    trainer.should_stop = any(stop for stop, *_ in asked)
    workers.signals.agree(caught for _, caught, _ in asked)
    if len({digest for *_, digest in asked}) > 1:
        sums_of_workers = workers.gather((socket.gethostname(), mine))
        entry = next(name for name in mine if len({sums[name] for _, sums in sums_of_workers}) > 1)
        groups: dict[int, list[str]] = {}
        for rank, (host, sums) in enumerate(sums_of_workers):
            groups.setdefault(sums[entry], []).append(f"{rank} ({host})")
        # those that differ from most of the others come first
        sides = " against ".join(", ".join(names) for names in sorted(groups.values(), key=len))
        where = f"round {run.server.round}: the workers have different global states in {entry}: worker {sides}"
        raise ClientError(f"{where}; machines of different kinds round differently, or a memory has failed")
    return trainer.should_stop


def record_path(run: Run, k: int) -> Path | None:
    """The file that records a visit of client ``k`` in the present round; None where the run writes nothing."""
    folder = run.folder.shared
    return None if folder is None else folder / "failures" / f"round-{run.server.round}-client-{k}.pt"


def record_failure(run: Run, k: int, error: Exception, group: dict[int, dict]) -> None:
    """Write what the command ``replay`` needs to repeat the visit of client ``k`` that has just failed on this worker.

    Those beside which it trained, its ``group``, are given with what they remembered.

    Only the first :data:`MOST_RECORDED` failures of a run are recorded.
    """
    path = record_path(run, k)
    if path is None or len(list(path.parent.glob("*.pt"))) >= MOST_RECORDED:
        return
    server, client = run.server, run.client
    try:
        term, step = client.resident.logged.first_nonfinite_term() or (None, client.num_steps)
        what = {"error": str(error), "term": term, "step": step}
        # all that the visit depends on, beside the config and the data
        record = {
            "failure": {"round": server.round, "client": k, **what},
            "state_dict": server.state,
            "cohort": server.cohort,
            "memory": group.get(k) or client.memories().get(k, {}),
            "memories": {other: memory for other, memory in group.items() if memory},
            "methods": run.methods.state_dict(),
            "module": storable(entries_of_module(run)),
            "datamodule": state_of_data(run.data),
            "client_schedulers": run.local_training.monitored.state_dict(),
            "scaling": run.local_training.scaling,
            "evaluated": client.resident.evaluated,
            "format": FORMAT,
            **identity(run),
        }
        save(record, path)
    except Exception as problem:  # whatever it is, the failure itself is what the user has to see
        run.trainer.warn(f"{path} could not be written: {text_of(problem)}")
