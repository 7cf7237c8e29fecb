"""The model meets one batch of each kind before anything is written: what does not fit is refused there.

As Lightning's sanity check does, this calls the module's own steps, with ``self.trainer.sanity_checking`` set. It does
so in a forked process where that is possible, so that nothing of it is left, not even what user code keeps outside of
the module. Elsewhere the module, what it logs and the random generators are put back.
"""

from __future__ import annotations

import copy
import itertools
import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from fl_lightning.data.loaders import Batches, ClientLoader, PlainLoader, last_batch, without_singles
from fl_lightning.data.partitioned import own_module_of
from fl_lightning.engine.evaluation.evaluator import PHASES, STAGES, bound_step, step_name
from fl_lightning.engine.evaluation.loop import BATCH_HOOKS, EPOCH_HOOKS, stage_of
from fl_lightning.engine.processes.apart import can_try_apart, is_ours, said_by_fork
from fl_lightning.engine.run import Run
from fl_lightning.engine.validation import CLIENTS_SHOWN, few
from fl_lightning.errors import ClientError, UsageError, clipped, located, text_of
from fl_lightning.method import Method, MethodList, check_logits, overrides
from fl_lightning.seeding import ambient

# hooks on whose work the first training step may rely; they are not called here
BEFORE_A_STEP = {"on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"}
# examples of an evaluation
FEW = 8
# what moves a batch to the device
OF_TRANSFER = "the batch's transfer"
# what torch raises for inputs, targets and shapes that do not fit
MISFITS = (RuntimeError, ValueError, IndexError)
CURE = "correct it; with trainer.fast_dev_run=true it has its traceback"


def meet_first_batch(run: Run) -> None:
    """Run the module's steps on one batch of training, validation and test data, and the hooks of the user's methods.

    Nothing of it is left. A hook of a method that fails, and not by what it returns, is left to the run, which calls
    all that this trial does not.

    Raises:
        UsageError: a step fails, its batch cannot be read, a tap does not fit the model, or a hook of a method returns
            what it must not, or writes to what it may only read.
    """
    own_methods = any(not is_ours(method) for method in run.methods.methods)
    own = own_methods or not (is_ours(run.client.module) and is_ours(own_module_of(run.data)))
    if not (own and can_try_apart(run.fabric.device)):
        return try_batches(run)
    text = said_by_fork(partial(try_batches, run, forked=True, methods=own_methods))
    if text:
        raise UsageError(text)


def try_batches(run: Run, forked: bool = False, methods: bool = False) -> None:
    """Run the steps and, where asked, the hooks of ``methods``; in a ``forked`` process any loader may be tried.

    Raises:
        UsageError: as :func:`meet_first_batch`.
    """
    # the first client that has a batch
    with ambient(run.seed, "first_batch"):
        k = next(filter(run.local_training.batches, range(run.data.num_clients)), -1)
    trains = k >= 0 and not (BEFORE_A_STEP & run.resident.hooks or getattr(run.data, "elsewhere", False))
    if trains:
        with trial(run, "train"):
            train_on_one(run, k, forked)
        meet_single_example(run, forked)
    for phase in PHASES:
        step = step_name(run.client.module, phase)
        # on whose work the step may rely, or that would be called once more
        names = (*EPOCH_HOOKS, *BATCH_HOOKS, "model_eval", "model_train")
        if step is not None and not {f"on_{stage_of(step)}_{name}" for name in names} & run.resident.hooks:
            with trial(run, phase), torch.no_grad():
                evaluate_one(run, phase, step, forked)
    if trains and methods and run.trainer.on_client_error == "raise":
        with trial(run, "methods", run.methods):
            visit_without_steps(run, k)


@contextmanager
def trial(run: Run, purpose: str, methods: MethodList | None = None) -> Iterator[None]:
    """In this block nothing that the module does lasts."""
    with ambient(run.seed, f"first_batch/{purpose}"), run.client.rehearsing(methods):
        run.resident.stand_in.sanity_checking = True
        yield


