"""A sanity check like Lightning's: runs the module's steps on one batch per phase before any file is written.

``self.trainer.sanity_checking`` is set meanwhile. The module, the logged values and the random generators are restored;
global variables and data of the user's code are not.
"""

from __future__ import annotations

import copy
import itertools
import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from fl_lightning.callbacks.early_stopping import MonitoringCallback
from fl_lightning.core.method import MethodList, check_logits, overrides
from fl_lightning.core.seeding import rng_scope
from fl_lightning.data.client_loaders import Batches, ClientLoader, DataLoaderAdapter, last_batch, without_singles
from fl_lightning.data.partition_adapter import own_module_of
from fl_lightning.engine.evaluation.evaluator import PHASES, STAGES, bound_step, step_name
from fl_lightning.engine.evaluation.loop import BATCH_HOOKS, EPOCH_HOOKS, stage_of
from fl_lightning.engine.run import Run
from fl_lightning.engine.validation import CLIENTS_SHOWN
from fl_lightning.storage.metric_format import tagged
from fl_lightning.utilities.errors import ClientError, UsageError, few, text_of, truncate, with_location

# hooks on which the first training step may depend, and which the check does not call
BEFORE_A_STEP = {"on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"}
# examples per evaluation batch
FEW = 8


def run_sanity_check(run: Run) -> None:
    """Run the module's steps on one batch of training, validation and test data; refuse a failing step."""
    with rng_scope(run.seed, "first_batch"):
        k = next(filter(run.local_training.num_batches, range(run.data.num_clients)), -1)
    if k >= 0 and not (BEFORE_A_STEP & run.worker_module.hooks or getattr(run.data, "is_remote", False)):
        train_on_one(run, k)
        check_single_example(run)
    logged: dict[str, set[str]] = {}
    for phase in PHASES:
        step = step_name(run.client.module, phase)
        names = (*EPOCH_HOOKS, *BATCH_HOOKS, "model_eval", "model_train")
        if step is None or not run.evaluator.has_data(phase):
            logged[phase] = set()
        elif {f"on_{stage_of(step)}_{name}" for name in names}.isdisjoint(run.worker_module.hooks):
            tags = evaluate_one(run, phase, step)
            logged |= {phase: tags} if tags else {}
    for callback in run.callbacks:
        # a callback of the user may log more
        if isinstance(callback, MonitoringCallback) and has_only_own_parts(run):
            callback.check_monitor(logged)


@contextmanager
def trial(run: Run, phase: str, step: str, whose: str, methods: MethodList | None = None) -> Iterator[list[Any]]:
    """Run a step in this context, restore the module, and turn an error into one line about the yielded batch."""
    batches: list[Any] = []
    try:
        with rng_scope(run.seed, f"first_batch/{phase}"), run.client.lifecycle.rehearsing(methods):
            run.worker_module.trainer_shim.sanity_checking = True
            yield batches
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        # whether an operation rejected its inputs, in contrast to an error raised by the user's code
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        explicit = linecache.getline(last_frame.filename, last_frame.lineno or 0).strip().startswith("raise")
        refused = isinstance(error, (RuntimeError, ValueError, IndexError)) and not isinstance(error, RecursionError)
        misfit = refused and (last_frame.filename.startswith(torch.__path__[0]) or not explicit)
        if run.trainer.on_client_error == "raise" and (has_only_own_parts(run) or not batches or misfit):
            model, name_of_data = type(run.client.module).__name__, type(own_module_of(run.data)).__name__
            text = f"model={model}: {step} fails on a batch of {whose} {shapes(batches)}" if batches else ""
            text = text or f"data={name_of_data}: the first batch of {whose} cannot be read"
            hint = "correct it; trainer.fast_dev_run=true shows the traceback"
            line = f"{text}: {truncate(with_location(error), 160)}; {hint}"
            raise UsageError(f"model={model}: {error}" if isinstance(error, ClientError) else line) from error


def has_only_own_parts(run: Run) -> bool:
    """Return whether all methods and callbacks are of this package; hooks of the user's are not called here."""
    return all(map(is_own_part, (*run.methods.methods, *run.callbacks)))


def is_own_part(part: object) -> bool:
    """Return whether a method or a callback is of this package."""
    return type(part).__module__.startswith("fl_lightning.")


def check_single_example(run: Run) -> None:
    """Refuse clients whose last batch has one example, if the model has BatchNorm and cannot train on it.

    A step that returns no loss for it skips the batch: a line names the clients.
    """
    datamodule, fit_progress, batches = run.data, run.worker_module.fit_progress, run.local_training.num_batches
    if not any(isinstance(module, _BatchNorm) for module in run.client.module.modules()):
        return
    single = []
    for k in range(datamodule.num_clients):
        has_last_batch = batches(k) in fit_progress.at(0, batches(k)).passes
        if has_last_batch and last_batch(datamodule, k) == "single":
            single.append(k)
    who = f"{len(single)} of {datamodule.num_clients} clients ({few(single, CLIENTS_SHOWN)}) end with one example"
    try:
        trains = all(train_on_one(run, k, 1) for k in single[:1])
    except UsageError as error:
        why = f"on which training_step fails: {truncate(text_of(error.__cause__ or error), 120)}"
        raise UsageError(f"data={type(datamodule).__name__}: {who}, {why}; {without_singles(datamodule)}") from error
    if not trains:
        why = "which training_step skips, as BatchNorm cannot normalise it"
        rank_zero_info(f"data={type(datamodule).__name__}: {who}, {why}; {without_singles(datamodule)}")


