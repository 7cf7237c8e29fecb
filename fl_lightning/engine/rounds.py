"""One round of a run: train the cohort, aggregate, step the server, evaluate, log."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Sequence

from fl_lightning.client.client import RECALIBRATES
from fl_lightning.core.state import State, checksums, norm, num_bytes, select
from fl_lightning.core.update import CohortMeans
from fl_lightning.engine.cohort_training import end_of_round, is_over, log_plan, plan_round, train_cohort
from fl_lightning.engine.evaluation.evaluator import PHASES
from fl_lightning.engine.run import Run
from fl_lightning.engine.update_codec import broadcast_bytes
from fl_lightning.storage.metric_format import tagged
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import ClientError, add_note


def run_round(run: Run, round_: int) -> bool:
    """Broadcast, train the cohort, aggregate, step the server, evaluate, log; returns whether the round is the last."""
    run.metrics.begin(round_)
    plan = plan_round(run, round_)
    log_plan(run, round_, plan)
    run.server.begin_round(round_, plan.cohort)
    run.worker_module.begin_round(round_)
    run.workers.begin(round_)
    run.methods.on_round_start(run.server)
    run.server.share(run.client.live)  # a hook, or a client, may have changed a frozen parameter
    run.versions.begin_round(round_, run.client.travelling)
    run.call("on_round_start")
    with run.metrics.timed("train"):
        means, arrived = run.backend.train(run, round_, plan.systems)
    run.workers.signals.keeps_round = True  # the rest takes little time
    run.client.lifecycle.end_round()
    with run.metrics.timed("server"):
        if run.trainer.clock is not None:
            run.server.microseconds = end_of_round(run, round_, plan)
            run.metrics.update({"clock/seconds": run.server.time})
        aggregate(run, means)
    if arrived and run.trainer.buffers in RECALIBRATES:
        with run.metrics.timed("recalibrate"):
            recalibrate(run, arrived)
    due, ends = run.trainer.evaluation_is_due, is_over(run, round_ + 1)
    if due:
        run.backend.evaluate(run)
    # a round without an update lacks metrics of training
    run.local_training.monitored.after_round(round_, run.metrics.current, due and bool(arrived))
    required = any(callback.requires_evaluation(round_) for callback in run.callbacks)
    evaluated = due or ends or required
    if evaluated and not due:
        evaluate_for_record(run)
    with run.metrics.timed("log"):
        run.call("on_round_end")
    stopped = agree_to_stop(run)
    is_last = stopped or ends
    if is_last:
        if not evaluated:  # a callback has ended the run
            evaluate_for_record(run)
        run.call("on_last_round_end")
    check_metrics(run, run.metrics.current, f"round {round_}", stopped)
    run.metrics.end()
    with run.metrics.timed_writing():
        run.folder.log(run.metrics.current, round_)
    return is_last


def aggregate(run: Run, means: CohortMeans) -> None:
    """Let the methods and the server optimizer move the global state by the means of the updates, and log them.

    A round without an update changes neither the server nor the methods' server values.
    """
    client, server = run.client, run.server
    down = sum(broadcast_bytes(run, server.cohort).values())
    for k in server.cohort:
        news = {*server.news_for(k)}.difference(client.kept)
        down += sum(server.state[name].nbytes for name in news)
    server.note_sent(server.cohort)
    run.metrics.update({"clients": means.num_clients, "bytes/down": down, "bytes/up": means.num_bytes})
    delta: State = {}
    if means.num_clients:
        payload, mean, buffers = means.payload, means.delta, means.others
        if means.updates is not None:
            mean = run.methods.aggregate(server, means.updates)
            buffers |= {name: mean.pop(name) for name in mean.keys() - {*client.sent}}
            means.updates = None
        if client.sent and not mean:
            why = "all clients that sent an update have the weight 0"
            run.trainer.warn(f"round {server.round}: {why}, and the global model does not change")
        delta = run.methods.transform_update(server, mean, payload)
        changes = means.frozen_changes
        frozen = {name: server.state[name].double() + change for name, change in changes.items()}
        server.step(delta, buffers | frozen)
        run.methods.on_round_end(server, payload)
        run.metrics.update(server.metrics)
    run.metrics.update({tagged("train", name): value for name, value in means.logged.items()})
    run.metrics.update({"drift/client": means.drift, "drift/global": float(norm(delta))})


def recalibrate(run: Run, clients: list[int]) -> None:
    """Recompute the running statistics of the model that is evaluated, on the data of the clients that sent an update.

    The next round begins with them. Each client is sent the aggregated model again, and the statistics of each layer;
    it sends a count and two sums a channel for each layer, in float64.
    """
    client, server, current = run.client, run.server, run.metrics.current
    once = run.trainer.buffers == "recalibrate_once"
    statistics = run.recalibration.statistics(run.methods.evaluated_state(server), clients, server.round, once)
    server.assign(statistics)
    travels = select(server.state, dict.fromkeys([*client.sent, *client.sent_others, *statistics]))
    sums = sum(value.numel() for value in statistics.values()) + len(statistics) // 2
    added = {"bytes/down": num_bytes(travels), "bytes/up": 8 * sums}
    run.metrics.update({tag: current[tag] + size * len(clients) for tag, size in added.items()})


def evaluate_for_record(run: Run) -> None:
    """Evaluate unseen by training, which must not depend on the callbacks, or on which round is the last."""
    with patched(run.worker_module, evaluated=run.worker_module.evaluated):
        run.backend.evaluate(run)


def evaluate(run: Run) -> None:
    """Evaluate the global model, or the clients' own models where entries of the state do not travel."""
    state, client = run.methods.evaluated_state(run.server), run.client
    with run.metrics.timed("evaluate"):
        personal = bool(not client.has_global_model and client.memories().owners)
        parts = run.runner.place_models(run) if personal else []
        for phase in PHASES:
            try:
                if personal:
                    run.metrics.update(run.evaluator.means(run.runner.evaluate_models(run, phase, state, parts)))
                else:
                    run.metrics.update(run.evaluator.evaluate(phase, state))
            except Exception as error:
                add_note(error, f"in the evaluation on the {phase} data, round {run.server.round}")
                raise