def visit_without_steps(run: Run, k: int) -> None:
    """A visit of client ``k``, on its first batch and without an optimizer's step."""
    client = run.client
    run.methods.on_round_start(run.server)
    with run.loaders.train(k, 0) as loader:
        clock = run.resident.clock.at(0, len(loader))
        for rows, batch in itertools.islice(run.loaders.batches(loader), 1):
            with client.visiting(run.data.info(k), run.server.state, clock) as visit, run.fabric.autocast():
                visit.logged.begin_batch(batch)
                client.training_step(batch, 0, rows)
                client.finish()


def meet_single_example(run: Run, forked: bool) -> None:
    """Refuse clients that end with a batch of one example, if the model has BatchNorm and cannot train on it.

    Raises:
        UsageError: the training step fails on one example.
    """
    if not any(isinstance(module, _BatchNorm) for module in run.client.module.modules()):
        return
    data, clock, batches = run.data, run.resident.clock, run.local_training.batches
    whole = (k for k in range(data.num_clients) if batches(k) in clock.at(0, batches(k)).passes)
    single = [k for k in whole if last_batch(data, k) == "single"]
    if not single:
        return
    try:
        with trial(run, "single"):
            train_on_one(run, single[0], forked, 1)
    except UsageError as error:
        who = f"{len(single)} of {data.num_clients} clients ({few(single, CLIENTS_SHOWN)}) end with one example"
        why = f"on which training_step fails: {clipped(text_of(error.__cause__ or error), 120)}"
        raise UsageError(f"data={type(data).__name__}: {who}, {why}; {without_singles(data)}") from error


def train_on_one(run: Run, k: int, forked: bool, most: int | None = None) -> None:
    """The training step on the first batch of client ``k``, or on ``most`` of its examples, and the taps' records."""
    client, whose = run.client, f"client {k}"
    with run.loaders.train(k, 0, "first_batch") as loader:
        for batch in first_of(run, loader, whose, forked, most):
            run.resident.stand_in.clock.batches = len(loader)
            run.resident.stand_in.begin_visit(*run.local_training.optimizers.first, loader)
            with attempt(run, OF_TRANSFER, whose, batch):
                batch = run.loaders.to_device(batch)
                client.visit.logged.begin_batch(batch)
                with run.fabric.autocast(), run.resident.taps.recorded(), attempt(run, "training_step", whose, batch):
                    check_loss(run, client.own_loss(batch, 0))


def check_loss(run: Run, loss: Tensor | None) -> None:
    """Refuse a loss that cannot be trained, and a tap that its computation has not recorded."""
    if loss is None:
        return
    # the penalties of methods may have one, and so may what the module's own backward makes of it
    ours = not run.methods.methods and "backward" not in run.resident.hooks
    if ours and (loss.is_complex() or not loss.requires_grad):
        hint = "compute a real number from the parameters that are trained, without detach() or item()"
        kind = "that is complex" if loss.is_complex() else "without a gradient"
        raise ClientError(f"training_step returned a loss {kind}; {hint}")
    values = run.resident.taps.values
    for method in run.methods.methods:
        # each raises where the forward does not call the submodule, and the first where it does so without gradient
        look = values.__getitem__ if type(method).penalty is not Method.penalty else values.check_called
        for tap in method.requires:
            look(tap)
        if overrides(method, "transform_logits") and "logits" in values:
            check_logits(method, run.client, values["logits"])


