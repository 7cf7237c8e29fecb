"""Goes on from a checkpoint as the same run, or, where the user allows it, as a changed one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from fl_lightning.callbacks.base import named
from fl_lightning.engine.identity.description import HOLDS, canonical, of_data, was_free
from fl_lightning.errors import UsageError, require
from fl_lightning.sources import SCRIPT, file_of

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run
    from fl_lightning.method import Method

Change = tuple[Any, Any]
# the sections of a description that must be the same
SECTIONS = ("trainer", "model", "method", "data", "code")
# where one of these differs, a saved state is of no use: of the server's optimizer, of methods, of a module's scheduler
OF_SERVER = {"trainer.server_optimizer", "trainer.server_optimizer_scope", "model.trained"}
OF_METHODS = {"trainer.server_optimizer_scope", "model.trained"}
OF_SCHEDULE = ("model.optimizer", "model.lr_scheduler", "trainer.client_schedulers")
# most characters of a message, of a value and of a path in it
LONGEST, VALUE, PATH = 290, 36, 60


def identity(run: Run, described: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a checkpoint holds of the run that it belongs to; ``described`` replaces its description."""
    known = {"seed_everything": run.seed, "method": run.methods.names, "plan_hash": run.data.plan.hash}
    return {**known, "description": run.description if described is None else described}


def overridden(run: Run, checkpoint: Mapping[str, Any]) -> dict[str, Change]:
    """Where an evaluation differs from the run of a checkpoint in its seed, partition, methods or data."""
    methods = {name: canonical(method) for name, method in named(run.methods.methods).items()}
    return differences(identity(run, {"method": methods, "data": of_data(run.data)}), checkpoint)


def changes_of(
    ours: Mapping[str, Any], run: Run, path: Path, checkpoint: Mapping[str, Any], allowed: bool
) -> dict[str, Change]:
    """What differs between the identity of this run, ``ours``, and that in a checkpoint: value there and here, by key.

    Raises:
        UsageError: something differs that is not ``allowed`` to; the model's state, the partition, and fewer rounds
            than are done never are.
    """
    where = f"ckpt_path={shown_path(path)!r}"
    check_contents(run, where, checkpoint)
    done = checkpoint["round"]
    changes = {**differences(ours, checkpoint), **of_new_arguments(run, checkpoint), **of_rounds(run, checkpoint)}
    if OF_SERVER.isdisjoint(changes) and not suits(checkpoint["server"]["optimizer"], run.server.optimizer):
        changes["trainer.server_optimizer"] = ("another", type(run.server.optimizer).__name__)
    if "plan_hash" in changes:
        hint = "another partition; give the data, num_clients and seed of before, or begin a new run with --weights"
        first = {key: changes[key] for key in ("seed_everything", "plan_hash") if key in changes}
        raise UsageError(message(where, first | changes, hint))
    hint = f"the checkpoint has {done} rounds done, give at least that"
    require(run.trainer.max_rounds >= done, f"{where}: trainer.max_rounds", run.trainer.max_rounds, hint)
    if changes and not allowed:
        raise UsageError(message(where, changes, "give what it was, or --allow_changes true to go on in a new version"))
    return changes


def check_contents(run: Run, where: str, checkpoint: Mapping[str, Any]) -> None:
    """Refuse what is no checkpoint of a run, and the state of another model.

    Raises:
        UsageError: a part is missing, or names or shapes differ; names the first.
    """
    missing = [part for part in ("round", "server", "methods") if part not in checkpoint]
    if missing:
        hint = "give RUN/checkpoints/last.ckpt, or begin a new run with --weights"
        raise UsageError(f"{where}: not a checkpoint of a run, it has no {', '.join(missing)}; {hint}")
    theirs = {name: tuple(value.shape) for name, value in checkpoint["server"]["state"].items()}
    ours = {name: tuple(value.shape) for name, value in run.server.state.items()}
    if ours.keys() != theirs.keys():
        text = f"its state holds {len(theirs)} entries, the model has {len(ours)}"
        raise UsageError(f"{where}: not a checkpoint of this run: {text} of other names; give the same model")
    for name, shape in ours.items():
        hint = f"not a checkpoint of this run: there it has the shape {theirs[name]}; give the same model"
        require(shape == theirs[name], f"{where}: model.{name}", shape, hint)


def of_new_arguments(run: Run, checkpoint: Mapping[str, Any]) -> dict[str, Change]:
    """Arguments of methods that a checkpoint is older than, and that have another value than their default.

    The run of the checkpoint had the default.
    """
    before, changes = checkpoint.get("description", {}).get("method", {}), dict[str, Change]()
    for name, method in named(run.methods.methods).items():
        now, then = run.description["method"][name], before.get(name, {})
        for key, argument in signature(type(method)).parameters.items() if then.get("class") == now["class"] else ():
            default, new = canonical(argument.default), key in now and key not in then and not was_free(key)
            if new and now[key] != default and argument.default is not argument.empty:
                changes[f"method.{name}.{key}"] = (default, now[key])
    return changes


