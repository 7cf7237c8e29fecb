"""Saves the final model for Lightning, and loads models to begin with or to evaluate."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch
from lightning.pytorch import LightningDataModule, LightningModule

from fl_lightning.core.state import State, clone, copy_into, select, tensors, uncompiled_name, uncompiled_names
from fl_lightning.data.partition_adapter import own_module_of
from fl_lightning.engine.run import Run
from fl_lightning.storage.atomic_io import load, save
from fl_lightning.storage.checkpoint import client_files, read
from fl_lightning.storage.serializable import is_storable, on_cpu
from fl_lightning.utilities.errors import UsageError, few, require, truncate
from fl_lightning.utilities.lightning_compat import NAMESPACES, is_overridden

NAMES_SHOWN = 3
# entries of Lightning's checkpoints that are empty in a run, in which each visit has a new optimizer
EMPTY: dict[str, Any] = {"optimizer_states": [], "lr_schedulers": [], "callbacks": {}, "loops": {}}


def save_model(run: Run, path: Path) -> None:
    """Write the global model, on worker 0, as a checkpoint for Lightning's ``load_from_checkpoint`` and ``Trainer``."""
    if run.workers.rank == 0:
        warn_of_arguments(run, path.name)
        checkpoint = lightning_checkpoint(run)
        run.worker_module.call("on_save_checkpoint", checkpoint)
        save(storable(checkpoint), path)


def warn_of_arguments(run: Run, name: str) -> None:
    """Warn of constructor arguments that the file ``name`` cannot hold."""
    arguments = constructor_arguments(run)
    if left_out := [key for key, value in arguments.items() if not is_storable(value)]:
        run.trainer.warn(f"{name}: {', '.join(left_out)} of hparams cannot be stored; pass it to load_from_checkpoint")


def lightning_checkpoint(run: Run) -> dict[str, Any]:
    """Load the global model into the worker's module, and return it as a checkpoint of Lightning."""
    run.worker_module.load_and_reset(run.methods.evaluated_state(run.server))
    return checkpoint_of(run, run.client.module.state_dict(), len(run.metrics.history)) | state_of_data(run.data)


