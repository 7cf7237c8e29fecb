"""Evaluation and prediction, as each worker executes them."""

from __future__ import annotations

from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

from fl_lightning.core.method import overrides
from fl_lightning.core.seeding import rng_scope
from fl_lightning.core.state import State
from fl_lightning.data.client_loaders import ClientLoader, as_client_loader
from fl_lightning.data.partition_adapter import own_module_of
from fl_lightning.engine.checkpointing import verified_checkpoint
from fl_lightning.engine.evaluation.evaluator import bound_step, check_loader_index, step_name
from fl_lightning.engine.evaluation.loop import can_share, evaluation_hooks
from fl_lightning.engine.fingerprint import description_of, differences, identity, message
from fl_lightning.engine.model_io import load_model, load_weights
from fl_lightning.engine.rounds import check_metrics
from fl_lightning.engine.run import Run
from fl_lightning.engine.validation import check_folder
from fl_lightning.storage.atomic_io import save
from fl_lightning.storage.checkpoint import read
from fl_lightning.storage.serializable import is_storable, on_cpu
from fl_lightning.training.device_loaders import flattened
from fl_lightning.utilities.errors import UsageError, count, require, writing_into
from fl_lightning.utilities.lightning_compat import is_overridden


def load_to_evaluate(run: Run, ckpt_path: str | Path | None, weights: Path | None) -> dict[int, State]:
    """Load a checkpoint (``last``: of the newest version), or else the given weights, if any.

    Methods have their server values, too, except those that give the evaluated state, which the file holds.

    Returns:
        The state entries that stay with each client; empty if the checkpoint has none.
    """
    source = None if ckpt_path is None else verified_checkpoint(run, ckpt_path)
    if source is None and weights is not None:
        load_weights(run, weights)
    contents = {} if source is None else read(source)
    if source is not None and "server" in contents:
        parts = {section: description_of(run)[section] for section in ("method", "data")}
        if changes := differences({**identity(run), "description": parts}, contents):
            run.trainer.warn(message(source, changes, "the present values are used"))
    personal = {} if source is None else load_model(run, source)
    run.server.assign(run.client.state())
    run.methods.on_fit_start(run.server)  # sets the methods' server values to their initial ones
    # the state in the file is the evaluated one
    names = [method.name for method in run.methods.methods if not overrides(method, "evaluated_state")]
    saved = {name: values for name, values in contents.get("methods", {}).items() if name in names}
    run.methods.load_state_dict(run.methods.state_dict() | saved, run.fabric.device)
    return personal


def evaluate_and_observe(run: Run, phase: str, ckpt_path: str | Path | None, weights: Path | None) -> dict[str, float]:
    """Return the metrics of the module or of a checkpoint: its global model, or means over the clients' own models.

    Of a run with both, the means begin with ``personal/``. The metrics include the values of callbacks, which see the
    model as the global one.
    """
    hint = "train with data.val_fraction=0.1" if hasattr(run.data, "val_fraction") else f"define {phase}_dataloader"
    require(run.evaluator.has_data(phase), "data", type(run.data).__name__, f"it has no {phase} data; {hint}")
    module, name = run.client.module, "validation_step" if phase == "val" else "test_step or validation_step"
    require(step_name(module, phase) is not None, "model", type(module).__name__, f"it has no {name}; define one")
    personal = load_to_evaluate(run, ckpt_path, weights)
    state = run.client.state()
    metrics = {} if personal else run.evaluator.evaluate(phase, state, observed=False, keeps=True)
    if personal or (run.methods.personalizes and run.client.memories().owners):
        parts = run.runner.place_models(run)
        means = run.evaluator.means(run.runner.evaluate_models(run, phase, state, parts, observed=False))
        prefix = "" if personal else f"personal/{run.methods.evaluation_point}"
        metrics |= {prefix + tag: value for tag, value in means.items()}
        run.worker_module.load(state)
    if personal and run.client.has_global_model:
        hint = "the models are evaluated without these; pass the methods of the run"
        run.trainer.warn(
            f"method={run.methods.names}: the file has entries of {count(len(personal), 'client')}; {hint}"
        )
    check_metrics(run, metrics, phase)
    run.metrics.update(metrics)
    run.call("on_evaluation_command_end", phase=phase)
    return run.metrics.current


