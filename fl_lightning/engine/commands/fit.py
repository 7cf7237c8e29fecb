"""Fit, as each worker executes it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info

from fl_lightning.core.seeding import rng_scope
from fl_lightning.distributed.launcher import show_idle_cores
from fl_lightning.engine.checkpointing import checkpoint_to_resume, restore_callbacks, restore_run, save_run
from fl_lightning.engine.cohort_training import follow_schedule, planned_rounds
from fl_lightning.engine.evaluation.evaluator import PHASES, step_name
from fl_lightning.engine.fingerprint import FREE_OF_TRAINER
from fl_lightning.engine.model_io import check_storable, load_weights, save_model
from fl_lightning.engine.rounds import run_round
from fl_lightning.engine.run import Run
from fl_lightning.engine.sanity_check import run_sanity_check
from fl_lightning.engine.validation import name_large_batches, warn_of_averaged_statistics
from fl_lightning.storage.checkpoint import LAST
from fl_lightning.storage.hyperparameters import of_config, only_plain, plain_arguments
from fl_lightning.storage.loggers import add_to_page, log_hyperparams
from fl_lightning.storage.metric_format import tagged
from fl_lightning.storage.run_folder import naming_the_file
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import OF_OWN_MODELS

# arguments of the command that do not define the run
FREE_OF_COMMAND = ("ckpt_path", "allow_changes")


def fit(run: Run, ckpt_path: str | Path | None, weights: Path | None = None, allow_changes: bool = False) -> None:
    """Run all rounds from the module's or the given weights, or the rounds after a checkpoint."""
    try:
        source, checkpoint = prepare_fit(run, ckpt_path, weights, allow_changes)
        rounds = rounds_to_play(run, checkpoint["round"])
    except BaseException:  # a notebook may resume the run after a refusal
        run.folder.release()
        raise
    with run.folder.needing_room(run.server), patched(run.trainer, max_rounds=rounds):
        run.folder.open(source, run.metrics.history)
        folder = run.folder.shared = run.workers.gather(run.folder.path, "folder of the run")[0]
        if source is not None and run.folder.resumed and folder is not None:
            if run.folder.checkpoints is not None:  # all workers have read the old files by now
                run.folder.checkpoints.resume(source)
            source = source.with_name(LAST)
        status, params = "failed", hyperparameters(run)
        try:
            run.folder.each(partial(log_hyperparams, params=params))
            begin_fit(run, fresh=source is None)
            run.call("on_fit_start")
            restore_callbacks(run, checkpoint)
            run.workers.signals.checkpoint = source
            play_rounds(run, checkpoint["round"], folder)
            run.call("on_fit_end")
            if "on_fit_end" in run.worker_module.hooks:
                run.worker_module.load(run.methods.evaluated_state(run.server))  # a run may resume after its last round
                # counters as at the start of the round after the last one
                run.worker_module.begin_round(run.server.round + 1 if run.metrics.history else 0)
                run.worker_module.call("on_fit_end")
            if folder is not None and run.client.sent:
                save_model(run, folder / "checkpoints" / "model.ckpt")
            compare_hyperparams(run, params)
            status = "success"
            run.workers.signals.end()
        finally:
            run.call("teardown")
            run.folder.close(status)
            run.worker_module.load(run.methods.evaluated_state(run.server))


def prepare_fit(
    run: Run, ckpt_path: str | Path | None, weights: Path | None, allow_changes: bool
) -> tuple[Path | None, dict[str, Any]]:
    """Prepare a fit before it writes anything; return the checkpoint to resume from, and its contents."""
    source = checkpoint_to_resume(run, ckpt_path)
    if weights is not None and source is None:
        load_weights(run, weights)
    run.methods.on_fit_start(run.server)
    check_storable(run)
    if source is None and not run.trainer.fast_dev_run:
        run_sanity_check(run)
    run.runner.prepare(run)
    follow_schedule(run)
    checkpoint = restore_run(run, source, allow_changes)
    client = run.client
    warn_of_averaged_statistics(run.trainer, client, run.data)
    name_large_batches(run.data)
    if step_name(client.module, "test") is None and any(map(run.evaluator.has_data, PHASES)):
        hint = "it has no test_step and no validation_step, so no round is evaluated; define one that logs a metric"
        rank_zero_info(f"model={type(client.module).__name__}: {hint}")
    if not client.has_global_model:
        entries = "all" if not client.sent else f"{len(client.kept)} of {len(client.live)}"
        stay = f"{entries} entries of the state stay with each client: {OF_OWN_MODELS}"
        run.trainer.warn(stay if client.sent else f"{stay}, and no model.ckpt is written")
    show_idle_cores(run.trainer, run.data)
    return source, checkpoint


