"""The rounds of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_lightning.client.logged import tagged
from fl_lightning.engine.evaluation import PHASES
from fl_lightning.engine.failures import Failures
from fl_lightning.engine.workers import place
from fl_lightning.errors import ClientError, LostWorkerError, UsageError
from fl_lightning.sampling import size_of_cohort
from fl_lightning.state import State, norm, num_bytes, select
from fl_lightning.sums import Totals

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run

# phases that the stopwatch of local training measures, beside those that :func:`play_round` times
VISIT_PHASES = ("place", "load", "data", "forward_backward", "correct", "step", "collect", "wait")


def play_round(run: Run, round_: int) -> bool:
    """Broadcast, train the cohort, aggregate, step the server, evaluate, log; returns whether the round is the last."""
    run.metrics.begin(round_)
    run.server.begin_round(round_, cohort(run, round_))
    run.client.begin_round(round_)
    run.workers.begin(round_)
    run.methods.on_round_start(run.server)
    run.call("on_round_start")
    with run.metrics.timed("train"):
        totals = train_cohort(run, round_)
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
    last = run.trainer.agree_to_stop() or round_ + 1 == run.trainer.max_rounds
    if last:
        end_last_round(run, evaluated)
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
    """Draw the clients of a round."""
    trainer, number = run.trainer, run.data.num_clients
    return trainer.sampler(run.seed, round_, number, size_of_cohort(number, trainer.participation, trainer.cohort_size))


def train_cohort(run: Run, round_: int) -> Totals:
    """Train the clients that are placed on this worker, and add up what the clients of all workers send."""
    totals, failures = Totals(run.fabric.device), Failures()
    rates: dict[int, float] = {}
    run.stopwatch.reset()
    for k in place_cohort(run):
        run.workers.check()
        try:
            totals.add(run.local_training.visit(k, round_, run.server.state))
        except LostWorkerError:
            raise
        except (ClientError, UsageError) as error:
            failures.add(k, error)
            if run.trainer.on_client_error == "raise":
                break
            continue
        if run.client.num_steps:
            rates[k] = run.client.lr
        with run.workers.alone():
            run.call("on_client_end", client=run.client)
    share_outcome(run, failures, rates)
    totals.all_reduce(run.workers)
    run.stopwatch.lap("wait")
    run.metrics.update(mean_seconds(run))
    return totals


def place_cohort(run: Run) -> list[int]:
    """Place the cohort on the workers, send each client's memory along, and return the clients of this worker.

    They are in ascending order.
    """
    steps = {k: run.local_training.steps(k) for k in run.server.cohort}
    placed = place(steps, run.workers.size, run.client.memories().owners)
    if run.client.memories().owners:
        run.workers.barrier()  # a memory is sent when both sides are here
    run.client.memories().follow(placed, run.workers)
    for worker, clients in enumerate(placed if run.workers.size > 1 else ()):
        total = sum(steps[k] for k in clients)
        run.metrics.update({f"placed/{worker}/clients": len(clients), f"placed/{worker}/steps": total})
    run.stopwatch.lap("place")
    return sorted(placed[run.workers.rank])


def share_outcome(run: Run, failures: Failures, rates: dict[int, float]) -> None:
    """Share with the other workers which clients failed, what was measured and whose memories lie here.

    The mean of the clients' last learning rates, ``rates``, is logged as ``lr``.

    Raises:
        ClientError: a client failed and must not be skipped, or too few clients are left.
    """
    # clients without memory have no owner: a run in which none remembers anything moves nothing
    owned = run.client.memories().owned(run.server.cohort)
    outcomes = run.workers.gather((failures.messages, run.metrics.current, rates, owned))
    run.client.memories().note_owners([owned for *_, owned in outcomes])
    every_rate = [rate for *_, theirs, _ in outcomes for rate in theirs.values()]
    if every_rate:
        # rounded once, so that it does not depend on the order
        run.metrics.update({"lr": math.fsum(every_rate) / len(every_rate)})
    for messages, metrics, *_ in outcomes:
        failures.take(messages)
        run.metrics.fill(metrics)
    if len(failures):
        tolerate(run, failures)


def tolerate(run: Run, failures: Failures) -> None:
    """Warn of the clients that failed, and continue without them where the trainer's arguments allow it."""
    trainer, left = run.trainer, len(run.server.cohort) - len(failures)
    if trainer.on_client_error == "raise":
        failures.throw()
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
    """Divide the totals once, let the methods and the server optimizer move the global state, and log the means."""
    log_traffic(run, totals)
    payload = totals.payload
    delta = run.methods.transform_update(run.server, totals.delta, payload)
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
            if run.client.kept and memories.owners:
                run.metrics.update(run.evaluator.own_models(phase, state, own_entries(run)))
            else:
                run.metrics.update(run.evaluator.one_model(phase, state))


def own_entries(run: Run) -> Iterator[tuple[int, State]]:
    """The clients whose memories lie on this worker, each with the state entries that stay with it.

    They are read one by one: those on disk need not fit into memory together.
    """
    for k in run.client.memories():
        entries = run.client.own_entries(k)
        if entries:
            yield k, entries