def check_metrics(run: Run, metrics: dict[str, float], where: str, stopped: bool = False) -> None:
    """Refuse a loss that is nan or infinite, and warn, once, of another metric that is.

    A metric may have no value, as the accuracy of a class that is not there; a loss without one is a failure, unless a
    callback has ``stopped`` the run.
    """
    bad = {tag: value for tag, value in metrics.items() if not math.isfinite(value)}
    for tag, value in bad.items():
        if "loss" in re.split("[/_]", tag) and not stopped:
            raise ClientError(f"{where}: {tag} is {value}; the model has diverged, or its step has a mistake")
    for tag in sorted(bad.keys() - run.metrics.not_finite):
        run.trainer.warn(f"{where}: {tag} is {bad[tag]}")
    run.metrics.not_finite |= bad.keys()


def agree_to_stop(run: Run) -> bool:
    """Whether a callback of any worker has set ``should_stop``; all workers call this.

    They agree on a signal that has come, too, and on the global state, which must have the same bits on all of them.
    """
    trainer, workers = run.trainer, run.workers
    own_sums = checksums(run.server.state) if workers.size > 1 else {}
    report = (bool(trainer.should_stop), workers.signals.caught, hash(tuple(own_sums.values())))
    reports = workers.gather(report, "end of a round")
    trainer.should_stop = any(stop for stop, _, _ in reports)
    workers.signals.agree(caught for _, caught, _ in reports)
    if len({digest for _, _, digest in reports}) > 1:
        sums_of_workers = workers.gather((socket.gethostname(), own_sums), "checksums")
        entry = next(name for name in own_sums if len({sums[name] for _, sums in sums_of_workers}) > 1)
        groups: dict[int, list[str]] = {}
        for rank, (host, sums) in enumerate(sums_of_workers):
            groups.setdefault(sums[entry], []).append(f"{rank} ({host})")
        # workers that differ from most of the others come first
        sides = " against ".join(", ".join(names) for names in sorted(groups.values(), key=len))
        where = f"round {run.server.round}: the workers have different global states in {entry}: worker {sides}"
        raise ClientError(f"{where}; machines of different kinds round differently, or a memory has failed")
    return trainer.should_stop


class SimulationBackend:
    """The clients of a run are trained by the workers of this program."""

    train = staticmethod(train_cohort)
    evaluate = staticmethod(evaluate)

    def present(self, run: Run, round_: int) -> Sequence[int]:
        """All clients except those that ``trainer.systems`` has absent."""
        number, systems = run.data.num_clients, run.trainer.systems
        return range(number) if systems is None else systems.present(round_, number)