def begin_fit(run: Run, fresh: bool) -> None:
    """Call the module's ``on_fit_start``, and keep its changes, in a ``fresh`` run also of the weights."""
    with rng_scope(run.seed, "on_fit_start"):
        run.worker_module.call("on_fit_start")
    if fresh and "on_fit_start" in run.worker_module.hooks:
        run.server.assign(run.client.state())
    if fresh:
        run.server.known.clear()  # all clients know the values that the run begins with
    run.server.share(run.client.live)
    run.worker_module.begin_run()
    number = sum(not part.training for part in run.client.module.modules())
    if number:  # as Lightning does
        run.trainer.warn(f"{number} submodules of the model are in evaluation mode, and stay in it while it is trained")


def rounds_to_play(run: Run, first: int) -> int:
    """Return the number of rounds, by ``max_rounds`` and ``max_seconds``; warn if ``first`` is beyond the last one."""
    trainer, rounds = run.trainer, planned_rounds(run, first)
    if first >= trainer.max_rounds:
        reason = f"the checkpoint has {first}, nothing is trained" if first else "nothing is trained; set 1 or more"
        trainer.warn(f"trainer.max_rounds={trainer.max_rounds}: {reason}")
    elif first >= rounds:
        trainer.warn(f"trainer.max_seconds={trainer.max_seconds}: round {first} ends later, nothing is trained")
    return rounds


def play_rounds(run: Run, first: int, folder: Path | None) -> None:
    """Run the rounds from ``first`` on, with checkpoints in ``folder``, until the last one or ``should_stop``."""
    signals, saved = run.workers.signals, first
    signals.install()
    for round_ in range(first, run.trainer.max_rounds):
        signals.begin(round_, saved if folder is not None else round_)
        is_last = run_round(run, round_)
        due = (round_ + 1) % run.trainer.checkpoint_every_n_rounds == 0 or run.trainer.save_best
        if (is_last or due or signals.agreed) and folder is not None:
            path = folder / "checkpoints/last.ckpt"
            # a failed write leaves the last checkpoint intact
            with run.metrics.timed_writing(), naming_the_file(path, round_):
                save_run(run, path.parent)
            signals.checkpoint, saved = path, round_ + 1
        if is_last:
            return
        if signals.agreed:
            raise signals.stopped()


def hyperparameters(run: Run) -> dict[str, Any]:
    """Return the hyper-parameters for the loggers: the resolved config, or the arguments of the run's objects."""
    if run.trainer.config:
        params = of_config(run.trainer.config)
    else:
        methods = zip(run.methods.names, run.methods.methods, strict=True)
        params = {
            "model": only_plain(run.client.module.hparams),
            "method": {name: plain_arguments(method) for name, method in methods},
            "trainer": only_plain(run.trainer.arguments),
        }
    return {"methods": "+".join(run.methods.names) or "fedavg", **params}


def compare_hyperparams(run: Run, params: dict[str, Any]) -> None:
    """Log the hyper-parameters with the last round, and its metrics of the training, validation and test data."""
    last_row = run.metrics.history[-1] if run.metrics.history else {"round": 0}
    compared = {
        tag: value
        for tag, value in last_row.items()
        if tag == "round" or any(tagged(phase, tag) == tag for phase in ("train", "val", "test"))
    }
    # the other arguments may change when the run resumes in its folder
    trainer = params["trainer"]
    lasting = {key: params[key] for key in params if key not in FREE_OF_COMMAND}
    lasting["trainer"] = {key: trainer[key] for key in trainer if key not in FREE_OF_TRAINER}
    last_round = int(last_row["round"])
    run.folder.each(partial(add_to_page, params=params, shown=lasting, metrics=compared, round_=last_round))