def of_rounds(run: Run, checkpoint: Mapping[str, Any]) -> dict[str, Change]:
    """The change of ``max_rounds`` where it counts: a metric that decides something was taken after a last round.

    A last round is always evaluated. In a longer run, this one would not have been.
    """
    then = checkpoint.get("description", {}).get("trainer", {})
    last, every, rounds = then.get("max_rounds"), then.get("eval_every_n_rounds"), run.trainer.max_rounds
    extra = every is not None and checkpoint["round"] == last and last % every != 0
    return {"trainer.max_rounds": (last, rounds)} if extra and rounds > last else {}


# ------------------------------------------------------------------ comparing
def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Change]:
    """What differs between the identities of two runs: their value and ours, by key."""
    changes = {
        key: (theirs.get(key), ours[key]) for key in ours if key != "description" and theirs.get(key) != ours[key]
    }
    described, before = ours["description"], theirs.get("description", {})
    if "trainer" in before:  # before there were groups, clients were trained one by one
        before = {**before, "trainer": {"clients_per_step": 1, **before["trainer"]}}
    for section in (name for name in SECTIONS if name in described):
        changes |= differing(before.get(section, {}), described[section], section, known_only=True)
    changes.pop("trainer.max_rounds", None)
    factors = "trainer.client_lr_scheduler"
    if factors in changes:
        # of each round; None is a constant 1. They need to agree in those rounds alone that both have
        schedules = [schedule for schedule in changes[factors] if schedule is not None]
        number = min(map(len, schedules))
        here, there = ((schedule or [1.0] * number)[:number] for schedule in changes[factors])
        if here == there:
            del changes[factors]
    return changes


