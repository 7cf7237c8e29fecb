"""The rounds of a run."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fl_lightning.client.logged import tagged
from fl_lightning.engine.evaluation.evaluator import PHASES
from fl_lightning.engine.failures import Failures, record_failure
from fl_lightning.engine.processes.workers import place
from fl_lightning.errors import ClientError, LostWorkerError, SharedStateError, UsageError, add_note, located
from fl_lightning.sampling import size_of_cohort
from fl_lightning.state import State, checksums, norm, num_bytes, select
from fl_lightning.sums import Totals
from fl_lightning.systems import Fate

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run

# phases that the stopwatch of local training measures, beside those that :func:`play_round` times
VISIT_PHASES = ("place", "load", "data", "forward_backward", "correct", "step", "collect", "wait")


@dataclass
class Outcome:
    """What the visits on one worker came to, small enough to be gathered.

    Args:
        visits: how many there were, but for those that failed.
        sent: how many of them the server gets an update from.
        stepped: how many of them took a local step.
        idle: how many of them had no batch.
        skipped: batches that the module skipped.
        rates: last learning rate of each client that took a step and sent its update.
    """

    visits: int = 0
    sent: int = 0
    stepped: int = 0
    idle: int = 0
    skipped: int = 0
    rates: dict[int, float] = field(default_factory=dict)


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
        totals = train_cohort(run, round_, fates)
    run.workers.signals.keeps_round = True  # what is left is short beside the training
    run.client.end_round()
    with run.metrics.timed("server"):
        aggregate(run, totals)
    evaluated = evaluation_is_due(run, round_)
    if evaluated:
        evaluate(run)
    run.local_training.monitored.after_round(round_, run.metrics.current, evaluated)
    with run.metrics.timed("log"):
        run.call("on_round_end")
    last = agree(run) or round_ + 1 == run.trainer.max_rounds
    if last:
        end_last_round(run, evaluated)
    check_metrics(run, run.metrics.current, f"round {round_}")
    run.metrics.end()
    with run.metrics.timed_writing():
        run.folder.log(run.metrics.current, round_)
    return last


def end_last_round(run: Run, evaluated: bool) -> None:
    """Evaluate the final model where a callback ended the run in a round without evaluation, and call the hook."""
    if not evaluated:
        evaluate(run)
    run.call("on_last_round_end")


def cohort(run: Run, round_: int) -> list[int]:
    """Draw the clients of a round, from those that are there."""
    trainer, number = run.trainer, run.data.num_clients
    there = range(number) if trainer.systems is None else trainer.systems.present(round_, number)
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


def train_cohort(run: Run, round_: int, fates: dict[int, Fate]) -> Totals:
    """Train the clients that are placed on this worker, and add up what the clients of all workers send."""
    totals, failures, outcome = Totals(run.fabric.device), Failures(), Outcome()
    run.stopwatch.reset()
    for k in place_cohort(run, fates):
        run.workers.check()
        try:
            train_client(run, k, round_, fates[k], totals, outcome)
        except LostWorkerError:
            raise
        except (ClientError, UsageError) as error:
            failures.add(k, error)
            record_failure(run, k, error)
            if run.trainer.on_client_error == "raise":
                break
            if isinstance(error, SharedStateError):
                raise  # later clients would begin with what it has written
    share_outcome(run, round_, failures, outcome)
    totals.all_reduce(run.workers)
    run.stopwatch.lap("wait")
    run.metrics.update(mean_seconds(run))
    return totals


def train_client(run: Run, k: int, round_: int, fate: Fate, totals: Totals, outcome: Outcome) -> None:
    """Train one client and add what it sends; where this fails, neither the sums nor its memory change."""
    client, memories = run.client, run.client.memories()
    with memories.visit(k):
        update = run.local_training.visit(k, round_, run.server.state, fate.work)
        if fate.lost is None:
            observe(run, k, round_)
            try:
                totals.add(update)
            except ArithmeticError as error:
                raise ClientError(f"client {k}, round {round_}: {error}") from error
        else:
            memories.drop(k)
    outcome.visits += 1
    outcome.sent += fate.lost is None
    outcome.stepped += client.num_steps > 0
    outcome.idle += run.local_training.batches(k) == 0
    outcome.skipped += client.visit.num_skipped
    if client.num_steps and fate.lost is None:
        outcome.rates[k] = client.lr


def observe(run: Run, k: int, round_: int) -> None:
    """Show the callbacks a client that has trained; where the run skips clients that fail, an error is the client's."""
    try:
        with run.workers.alone():
            run.call("on_client_end", client=run.client)
    except (ClientError, UsageError):
        raise
    except Exception as error:
        if run.trainer.on_client_error == "raise":
            raise
        raise ClientError(f"client {k}, round {round_}: a callback's on_client_end: {located(error)}") from error