def evaluate_one(run: Run, phase: str, step: str, forked: bool) -> None:
    """The validation or the test step on the first batch of each loader."""
    client, whose = run.client, f"the {phase} data"
    with run.resident.evaluating(STAGES[phase]):
        logged = run.resident.begin_logging()
        for index, loader in enumerate(loaders := run.loaders.evaluation(phase)):
            # of Batches it is known that a batch of any size will do
            for batch in first_of(run, loader, whose, forked, FEW if isinstance(loader, Batches) else None):
                with attempt(run, OF_TRANSFER, whose, batch):
                    batch = run.loaders.to_device(batch, index)
                    logged.begin_batch(batch, index if len(loaders) > 1 else None)
                    run.resident.begin_hook(step)
                    with run.fabric.autocast(), attempt(run, step, whose, batch):
                        bound_step(client.module, step, index)(batch, 0)


def first_of(run: Run, loader: ClientLoader, whose: str, forked: bool, most: int | None = None) -> list[Any]:
    """The first batch of a loader; none of one that a pass might change, and of one whose failure may be the fork's.

    Args:
        run: the run.
        loader: the loader.
        whose: whose data it has, for errors.
        forked: whether this is a forked process.
        most: examples of the batch, where the loader knows its rows; None is all.

    Raises:
        UsageError: an augmentation does not fit the images, or the data set fails.
    """
    inner: Any = loader.loader if isinstance(loader, PlainLoader) else None
    indexed = isinstance(inner, DataLoader) and not isinstance(inner.dataset, IterableDataset)
    same = isinstance(loader, Batches) or isinstance(inner, (list, tuple)) or indexed
    # what an iterable needs may be made in the processes that read it
    in_processes = getattr(inner, "num_workers", 0) > 0
    if not same and (not forked or in_processes):
        return []
    try:
        if isinstance(loader, Batches):
            loader = copy.copy(loader)
            loader.rows, loader.drop_last = loader.rows[:most], False
        if indexed:
            return first_of_dataset(inner, most)
        return [batch for _, batch in itertools.islice(loader.batches(), 1)]
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        if run.trainer.on_client_error == "raise" and same and not in_processes:
            kind = type(own_module_of(run.data)).__name__
            line = f"data={kind}: the first batch of {whose} cannot be read: {clipped(located(error), 160)}; {CURE}"
            raise UsageError(line) from error
    return []


def first_of_dataset(loader: DataLoader, most: int | None) -> list[Any]:
    """The first batch of a ``DataLoader``, fetched without its worker processes."""
    if loader.batch_sampler is None:
        return []
    rows = next(iter(loader.batch_sampler), [])[:most]
    data: Any = loader.dataset
    examples = data.__getitems__(rows) if hasattr(data, "__getitems__") else [data[row] for row in rows]
    return [loader.collate_fn(examples)] if rows else []


@contextmanager
def attempt(run: Run, step: str, whose: str, batch: Any) -> Iterator[None]:
    """In this block, an error of a step or a hook is one line, whatever its kind.

    Where methods or callbacks of the user's own have hooks that run before the step, and that this trial does not
    call, it is left to the run, unless it says that the batch does not fit.

    Raises:
        UsageError: there was an error.
    """
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        misfit, alone = is_misfit(error), all(map(is_ours, (*run.methods.methods, *run.callbacks)))
        if run.trainer.on_client_error == "raise" and (misfit or alone):
            what = clipped(f"a batch of {whose} {shapes(batch)}", 70) if misfit else f"a batch of {whose}"
            length, remedy = (120, "change the model or the data to fit") if misfit else (160, CURE)
            what = f"{step} fails on {what}: {clipped(located(error), length)}; {remedy}"
            # one of ours says itself what is wrong, and what to do
            what = str(error) if isinstance(error, ClientError) else what
            raise UsageError(f"model={type(run.client.module).__name__}: {what}") from error


def is_misfit(error: BaseException) -> bool:
    """Whether an operation has refused its inputs, and not the user's code itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    explicit = linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise")
    refused = isinstance(error, MISFITS) and not isinstance(error, RecursionError)
    return refused and (last.filename.startswith(torch.__path__[0]) or not explicit)


def shapes(batch: Any) -> str:
    """The shapes and types of the tensors of a batch."""
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    shown = [f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors]
    return f"({', '.join(shown)})"