def differing(theirs: Any, ours: Any, key: str, known_only: bool = False) -> dict[str, Change]:
    """Where two descriptions differ: both values, by key.

    A key that only one of two objects of a class has is ignored; with ``known_only`` any key that only one of them has.
    """
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if theirs.get("class") != ours.get("class") and not (known_only and "class" not in theirs):
            return {key: (theirs.get("class"), ours.get("class"))}
        changes: dict[str, Change] = {}
        for name in {**ours, **theirs}:
            if name in theirs and name in ours:
                changes |= differing(theirs[name], ours[name], f"{key}.{name}")
            elif not (known_only or "class" in ours):
                changes[f"{key}.{name}"] = (theirs.get(name), ours.get(name))
        return changes
    if isinstance(theirs, str) and isinstance(ours, str):
        # files are equal where they hold the same; former versions knew them by their names
        name, _, held = ours.rpartition(HOLDS)
        same = theirs == ours or (bool(name) and theirs in (name, f"{theirs.rpartition(HOLDS)[0]}{HOLDS}{held}"))
        return {} if same else {key: (theirs, ours)}
    lists = isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours)
    if lists and any(isinstance(value, (dict, list)) or HOLDS in str(value) for value in ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        return {k: v for i, pair in pairs for k, v in differing(*pair, f"{key}.{i}").items()}
    both_nan = theirs != theirs and ours != ours
    return {} if theirs == ours or both_nan else {key: (theirs, ours)}


def message(where: str, changes: Mapping[str, Change], hint: str) -> str:
    """One line that lists the first changes and counts the others."""
    items = [edited(key) or f"{key}={shown(here)} (was {shown(there)})" for key, (there, here) in changes.items()]
    for number in range(len(items), 0, -1):
        more = f" and {len(items) - number} more" if number < len(items) else ""
        line = f"{where}: {', '.join(items[:number])}{more}; {hint}"
        if len(line) <= LONGEST:
            break
    return line


def edited(key: str) -> str:
    """That the file of a module was edited, where the key is of one; else empty."""
    module = SCRIPT if key.startswith(f"code.{SCRIPT}.") else key.removeprefix("code.")
    file = file_of(module) if key.startswith("code.") else None
    return f"{shown_path(Path(os.path.relpath(file)))} was edited" if file else ""


def shown(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value.get("class", value) if isinstance(value, dict) else value)
    return text if len(text) <= VALUE else f"{text[: VALUE - 14]}...{text[-11:]}"


def shown_path(path: Path) -> str:
    """A path as a message shows it: the end of a long one."""
    text = str(path)
    return text if len(text) <= PATH else f"...{text[3 - PATH :]}"


def record(path: Path, checkpoint: Mapping[str, Any], changes: Mapping[str, Change]) -> list[dict[str, Any]]:
    """The changes on the way of a run, the present ones last, for ``changes.yaml`` and the next checkpoints."""
    if not changes:
        return list(checkpoint.get("changes", []))
    present = {key: {"before": there, "now": here} for key, (there, here) in changes.items()}
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    entry = {"time": time, "ckpt_path": str(path.absolute()), "rounds_done": checkpoint["round"], "changes": present}
    return [*checkpoint.get("changes", []), entry]


# ------------------------------------------------------------------ going on with changes
def touches(changes: Mapping[str, Change], keys: tuple[str, ...]) -> bool:
    """Whether something changed under one of these keys."""
    return any(changed == key or changed.startswith(f"{key}.") for changed in changes for key in keys)


def state_of_server(run: Run, checkpoint: Mapping[str, Any], changes: Mapping[str, Change]) -> dict[str, Any]:
    """The server's state in a checkpoint, with a state of the optimizer that suits the present one."""
    saved, optimizer = checkpoint["server"], run.server.optimizer
    own = {} if optimizer is None else optimizer.state_dict()
    if not OF_SERVER.isdisjoint(changes):
        run.trainer.warn("trainer.server_optimizer: the checkpoint has the state of another one; it starts fresh")
        return {**saved, "optimizer": own}
    if touches(changes, ("trainer.server_optimizer",)):
        return {**saved, "optimizer": {**saved["optimizer"], "param_groups": own["param_groups"]}}
    return saved


def restore_schedule(run: Run, saved: dict[str, Any], changes: Mapping[str, Change]) -> None:
    """Restore a module's scheduler that watches a metric, unless it is another one."""
    if not touches(changes, OF_SCHEDULE):
        run.local_training.monitored.load_state_dict(saved)
    elif saved or run.local_training.monitored.config is not None:
        run.trainer.warn(
            "model: a scheduler that watches a metric is another one than in the checkpoint; it starts fresh"
        )


def suits(saved: Mapping[str, Any], optimizer: Optimizer | None) -> bool:
    """Whether an optimizer can take a saved state: its groups know all the options that are saved."""
    if optimizer is None or not saved:
        return optimizer is None and not saved
    groups, own = saved["param_groups"], optimizer.state_dict()["param_groups"]
    sizes = [len(group["params"]) for group in groups] == [len(group["params"]) for group in own]
    return sizes and all(there.keys() <= here.keys() for there, here in zip(groups, own, strict=True))


def methods_that_stay(run: Run, checkpoint: Mapping[str, Any], changes: Mapping[str, Change]) -> list[Method]:
    """The methods of the run that the run of a checkpoint had, too, by name and class; none for other parameters."""
    if not OF_METHODS.isdisjoint(changes):
        return []
    same = [method for name, method in named(run.methods.methods).items() if f"method.{name}" not in changes]
    return [method for method in same if method.name in checkpoint["methods"]]


def what_stays(run: Run, memory: Mapping[str, Any], methods: list[Method]) -> dict[str, Any]:
    """The part of a client's memory that belongs to these methods and to the entries that do not travel."""
    names = {method.name for method in methods}
    entries = {name: value for name, value in memory.get("state", {}).items() if name in run.client.kept}
    stay = {name: value for name, value in memory.items() if name in names}
    return {**stay, "state": entries} if entries else stay


def forget_the_rest(run: Run, methods: list[Method]) -> None:
    """Drop what clients remember for methods that are gone, and entries of the state that travel now."""
    memories = run.client.memories()
    for k in memories:
        held = memories[k]  # one that lies on disk is read each time
        if held.keys() != what_stays(run, held, methods).keys() or "state" in held:
            memory = memories.visited(k)
            stay = what_stays(run, memory, methods)
            memory.clear()
            memory.update(stay)
            memories.settle(k)


# ------------------------------------------------------------------ callbacks
def states_of_callbacks(run: Run, checkpoint: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The state of each callback of the run that the checkpoint has one for: of the same class and arguments."""
    saved, before = checkpoint["callbacks"], checkpoint.get("description", {}).get("callbacks")
    if before is None:
        return saved
    left, states = dict(before), {}
    for name, callback in run.description["callbacks"].items():
        same = next((there for there in left if not differing(left[there], callback, name)), None)
        if same is not None:
            states[name] = saved[same]
            del left[same]
    dropped = [name for name in left if saved.get(name)]
    if dropped:
        text = "no callback of this class and these arguments is in this run, so its state is dropped"
        run.trainer.warn(f"trainer.callbacks: {', '.join(dropped)}: {text}")
    return states