def place_cohort(run: Run, fates: dict[int, Fate]) -> list[int]:
    """Place the cohort on the workers, send each client's memory along, and return the clients of this worker.

    They are in ascending order.
    """
    steps = {k: run.local_training.steps(k, fates[k].work) for k in run.server.cohort}
    placed = place(steps, run.workers.size, run.client.memories().owners)
    if run.client.memories().owners:
        run.workers.barrier()  # a memory is sent when both sides are here
    run.client.memories().follow(placed, run.workers)
    for worker, clients in enumerate(placed if run.workers.size > 1 else ()):
        total = sum(steps[k] for k in clients)
        run.metrics.update({f"placed/{worker}/clients": len(clients), f"placed/{worker}/steps": total})
    run.stopwatch.lap("place")
    return sorted(placed[run.workers.rank])


def share_outcome(run: Run, round_: int, failures: Failures, outcome: Outcome) -> None:
    """Share with the other workers which clients failed, what was measured and whose memories lie here.

    The mean of the clients' last learning rates is logged as ``lr``.

    Raises:
        ClientError: a client failed and must not be skipped, too few clients are left, or none took a local step.
    """
    # clients without memory have no owner: a run in which none remembers anything moves nothing
    owned = run.client.memories().owned(run.server.cohort)
    outcomes = run.workers.gather((failures.messages, run.metrics.current, vars(outcome), owned))
    run.client.memories().note_owners([owned for *_, owned in outcomes])
    for messages, metrics, *_ in outcomes:
        failures.take(messages)
        run.metrics.fill(metrics)
    every = [Outcome(**theirs) for _, _, theirs, _ in outcomes]
    log_outcome(run, every)
    if len(failures):
        tolerate(run, failures, sum(theirs.sent for theirs in every))
    check_steps(run, round_, every, failures)


def log_outcome(run: Run, outcomes: list[Outcome]) -> None:
    """Log the mean learning rate, and the batches that were skipped, if any."""
    rates = [rate for outcome in outcomes for rate in outcome.rates.values()]
    skipped = sum(outcome.skipped for outcome in outcomes)
    if rates:
        # rounded once, so that it does not depend on the order
        run.metrics.update({"lr": math.fsum(rates) / len(rates)})
    if skipped:
        run.metrics.update({"batches/skipped": skipped})


def check_steps(run: Run, round_: int, outcomes: list[Outcome], failures: Failures) -> None:
    """Refuse a round in which clients had batches, and none took a local step.

    One whose clients have all dropped out, or have no batch, leaves the global model as it is.

    Raises:
        ClientError: there is no step; says why.
    """
    visits, stepped, idle, skipped = (
        sum(getattr(one, name) for one in outcomes) for name in ("visits", "stepped", "idle", "skipped")
    )
    if stepped or (visits == idle and not len(failures)):
        if not visits:
            run.trainer.warn(f"round {round_}: no client is left, and the global model stays as it is")
        return
    model = type(run.client.module).__name__
    why = f"{model}.training_step returned no loss for all {skipped} batches; give another data.batch_size or model"
    why = why if skipped else f"the hooks of {model} left out every batch"
    raise ClientError(f"round {round_}: no client took a local step: {failures.texts()[-1] if len(failures) else why}")