def train_on_one(run: Run, k: int, most: int | None = None) -> bool:
    """Run the training step on the first batch of client ``k``, or on ``most`` examples of it; check the taps.

    Returns:
        Whether the step has returned a loss.
    """
    client, worker_module, methods = run.client, run.worker_module, run.methods.methods
    loading, of_package = run.loaders.train(k, 0, "first_batch"), MethodList([*filter(is_own_part, methods)])
    with trial(run, "train", "training_step", f"client {k}", of_package) as batches, loading as loader:
        fit_progress = worker_module.fit_progress.at(0, len(loader))
        for batch in first_of(loader, most):
            batch = run.loaders.to_device(batch)
            batches.append(batch)
            with run.fabric.autocast(), client.lifecycle.visiting(run.data.info(k), run.server.state, fit_progress):
                worker_module.trainer_shim.begin_visit(*run.local_training.optimizers.first, loader)
                client.visit.logged.begin_batch(batch)
                loss = client.training_step(batch, 0)
                if loss is None:
                    return False
                # penalties and the module's own backward may still have a gradient
                if not (methods or "backward" in worker_module.hooks) and (loss.is_complex() or not loss.requires_grad):
                    kind = "that is complex" if loss.is_complex() else "without a gradient"
                    hint = "compute a real number from the trained parameters, without detach() or item()"
                    raise ClientError(f"training_step returned a loss {kind}; {hint}")
                values = worker_module.taps.values
                for method in methods:
                    # both raise if the forward does not call the submodule, the first one also under torch.no_grad
                    penalises = overrides(method, "penalty")
                    look = values.__getitem__ if penalises else values.check_called
                    for tap in method.requires:
                        look(tap)
                    fixed = []
                    if penalises:
                        fixed = [tap for tap in method.requires if not values[tap].requires_grad]
                    # a method may train modules of its own on a fixed tap
                    if fixed and most is None and not overrides(method, "modules"):
                        hint = "train a layer that they depend on, or leave the method out"
                        text = f"a penalty on {', '.join(fixed)} changes nothing, as no trained layer comes before it"
                        run.trainer.warn(f"method={type(method).__name__}: {text}; {hint}")
                    reads = overrides(method, "transform_logits") or "logits" in method.requires
                    if reads and "logits" in values:
                        check_logits(method, client, values["logits"])
    return True


def evaluate_one(run: Run, phase: str, step: str) -> set[str]:
    """Run the validation or the test step on the first batch of each loader; return the tags that it logs."""
    worker_module = run.worker_module
    with (
        trial(run, phase, step, f"the {phase} data") as batches,
        torch.no_grad(),
        worker_module.evaluating(STAGES[phase]),
    ):
        logged = worker_module.begin_logging()
        for index, loader in enumerate(loaders := run.loaders.evaluation(phase)):
            batches.clear()
            # Batches may have any size
            for batch in first_of(loader, FEW if isinstance(loader, Batches) else None):
                batch = run.loaders.to_device(batch, index)
                batches.append(batch)
                logged.begin_batch(batch, index if len(loaders) > 1 else None)
                worker_module.begin_hook(step)
                with run.fabric.autocast():
                    bound_step(run.client.module, step, index)(batch, 0)
        return {tagged(phase, name) for name in logged.names}


def first_of(loader: ClientLoader, most: int | None = None) -> list[Any]:
    """Return the first batch of a loader, or ``most`` examples of it; empty for an iterable that a pass may change."""
    inner: Any = loader.loader if isinstance(loader, DataLoaderAdapter) else None
    indexed = isinstance(inner, DataLoader) and not isinstance(inner.dataset, IterableDataset)
    if indexed and most is not None and not inner.num_workers:
        rows: list[Any] = next(iter(inner.batch_sampler or ()), [])[:most]
        dataset = inner.dataset
        fetch = getattr(dataset, "__getitems__", None)
        examples = fetch(rows) if fetch else [dataset[row] for row in rows]
        return [inner.collate_fn(examples)] if rows else []
    if isinstance(loader, Batches):
        loader = copy.copy(loader)
        loader.rows, loader.drop_last = loader.rows[:most], False
    elif not (indexed or isinstance(inner, (list, tuple))):
        return []
    return [batch for _, batch in itertools.islice(loader.batches(), 1)]


def shapes(batch: Any) -> str:
    """Return the shapes and types of the tensors of a batch as text."""
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    texts = []
    for tensor in tensors:
        texts.append(f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}")
    return truncate(f"({', '.join(texts)})", 70)
