"""The rounds of a run, and the commands that need them: a fit of all rounds, and a single evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.client.logged import tagged
from fl_lightning.engine import prediction
from fl_lightning.engine.checkpointing import restore_callbacks, restore_run, save_run
from fl_lightning.engine.evaluation import PHASES, step_name
from fl_lightning.engine.failures import Failures
from fl_lightning.engine.model_files import check_storable, load_model, load_weights, save_model
from fl_lightning.engine.workers import place
from fl_lightning.errors import ClientError, LostWorkerError, UsageError, require
from fl_lightning.records.checkpoint import find_checkpoint
from fl_lightning.records.files import save
from fl_lightning.records.hyperparameters import of_config, of_objects
from fl_lightning.records.plain import is_storable
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
    run.workers.begin(round_)
    run.methods.on_round_start(run.server)
    run.call("on_round_start")
    with run.metrics.timed("train"):
        totals = train_cohort(run, round_)
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
    every_rate = [rate for *_, found, _ in outcomes for rate in found.values()]
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


# ---------------------------------------------------------------------- commands
def fit(run: Run, ckpt_path: str | Path | None, weights: Path | None = None) -> None:
    """Run all rounds, from the module's weights or given ones, or those after a checkpoint."""
    path = run.workers.gather(find_checkpoint(ckpt_path, run.folder.root))[0]
    if weights is not None and path is None:
        load_weights(run, weights)
    run.methods.on_fit_start(run.server)
    checkpoint = restore_run(run, path)
    check_storable(run)
    run.folder.open(path, run.metrics.history)
    folder = run.workers.gather(run.folder.path)[0]
    warn_of_kept_entries(run)
    status, params = "failed", hyperparameters(run)
    try:
        run.folder.log_hyperparams(params)
        run.client.call("on_fit_start")
        run.client.begin_run()
        warn_of_modes(run)
        run.call("on_fit_start")
        restore_callbacks(run, checkpoint)
        play_rounds(run, checkpoint["round"], folder)
        run.call("on_fit_end")
        run.client.call("on_fit_end")
        if folder is not None and run.client.sent:
            save_model(run, folder / "checkpoints" / "model.ckpt")
        compare_hyperparams(run, params)
        status = "success"
    finally:
        run.call("teardown")
        run.folder.close(status)
        run.client.load(run.methods.evaluated_state(run.server))


def play_rounds(run: Run, first: int, folder: Path | None) -> None:
    """Run the rounds from ``first`` on, with checkpoints in ``folder``, until the last one or ``should_stop``."""
    if first >= run.trainer.max_rounds > 0:
        run.trainer.warn(f"trainer.max_rounds={run.trainer.max_rounds}: the checkpoint has {first}, nothing is trained")
    for round_ in range(first, run.trainer.max_rounds):
        last = play_round(run, round_)
        if (last or (round_ + 1) % run.trainer.checkpoint_every_n_rounds == 0) and folder is not None:
            with run.metrics.timed_writing():
                save_run(run, folder / "checkpoints")
        if last:
            return


def hyperparameters(run: Run) -> dict[str, Any]:
    """The hyper-parameters for the loggers: the resolved config, or what is known of the objects of the run."""
    trainer, methods = run.trainer, dict(zip(run.methods.names, run.methods.methods, strict=True))
    config = trainer.config
    found = of_config(config) if config else of_objects(run.client.module, trainer.arguments, methods)
    return {"methods": "+".join(run.methods.names) or "fedavg", **found}


def compare_hyperparams(run: Run, params: dict[str, Any]) -> None:
    """Log the hyper-parameters with the last round's metrics of the training, validation and test data."""
    last = run.metrics.history[-1] if run.metrics.history else {"round": 0}
    shown = {tag: value for tag, value in last.items() if tag.startswith(("train/", "val/", "test/"))}
    run.folder.compare_hyperparams(params, shown, int(last["round"]))


def load_given(run: Run, ckpt_path: str | Path | None, weights: Path | None) -> dict[int, State]:
    """Load a checkpoint or, without one, given weights, or leave the module as it is.

    Returns:
        The state entries that stay with each client, where a checkpoint has any.
    """
    if ckpt_path is None and weights is not None:
        load_weights(run, weights)
    return {} if ckpt_path is None else load_model(run, Path(ckpt_path))


def evaluate_once(run: Run, phase: str, ckpt_path: str | Path | None, weights: Path | None = None) -> dict[str, float]:
    """Metrics of the module as it is, or of a checkpoint: its global model, or means over its clients' own ones."""
    require(run.evaluator.has_data(phase), "data", type(run.data).__name__, f"it has no {phase} data")
    module, name = run.client.module, "validation_step" if phase == "val" else "test_step or validation_step"
    require(step_name(module, phase) is not None, "model", type(module).__name__, f"it has no {name}; define one")
    own = load_given(run, ckpt_path, weights)
    state = run.client.state()
    if not own:
        return run.evaluator.one_model(phase, state, observed=False)
    mine = ((k, own[k]) for k in sorted(own)[run.workers.rank :: run.workers.size])
    return run.evaluator.own_models(phase, state, mine, observed=False)


def predict_once(
    run: Run, ckpt_path: str | Path | None, weights: Path | None = None, output: Path | None = None
) -> list[Any]:
    """The outputs of ``predict_step`` of the module as it is, or of a checkpoint's global model, batch by batch."""
    own = load_given(run, ckpt_path, weights)
    hint = f"entries of the state stay with each of its {len(own)} clients, so it has no one model to predict with"
    require(not own, "ckpt_path", str(ckpt_path), hint)
    outputs = prediction.predict(run)
    if output is not None and run.workers.rank == 0:
        hint = f"{output.name} holds tensors and plain values alone; predict_step gave something else"
        require(is_storable(outputs), "output", str(output), hint)
        save(outputs, output)
    return outputs


def warn_of_modes(run: Run) -> None:
    """Warn, as Lightning does, of submodules that are in evaluation mode and stay there."""
    number = sum(not part.training for part in run.client.module.modules())
    if number:
        run.trainer.warn(f"{number} submodules of the model are in evaluation mode, and stay in it while it is trained")


def warn_of_kept_entries(run: Run) -> None:
    """Warn where entries of the state do not travel: there is no one global model, and metrics mean something else."""
    if run.client.kept:
        some = "all" if not run.client.sent else f"{len(run.client.kept)} of {len(run.client.live)}"
        stay = f"{some} entries of the state stay with each client: metrics are means over the clients' own models"
        run.trainer.warn(stay if run.client.sent else f"{stay}, and there is no model.ckpt")