def checkpoint_of(run: Run, state: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return a global model after some rounds, without the methods' own modules, as a checkpoint of Lightning."""
    module, trainer, of_methods = run.client.module, run.trainer, {*run.client.of_methods}
    arguments = constructor_arguments(run)
    hparams = {name: value for name, value in arguments.items() if is_storable(value)}
    of_data: dict[str, Any] = getattr(run.data, "inference_arguments", dict)()
    named = {} if trainer.config or not hasattr(module, "_hparams_name") else {"hparams_name": module._hparams_name}
    return {
        **copy.deepcopy(EMPTY),
        "epoch": rounds * (trainer.local_epochs if trainer.local_steps is None else 1),
        "global_step": rounds,
        "pytorch-lightning_version": lightning.pytorch.__version__,
        "state_dict": {n: v for n, v in uncompiled_names(state).items() if n not in of_methods},
        **({"hyper_parameters": hparams, **named} if hparams else {}),
        **({LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY: of_data} if of_data else {}),
    }


def constructor_arguments(run: Run) -> dict[str, Any]:
    """Return the module's constructor arguments, from the config or else from its ``hparams``.

    Those from a config contain, like LightningCLI's, the class path and the function that resolves the classes of the
    arguments, in the distribution of Lightning whose class the module is a subclass of.
    """
    module, config = run.client.module, run.trainer.config
    if not config:
        return dict(module.hparams)
    entry = config["model"]
    roots = {base.__module__.split(".")[0] for base in type(module).__mro__}
    namespace = NAMESPACES["pytorch_lightning" in roots]
    built = {"_class_path": entry["class_path"], "_instantiator": f"{namespace}.cli.instantiate_module"}
    return {**(entry.get("init_args") or {}), **(entry.get("dict_kwargs") or {}), **built}


def entries_of_module(run: Run) -> dict[str, Any]:
    """Load the global model, and return the keys that the module's hook adds to its checkpoint."""
    has_hook = "on_save_checkpoint" in run.worker_module.hooks
    return added_on_save(run, lightning_checkpoint(run)) if has_hook else {}


def added_on_save(run: Run, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that the module's ``on_save_checkpoint`` adds to ``checkpoint``."""
    own_keys = set(checkpoint)
    run.worker_module.call("on_save_checkpoint", checkpoint)
    return {key: value for key, value in checkpoint.items() if key not in own_keys}


def objects_of_module(run: Run) -> dict[str, Any]:
    """Return the objects that are neither tensors nor plain values that the module would add to a checkpoint now.

    Files do not hold them, since unpickling an object runs code; a newly built module provides them.
    """
    if "on_save_checkpoint" not in run.worker_module.hooks:
        return {}
    try:
        added = added_on_save(run, checkpoint_of(run, run.client.module.state_dict(), 0))
    except Exception:  # the hook may rely on a training step
        return {}
    return {key: value for key, value in added.items() if not is_storable(value)}


def check_storable(run: Run) -> None:
    """Warn, before round 0, of objects that the module adds to checkpoints and that files cannot hold.

    Raises:
        UsageError: the state of the data module holds objects that cannot be stored.
    """
    state_of_data(run.data)
    if left_out := ", ".join(objects_of_module(run)):
        text = "checkpoints only store tensors and plain values, so they omit it"
        again = "when a run resumes, on_load_checkpoint gets the new module's value"
        run.trainer.warn(f"model: on_save_checkpoint: {left_out}: {text}; {again}")


def storable(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint that can be stored, on the CPU, without those that are empty in a run."""
    filled = {key: value for key, value in entries.items() if key not in EMPTY or value}
    entries_to_store = {key: value for key, value in filled.items() if is_storable(value)}
    hparams = dict(entries.get("hyper_parameters", {}))
    if storable_hparams := {name: value for name, value in hparams.items() if is_storable(value)}:
        entries_to_store["hyper_parameters"] = storable_hparams
    return on_cpu(entries_to_store)


def state_of_data(data: Any) -> dict[str, Any]:
    """Return the state of the user's data module by its class name; empty without a state.

    Raises:
        UsageError: the state holds objects that cannot be stored.
    """
    module = own_module_of(data)
    state = module.state_dict() if is_overridden("state_dict", module) else {}
    for key, value in state.items():
        kind, hint = type(value).__name__, "return these, for example a state_dict()"
        text = f"a {kind} does not consist of tensors and plain values; {hint}"
        require(is_storable(value), f"data: {type(module).__qualname__}.state_dict()", key, text)
    return {type(module).__qualname__: state} if state else {}


def restore_data(data: Any, states: Mapping[str, Any]) -> None:
    """Restore the state of the data module from the result of :func:`state_of_data`."""
    module = own_module_of(data)
    if type(module).__qualname__ in states:
        module.load_state_dict(states[type(module).__qualname__])


def call_on_load(run: Run, contents: Mapping[str, Any]) -> dict[str, Any]:
    """Call the module's ``on_load_checkpoint``, which may change the checkpoint; return the checkpoint."""
    checkpoint = dict(contents)
    if "description" in contents:  # the checkpoint of a run, or the record of a failure, takes Lightning's form
        rounds = contents["failure"]["round"] if "failure" in contents else contents["round"]
        checkpoint = checkpoint_of(run, contents["state_dict"], rounds) | contents["module"]
        if "on_load_checkpoint" in run.worker_module.hooks:
            checkpoint = {**objects_of_module(run), **checkpoint}
    run.worker_module.call("on_load_checkpoint", checkpoint)
    run.worker_module.begin_run()  # visits begin with the attributes set by the hook
    return checkpoint


def load_model(run: Run, path: Path) -> dict[int, State]:
    """Load the global model and the memories of a checkpoint; return the state entries that stay with each client.

    Raises:
        UsageError: the file does not exist, or belongs to another model.
    """
    contents = read(path)
    load_global(run, call_on_load(run, contents)["state_dict"], "ckpt_path", path)
    server, method_entries = contents.get("server", {}).get("state", {}), run.client.of_methods
    copy_into(select(run.client.live, method_entries), server)
    files = client_files(path, contents)
    run.client.memories().restore(files, run.workers, None)
    memories = {k: load(file) for k, file in files.items()}
    names = run.client.live.keys() - method_entries
    states = {}
    for k, memory in memories.items():
        state = memory.get("state", {})
        if personal := {name: state[name] for name in state if name in names}:
            states[k] = personal
    return states


def load_weights(run: Run, path: Path) -> None:
    """Load weights from any checkpoint or state dict as the global model.

    Raises:
        UsageError: the file does not exist, or belongs to another model.
    """
    contents = read(path, "weights")
    checkpoint = call_on_load(run, contents) if "state_dict" in contents else {"state_dict": contents}
    load_global(run, checkpoint["state_dict"], "weights", path)
    run.server.assign(run.client.state())


def load_global(run: Run, state: Mapping[str, Any], key: str, path: Path) -> None:
    """Load a global model, without the methods' own modules, whose entries do not change."""
    present_state = select(run.worker_module.state(), run.client.of_methods)
    load_state(run.client.module, {**present_state, **state}, key, path)


def load_state(module: LightningModule, state: Mapping[str, Any], key: str, path: Path) -> None:
    """Load a state dict into a module, strictly unless the module's ``strict_loading`` is off.

    Raises:
        UsageError: names or shapes differ. The message lists some of them, and the module is unchanged.
    """
    live, entries = tensors(module), module.state_dict(keep_vars=True)
    before = clone(live)
    try:
        entry_names = {uncompiled_name(name): name for name in entries}
        state = {entry_names.get(uncompiled_name(name), name): value for name, value in state.items()}
        missing, unknown = module.load_state_dict(state, strict=False)
        # a shared tensor may be present under another name
        loaded_tensors = {id(value) for name, value in entries.items() if name in state}
        shared = {name for name, value in entries.items() if id(value) in loaded_tensors}
        missing = [name for name in missing if name not in shared]
        wrong = [
            f"{kind}: {few(names, NAMES_SHOWN)}"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        # the part of the model whose names these are
        suffix = f".{unknown[0]}" if unknown else None
        if parts := [name.removesuffix(suffix) for name in entries if suffix and name.endswith(suffix)]:
            wrong.append(f"these names are of {parts[0]} alone; load the file in the function that builds this part")
        if wrong and getattr(module, "strict_loading", True):
            raise ValueError("; ".join(wrong))
    except Exception as error:
        copy_into(live, before)
        where = f"{key}={str(path)!r}: not a checkpoint of this model"
        raise UsageError(f"{where}: {truncate(str(error))}; pass the model that wrote it") from error
