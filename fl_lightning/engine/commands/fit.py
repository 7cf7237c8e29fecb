"""Fit, evaluation and prediction, as each worker executes them."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info

from fl_lightning.callbacks.base import Callback, named
from fl_lightning.core.seeding import rng_scope
from fl_lightning.core.state import State
from fl_lightning.data.client_loaders import ClientLoader, as_client_loader
from fl_lightning.data.partition_adapter import own_module_of
from fl_lightning.distributed.launcher import show_idle_cores
from fl_lightning.engine.checkpointing import (
    checkpoint_to_resume,
    restore_callbacks,
    restore_run,
    save_run,
    verified_checkpoint,
)
from fl_lightning.engine.evaluation.evaluator import PHASES, bound_step, check_loader_index, step_name
from fl_lightning.engine.evaluation.loop import can_share, evaluation_hooks
from fl_lightning.engine.fingerprint import (
    FREE_OF_TRAINER,
    describe_data,
    describe_object,
    differences,
    identity,
    message,
    shown_path,
)
from fl_lightning.engine.model_io import check_storable, load_model, load_weights, save_model
from fl_lightning.engine.rounds import check_metrics, run_round
from fl_lightning.engine.run import Run
from fl_lightning.engine.sanity_check import run_sanity_check
from fl_lightning.engine.validation import check_folder, name_large_batches, warn_of_averaged_statistics
from fl_lightning.storage.atomic_io import save
from fl_lightning.storage.checkpoint import LAST, read
from fl_lightning.storage.hyperparameters import of_config, only_plain, plain_arguments
from fl_lightning.storage.metric_format import tagged
from fl_lightning.storage.run_folder import naming_the_file
from fl_lightning.storage.serializable import is_storable, on_cpu
from fl_lightning.training.device_loaders import flattened
from fl_lightning.utilities.errors import UsageError, count, require
from fl_lightning.utilities.lightning_compat import is_overridden

# arguments of the command that do not define the run
FREE_OF_COMMAND = ("ckpt_path", "allow_changes")


def fit(run: Run, ckpt_path: str | Path | None, weights: Path | None = None, allow_changes: bool = False) -> None:
    """Run all rounds from the module's or the given weights, or the rounds after a checkpoint."""
    try:
        source, checkpoint = prepare_fit(run, ckpt_path, weights, allow_changes)
    except BaseException:  # a notebook may resume the run after a refusal
        run.folder.release()
        raise
    with run.folder.needing_room(run.server):
        run.folder.open(source, run.metrics.history)
        folder = run.folder.shared = run.workers.gather(run.folder.path, "folder of the run")[0]
        if source is not None and run.folder.resumed and folder is not None:
            if run.folder.checkpoints is not None:  # all workers have read the old files by now
                run.folder.checkpoints.resume(source)
            source = source.with_name(LAST)
        status, params = "failed", hyperparameters(run)
        try:
            run.folder.log_hyperparams(params)
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
    checkpoint = restore_run(run, source, allow_changes)
    client = run.client
    warn_of_averaged_statistics(run.trainer, client, run.data)
    name_large_batches(run.data)
    if step_name(client.module, "test") is None and any(map(run.evaluator.has_data, PHASES)):
        hint = "it has no test_step and no validation_step, so no round is evaluated; define one that logs a metric"
        rank_zero_info(f"model={type(client.module).__name__}: {hint}")
    if not client.has_global_model:
        some = "all" if not client.sent else f"{len(client.kept)} of {len(client.live)}"
        stay = f"{some} entries of the state stay with each client: metrics are means over the clients' own models"
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


