"""What the commands do in each worker: a fit of all rounds, an evaluation, a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.client.logged import tagged
from fl_lightning.engine.checkpointing import (
    begin_in_folder,
    checkpoint_to_resume,
    restore_callbacks,
    restore_run,
    save_run,
    verified_checkpoint,
)
from fl_lightning.engine.checks import check_folder
from fl_lightning.engine.commands import predict as prediction
from fl_lightning.engine.evaluation.evaluator import step_name
from fl_lightning.engine.first_batch import meet_first_batch
from fl_lightning.engine.identity.description import FREE_OF_TRAINER
from fl_lightning.engine.model_files import check_storable, load_model, load_weights, save_model
from fl_lightning.engine.rounds import check_metrics, play_round
from fl_lightning.errors import require
from fl_lightning.records.checkpoint import Checkpoint
from fl_lightning.records.files import save
from fl_lightning.records.folder import naming_the_file
from fl_lightning.records.hyperparameters import of_config, of_objects
from fl_lightning.records.plain import is_storable
from fl_lightning.seeding import ambient
from fl_lightning.state import State

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run

# arguments of the command that change what is done now, not what the run is
FREE_OF_COMMAND = ("ckpt_path", "allow_changes")


def fit(run: Run, ckpt_path: str | Path | None, weights: Path | None = None, allow_changes: bool = False) -> None:
    """Run all rounds, from the module's weights or given ones, or those after a checkpoint."""
    found, checkpoint = prepare_fit(run, ckpt_path, weights, allow_changes)
    with run.folder.needing_room(run.server):
        run.folder.open(None if found is None else found.path, run.metrics.history)
        folder = run.folder.shared = run.workers.gather(run.folder.path)[0]
        begun = begin_in_folder(run, found)
        status, params = "failed", hyperparameters(run)
        try:
            run.folder.log_hyperparams(params)
            begin_fit(run, fresh=found is None)
            run.call("on_fit_start")
            restore_callbacks(run, checkpoint)
            run.workers.signals.checkpoint = begun
            play_rounds(run, checkpoint["round"], folder)
            run.call("on_fit_end")
            if "on_fit_end" in run.resident.hooks:
                run.resident.load(run.methods.evaluated_state(run.server))  # a run may resume with no round left
                # the clock stands where the round after the last one would begin
                run.resident.begin_round(run.server.round + 1 if run.metrics.history else 0)
                run.resident.call("on_fit_end")
            if folder is not None and run.client.sent:
                save_model(run, folder / "checkpoints" / "model.ckpt")
            compare_hyperparams(run, params)
            status = "success"
            run.workers.signals.end()
        finally:
            run.call("teardown")
            run.folder.close(status)
            run.resident.load(run.methods.evaluated_state(run.server))


def prepare_fit(
    run: Run, ckpt_path: str | Path | None, weights: Path | None, allow_changes: bool
) -> tuple[Checkpoint | None, dict[str, Any]]:
    """All that a fit does before it writes anything.

    Returns:
        The checkpoint that the run resumes from, None without one, and its contents.
    """
    found = checkpoint_to_resume(run, ckpt_path)
    if weights is not None and found is None:
        load_weights(run, weights)
    run.methods.on_fit_start(run.server)
    checkpoint = restore_run(run, found, allow_changes)
    check_storable(run)
    if found is None and not run.trainer.fast_dev_run:
        meet_first_batch(run)
    warn_of_kept_entries(run)
    return found, checkpoint


def begin_fit(run: Run, fresh: bool) -> None:
    """Call the module's hook, and take the module as it leaves it; in a ``fresh`` run its weights, too."""
    with ambient(run.seed, "on_fit_start"):
        run.resident.call("on_fit_start")
    if fresh and "on_fit_start" in run.resident.hooks:
        run.server.assign(run.client.state())
    run.resident.begin_run()
    warn_of_modes(run)