def tolerate(run: Run, failures: Failures, left: int) -> None:
    """Warn of the clients that failed, and continue with those that are left where the trainer's arguments allow it."""
    trainer = run.trainer
    if trainer.on_client_error == "raise":
        failures.throw(run)
    for text in failures.texts():
        trainer.warn(f"skipped: {text}")
    run.metrics.update({"clients/failed": len(failures)})
    if left < trainer.min_clients:
        raise ClientError(
            f"trainer.min_clients={trainer.min_clients}, but only {left} clients are left: {failures.texts()[-1]}"
        )


def mean_seconds(run: Run) -> dict[str, float]:
    """Seconds of each of :data:`VISIT_PHASES`, as means over the workers."""
    workers = run.workers.gather(dict(run.stopwatch.seconds))
    return {f"time/{p}": sum(w.get(p, 0.0) for w in workers) / len(workers) for p in VISIT_PHASES}


def aggregate(run: Run, totals: Totals) -> None:
    """Divide the totals once, let the methods and the server optimizer move the global state, and log the means.

    A round without an update leaves the server and the methods' server values as they are.
    """
    log_traffic(run, totals)
    delta: State = {}
    if totals.num_clients:
        payload, mean = totals.payload, totals.delta
        if run.client.sent and not mean:
            why = "all clients that sent an update have the weight 0"
            run.trainer.warn(f"round {run.server.round}: {why}, and the global model stays as it is")
        delta = run.methods.transform_update(run.server, mean, payload)
        frozen = {name: run.server.state[name].double() + change for name, change in totals.frozen.items()}
        run.server.step(delta, totals.others | frozen)
        run.methods.on_round_end(run.server, payload)
    run.metrics.update({tagged("train", name): value for name, value in totals.logged.items()})
    run.metrics.update({"drift/client": totals.drift, "drift/global": float(norm(delta))})


def log_traffic(run: Run, totals: Totals) -> None:
    """Log the number of clients that sent an update, and the bytes that went down and up."""
    client = run.client
    # a frozen parameter is known to every client until one changes it
    moved = [name for name in client.sent_frozen if name in run.server.moved]
    down = num_bytes(select(run.server.state, client.sent + client.sent_others + moved)) * len(run.server.cohort)
    run.metrics.update({"clients": totals.num_clients, "bytes/down": down, "bytes/up": totals.num_bytes})


def evaluation_is_due(run: Run, round_: int) -> bool:
    """Whether the global model is evaluated after a round: the last one always is."""
    wanted = any(callback.wants_evaluation(round_) for callback in run.callbacks)
    trainer = run.trainer
    return wanted or (round_ + 1) % trainer.eval_every_n_rounds == 0 or round_ + 1 == trainer.max_rounds


def evaluate(run: Run) -> None:
    """Evaluate the global model, or the clients' own models where entries of the state do not travel."""
    state, memories = run.methods.evaluated_state(run.server), run.client.memories()
    with run.metrics.timed("evaluate"):
        for phase in PHASES:
            try:
                if run.client.kept and memories.owners:
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


def agree(run: Run) -> bool:
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
        raise_disagreement(run, mine)
    return trainer.should_stop


def raise_disagreement(run: Run, mine: dict[str, int]) -> None:
    """Name the workers that differ from most of the others, and the first entry in which they do.

    Raises:
        ClientError: always.
    """
    told = run.workers.gather((socket.gethostname(), mine))
    entry = next(name for name in mine if len({sums[name] for _, sums in told}) > 1)
    groups: dict[int, list[str]] = {}
    for rank, (host, sums) in enumerate(told):
        groups.setdefault(sums[entry], []).append(f"{rank} ({host})")
    sides = " against ".join(", ".join(names) for names in sorted(groups.values(), key=len))
    where = f"round {run.server.round}: the workers have different global states in {entry}: worker {sides}"
    raise ClientError(f"{where}; machines of different kinds round differently, or a memory has failed")