def predict_once(
    run: Run, ckpt_path: str | Path | None, weights: Path | None = None, output: Path | None = None
) -> list[Any]:
    """Return the outputs of ``predict_step`` of the module or of a checkpoint's global model, batch by batch."""
    if output is not None:
        require(not output.is_dir(), "output", str(output), "it is a folder; pass a file")
        check_folder("output", output.parent)
    personal = load_to_evaluate(run, ckpt_path, weights)
    hint = f"entries of the state stay with {count(len(personal), 'client')}, so it has no global model to predict with"
    require(not personal, "ckpt_path", str(ckpt_path), hint)
    outputs = predict(run)
    if output is not None and run.workers.rank == 0:
        hint = f"{output.name} can only hold tensors and plain values; predict_step returned other objects"
        require(is_storable(outputs), "output", str(output), hint)
        with writing_into("output", output):
            save(outputs, output)
    return outputs


@torch.no_grad()
def predict(run: Run) -> list[Any]:
    """Return the outputs of all batches in order, on the CPU; with several loaders, one list for each."""
    loaders = []
    if is_overridden("predict_dataloader", run.data):
        key = f"data={type(own_module_of(run.data)).__name__}: predict_dataloader"
        returned = flattened(run.data.predict_dataloader(), key)
        loaders = [as_client_loader(loader) for loader in returned]
    loaders = loaders or run.loaders.evaluation("test")
    require(bool(loaders), "data", type(run.data).__name__, "it has no predict_dataloader() and no test data")
    _, *hooks = evaluation_hooks(run.client.module, "predict_step")
    check_loader_index(run.client.module, hooks, len(loaders))
    with run.worker_module.evaluating("predict"), run.workers.local_only(not can_share(run.client, "predict")):
        with rng_scope(run.seed, "predict"):
            run.worker_module.call("on_predict_start")
            run.worker_module.call("on_predict_epoch_start")
        outputs, number = [], len(loaders)
        for index, loader in enumerate(loaders):
            outputs.append(predicted(run, loader, index, number))
        run.worker_module.call("on_predict_epoch_end")
        run.worker_module.call("on_predict_end")
        run.worker_module.keep_attributes(run.workers.size)
        absent, ordered = object(), []
        for share in outputs:  # worker r of n has the batches r, r + n, r + 2n, ...
            padded = chain.from_iterable(zip_longest(*run.workers.gather(share, "predictions"), fillvalue=absent))
            ordered.append([output for output in padded if output is not absent])
    run.worker_module.begin_logging(1.0)
    return ordered if len(ordered) > 1 else ordered[0]


def predicted(run: Run, loader: ClientLoader, index: int, number: int) -> list[Any]:
    """Return the outputs of this worker's batches of one loader."""
    step, outputs = bound_step(run.client.module, "predict_step", index), []
    loader_index, has_step = (index,) if number > 1 else (), is_overridden("predict_step", run.client.module)
    # a loader that shuffles draws the same order on every worker
    with rng_scope(run.seed, "predict", index):
        for batch_idx, batch in run.loaders.share(loader, run.workers.rank, run.workers.size):
            run.workers.check()
            # a seed per batch makes the random numbers independent of the number of workers
            with rng_scope(run.seed, "predict", index, batch_idx):
                batch = run.loaders.to_device(batch, index)
                run.worker_module.call("on_predict_batch_start", batch, batch_idx, *loader_index)
                run.worker_module.begin_hook("predict_step")
                try:
                    with run.fabric.autocast():
                        output = step(batch, batch_idx)
                except (TypeError, AttributeError) as error:
                    if has_step or isinstance(batch, torch.Tensor):
                        raise
                    name, kind = type(run.client.module).__name__, type(batch).__name__
                    hint = f"the default calls {name} on the whole batch, a {kind}; override it to select the inputs"
                    raise UsageError(f"{name}.predict_step: {hint}") from error
                run.worker_module.call("on_predict_batch_end", output, batch, batch_idx, *loader_index)
            outputs.append(on_cpu(output))
    return outputs