def play_rounds(run: Run, first: int, folder: Path | None) -> None:
    """Run the rounds from ``first`` on, with checkpoints in ``folder``, until the last one or ``should_stop``."""
    if first >= run.trainer.max_rounds > 0:
        run.trainer.warn(f"trainer.max_rounds={run.trainer.max_rounds}: the checkpoint has {first}, nothing is trained")
    signals, saved = run.workers.signals, first
    signals.install()
    for round_ in range(first, run.trainer.max_rounds):
        signals.begin(round_, saved if folder is not None else round_)
        last = play_round(run, round_)
        due = (round_ + 1) % run.trainer.checkpoint_every_n_rounds == 0 or run.trainer.keep_as_best
        if (last or due or signals.agreed) and folder is not None:
            save_checkpoint(run, folder / "checkpoints")
            signals.checkpoint, saved = folder / "checkpoints/last.ckpt", round_ + 1
        if last:
            return
        if signals.agreed:
            raise signals.stopped()


def save_checkpoint(run: Run, folder: Path) -> None:
    """Write a checkpoint.

    Raises:
        ClientError: it cannot be written; the last one is as it was.
    """
    with run.metrics.timed_writing(), naming_the_file(folder / "last.ckpt", run.server.round):
        save_run(run, folder)


def hyperparameters(run: Run) -> dict[str, Any]:
    """The hyper-parameters for the loggers: the resolved config, or what is known of the objects of the run."""
    trainer, methods = run.trainer, dict(zip(run.methods.names, run.methods.methods, strict=True))
    config = trainer.config
    params = of_config(config) if config else of_objects(run.client.module, trainer.arguments, methods)
    return {"methods": "+".join(run.methods.names) or "fedavg", **params}


def compare_hyperparams(run: Run, params: dict[str, Any]) -> None:
    """Log the hyper-parameters with the last round, and its metrics of the training, validation and test data."""
    last = run.metrics.history[-1] if run.metrics.history else {"round": 0}
    compared = {
        tag: value
        for tag, value in last.items()
        if tag == "round" or any(tagged(phase, tag) == tag for phase in ("train", "val", "test"))
    }
    run.folder.compare_hyperparams(params, lasting(params), compared, int(last["round"]))


def lasting(params: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters without those that a run may change when it resumes in its folder."""
    trainer = {key: value for key, value in params["trainer"].items() if key not in FREE_OF_TRAINER}
    return {key: value for key, value in params.items() if key not in FREE_OF_COMMAND} | {"trainer": trainer}


def load_given(run: Run, ckpt_path: str | Path | None, weights: Path | None) -> dict[int, State]:
    """Load a checkpoint (``last`` is that of the newest version) or, without one, given weights or nothing.

    Returns:
        The state entries that stay with each client, where a checkpoint has any.
    """
    found = None if ckpt_path is None else verified_checkpoint(run, ckpt_path)
    hint = f"no version of the run in {str(run.folder.root)!r} has a checkpoint; leave it out"
    require(ckpt_path is None or found is not None, "ckpt_path", str(ckpt_path), hint)
    if found is None and weights is not None:
        load_weights(run, weights)
    return {} if found is None else load_model(run, found.path)


def evaluate_once(run: Run, phase: str, ckpt_path: str | Path | None, weights: Path | None = None) -> dict[str, float]:
    """Metrics of the module as it is, or of a checkpoint: its global model, or means over its clients' own ones."""
    require(run.evaluator.has_data(phase), "data", type(run.data).__name__, f"it has no {phase} data")
    module, name = run.client.module, "validation_step" if phase == "val" else "test_step or validation_step"
    require(step_name(module, phase) is not None, "model", type(module).__name__, f"it has no {name}; define one")
    own = load_given(run, ckpt_path, weights)
    state = run.client.state()
    if own:
        mine = ((k, own[k]) for k in sorted(own)[run.workers.rank :: run.workers.size])
        metrics = run.evaluator.own_models(phase, state, mine, observed=False)
    else:
        metrics = run.evaluator.one_model(phase, state, observed=False)
    check_metrics(run, metrics, phase)
    return metrics


def predict_once(
    run: Run, ckpt_path: str | Path | None, weights: Path | None = None, output: Path | None = None
) -> list[Any]:
    """The outputs of ``predict_step`` of the module as it is, or of a checkpoint's global model, batch by batch."""
    if output is not None:
        check_folder("output", output.parent)
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