def play_rounds(run: Run, first: int, folder: Path | None) -> None:
    """Run the rounds from ``first`` on, with checkpoints in ``folder``, until the last one or ``should_stop``."""
    if first >= run.trainer.max_rounds > 0:
        run.trainer.warn(f"trainer.max_rounds={run.trainer.max_rounds}: the checkpoint has {first}, nothing is trained")
    signals, saved = run.workers.signals, first
    signals.install()
    for round_ in range(first, run.trainer.max_rounds):
        signals.begin(round_, saved if folder is not None else round_)
        last = run_round(run, round_)
        due = (round_ + 1) % run.trainer.checkpoint_every_n_rounds == 0 or run.trainer.save_best
        if (last or due or signals.agreed) and folder is not None:
            path = folder / "checkpoints/last.ckpt"
            # a failed write leaves the last checkpoint intact
            with run.metrics.timed_writing(), naming_the_file(path, round_):
                save_run(run, path.parent)
            signals.checkpoint, saved = path, round_ + 1
        if last:
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
    last = run.metrics.history[-1] if run.metrics.history else {"round": 0}
    compared = {
        tag: value
        for tag, value in last.items()
        if tag == "round" or any(tagged(phase, tag) == tag for phase in ("train", "val", "test"))
    }
    # the other arguments may change when the run resumes in its folder
    trainer = {key: value for key, value in params["trainer"].items() if key not in FREE_OF_TRAINER}
    lasting = {key: value for key, value in params.items() if key not in FREE_OF_COMMAND} | {"trainer": trainer}
    run.folder.compare_hyperparams(params, lasting, compared, int(last["round"]))


def load_given(run: Run, ckpt_path: str | Path | None, weights: Path | None) -> dict[int, State]:
    """Load a checkpoint (``last``: of the newest version), or else the given weights, if any.

    Returns:
        The state entries that stay with each client; empty if the checkpoint has none.
    """
    source = None if ckpt_path is None else verified_checkpoint(run, ckpt_path)
    if source is None and weights is not None:
        load_weights(run, weights)
    if source is None:
        return {}
    contents = read(source)
    if "server" in contents:
        methods = {name: describe_object(method) for name, method in named(run.methods.methods).items()}
        present = {**identity(run), "description": {"method": methods, "data": describe_data(run.data)}}
        if changes := differences(present, contents):
            where = f"ckpt_path={shown_path(source)!r}"
            run.trainer.warn(message(where, changes, "the present values are used"))
    return load_model(run, source)


def evaluate_once(run: Run, phase: str, ckpt_path: str | Path | None, weights: Path | None = None) -> dict[str, float]:
    """Return the metrics of the module or of a checkpoint: its global model, or means over the clients' own models.

    Of a run with both, the means begin with ``personal/``.
    """
    hint = "train with data.val_fraction=0.1" if hasattr(run.data, "val_fraction") else f"define {phase}_dataloader"
    require(run.evaluator.has_data(phase), "data", type(run.data).__name__, f"it has no {phase} data; {hint}")
    module, name = run.client.module, "validation_step" if phase == "val" else "test_step or validation_step"
    require(step_name(module, phase) is not None, "model", type(module).__name__, f"it has no {name}; define one")
    own = load_given(run, ckpt_path, weights)
    state = run.client.state()
    metrics = {} if own else run.evaluator.evaluate_global_model(phase, state, observed=False, keeps=True)
    if own or (run.methods.having("personal_state") and run.client.memories().owners):
        parts = run.runner.place_models(run)
        means = run.evaluator.means(run.runner.evaluate_models(run, phase, state, parts, observed=False))
        start = "" if own else f"personal/{run.methods.evaluation_point}"
        metrics |= {start + tag: value for tag, value in means.items()}
        run.worker_module.load(state)
    if own and run.client.has_global_model:
        hint = "the models are evaluated without these; pass the methods of the run"
        run.trainer.warn(f"method={run.methods.names}: the file has entries of {count(len(own), 'client')}; {hint}")
    check_metrics(run, metrics, phase)
    return metrics


def predict_once(
    run: Run, ckpt_path: str | Path | None, weights: Path | None = None, output: Path | None = None
) -> list[Any]:
    """Return the outputs of ``predict_step`` of the module or of a checkpoint's global model, batch by batch."""
    if output is not None:
        check_folder("output", output.parent)
    own = load_given(run, ckpt_path, weights)
    hint = f"entries of the state stay with {count(len(own), 'client')}, so it has no global model to predict with"
    require(not own, "ckpt_path", str(ckpt_path), hint)
    outputs = predict(run)
    if output is not None and run.workers.rank == 0:
        hint = f"{output.name} can only hold tensors and plain values; predict_step returned other objects"
        require(is_storable(outputs), "output", str(output), hint)
        save(outputs, output)
    return outputs


@torch.no_grad()
def predict(run: Run) -> list[Any]:
    """Return the outputs of all batches in order, on the CPU; with several loaders, one list for each."""
    own = is_overridden("predict_dataloader", run.data)
    key = f"data={type(own_module_of(run.data)).__name__}: predict_dataloader"
    loaders = [as_client_loader(part) for part in (flattened(run.data.predict_dataloader(), key) if own else [])]
    loaders = loaders or run.loaders.evaluation("test")
    require(bool(loaders), "data", type(run.data).__name__, "it has no predict_dataloader() and no test data")
    _, *hooks = evaluation_hooks(run.client.module, "predict_step")
    check_loader_index(run.client.module, hooks, len(loaders))
    with run.worker_module.evaluating("predict"), run.workers.local_only(not can_share(run.client, "predict")):
        with rng_scope(run.seed, "predict"):
            run.worker_module.call("on_predict_start")
            run.worker_module.call("on_predict_epoch_start")
        outputs = [predicted(run, loader, index, len(loaders)) for index, loader in enumerate(loaders)]
        run.worker_module.call("on_predict_epoch_end")
        run.worker_module.call("on_predict_end")
        run.worker_module.keep_attributes(run.workers.size)
        absent, ordered = object(), []
        for share in outputs:  # worker r of n has the batches r, r + n, r + 2n, ...
            rows = zip_longest(*run.workers.gather(share, "predictions"), fillvalue=absent)
            ordered.append([output for row in rows for output in row if output is not absent])
    run.worker_module.begin_logging(1.0)
    return ordered if len(ordered) > 1 else ordered[0]


def predicted(run: Run, loader: ClientLoader, index: int, number: int) -> list[Any]:
    """Return the outputs of this worker's batches of one loader."""
    step, outputs = bound_step(run.client.module, "predict_step", index), []
    which, own = (index,) if number > 1 else (), is_overridden("predict_step", run.client.module)
    # a loader that shuffles draws the same order on every worker
    with rng_scope(run.seed, "predict", index):
        for batch_idx, batch in run.loaders.share(loader, run.workers.rank, run.workers.size):
            run.workers.check()
            # a seed per batch makes the random numbers independent of the number of workers
            with rng_scope(run.seed, "predict", index, batch_idx):
                batch = run.loaders.to_device(batch, index)
                run.worker_module.call("on_predict_batch_start", batch, batch_idx, *which)
                run.worker_module.begin_hook("predict_step")
                try:
                    with run.fabric.autocast():
                        output = step(batch, batch_idx)
                except (TypeError, AttributeError) as error:
                    if own or isinstance(batch, torch.Tensor):
                        raise
                    name, kind = type(run.client.module).__name__, type(batch).__name__
                    hint = f"the default calls {name} on the whole batch, a {kind}; override it to select the inputs"
                    raise UsageError(f"{name}.predict_step: {hint}") from error
                run.worker_module.call("on_predict_batch_end", output, batch, batch_idx, *which)
            outputs.append(on_cpu(output))
    return outputs


def evaluate_and_observe(run: Run, phase: str, ckpt_path: str | Path | None, weights: Path | None) -> dict[str, float]:
    """Return the metrics of a model and the values of callbacks, which see it as the global model."""
    run.metrics.update(evaluate_once(run, phase, ckpt_path, weights))
    hook = "on_evaluation_command_end"
    if any(getattr(type(callback), hook, None) not in (None, getattr(Callback, hook)) for callback in run.callbacks):
        run.server.assign(run.client.state())
        run.methods.on_fit_start(run.server)  # sets the methods' server values to their initial ones
        run.call(hook, phase=phase)
    return run.metrics.current
