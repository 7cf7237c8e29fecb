"""The plan of a fit: its parts, its sizes, and its cost by one measured visit."""

from __future__ import annotations

import copy
import inspect
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from fl_lightning.callbacks.cost import worker_peak_memory
from fl_lightning.client.batch_norm import statistics_of
from fl_lightning.client.client import RECALIBRATES
from fl_lightning.client.taps import submodule
from fl_lightning.core.method import Method
from fl_lightning.core.state import num_bytes, select
from fl_lightning.data.client_loaders import last_batch
from fl_lightning.engine.cohort_training import plan_round, planned_rounds
from fl_lightning.engine.commands.fit import begin_fit, prepare_fit
from fl_lightning.engine.launching import available_memory
from fl_lightning.engine.model_io import warn_of_arguments
from fl_lightning.engine.run import Run
from fl_lightning.engine.update_codec import TensorSpec, broadcast_bytes, encode_update, list_tensors
from fl_lightning.storage.hyperparameters import plain_arguments
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import UsageError, count, few, text_of, truncate

# steps of an asynchronous server whose versions are counted, at most
MOST_STEPS = 1000
# batches to which the measured visit is cut
BATCHES = 4
SPECTRA = "add --trainer.callbacks+=SpectrumMonitor, which reads the taps representation and logits"
# taps and tensors that a line of the text names, and its length
TAPS_SHOWN, TENSORS_SHOWN, LONGEST = 6, 2, 100
# rows about clients, and the unit of each
EACH = {"examples": "client", "batches": "visit"}

Outline = dict[str, Any]


def copies(model: LightningModule, methods: list[Method]) -> tuple[LightningModule, list[Method]]:
    """Return copies of the model and the methods, since building a run changes the module."""
    try:
        return copy.deepcopy((model, methods))
    except Exception as error:
        hint = f"it cannot be copied ({text_of(error)}), and the doctor works on a copy"
        raise UsageError(f"model={type(model).__name__}: {hint}; call trainer.fit") from error


def diagnose(
    run: Run, ckpt_path: str | Path | None, weights: Path | None = None, allow_changes: bool = False
) -> Outline:
    """Return the plan of a fit as plain values; all workers call this."""
    if run.fabric.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.fabric.device)
    try:
        source, checkpoint = prepare_fit(run, ckpt_path, weights, allow_changes)
    finally:
        run.folder.release()
    begin_fit(run, fresh=source is None)
    if run.client.sent and not run.trainer.fast_dev_run:
        warn_of_arguments(run, "model.ckpt")
    trainer, client, number = run.trainer, run.client, run.data.num_clients
    fit_progress = run.worker_module.fit_progress
    lengths = [run.local_training.num_batches(k) for k in range(number)]
    visits = {length: sum(replace(fit_progress, batches=length).passes) for length in set(lengths)}
    batches = [visits[length] for length in lengths]
    rounds_done = min(checkpoint["round"], trainer.max_rounds)
    cohort_size, rounds = trainer.nominal_cohort(number), planned_rounds(run, rounds_done)
    frozen = set(client.frozen)
    entries = {
        "trained": client.trainable,
        "frozen": client.frozen,
        "buffers": [name for name in client.others if name not in frozen],
        "kept_by_clients": client.kept,
    }
    optimizer, schedulers = run.local_training.optimizers.first
    server, ends = run.server.optimizer, Counter(last_batch(run.data, k) for k in range(number))
    parts = dict(client.module.named_modules())
    readers: list[Any] = [*run.methods.methods, *trainer.callbacks]
    return {
        "run": {
            "rounds": rounds,
            "rounds_done": rounds_done,
            "max_seconds": trainer.max_seconds,
            "cohort": cohort_size,
            "workers": run.workers.size,
            "threads": torch.get_num_threads(),
            "device": str(run.fabric.device),
            "precision": str(run.fabric.strategy.precision.precision),
            "seed": run.seed,
            "clients_per_step": run.runner.settings()["clients_per_step"],
            "side_by_side": run.runner.reason,
            "systems": None if trainer.systems is None else plain_arguments(trainer.systems),
            "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        },
        "methods": {
            method.name: {"class": type(method).__name__, "arguments": plain_arguments(method)}
            for method in run.methods.methods
        },
        # numbers in the model by kind
        "model": {
            "class": type(client.module).__name__,
            **{kind: sum(client.live[name].numel() for name in names) for kind, names in entries.items()},
        },
        "optimizers": {
            "client": described(optimizer),
            "schedulers": [type(config.scheduler).__name__ for config in schedulers],
            "server": None if server is None else described(server),
        },
        "taps": {
            name: {
                "output": binding,
                "class": type(parts[submodule(binding)]).__name__ if submodule(binding) in parts else None,
                "readers": [type(reader).__name__ for reader in readers if name in reader.requires],
            }
            for name, binding in {**getattr(client.module, "taps", {}), **trainer.taps}.items()
        },
        # examples, batches, and incomplete last batches
        "clients": {
            "number": number,
            "examples": spread([run.data.info(k).num_examples for k in range(number)]),
            "batches": spread(batches),
            "without_batches": batches.count(0),
            **{kind: ends[kind] for kind in ("short", "single", "dropped")},
        },
        **costs(run, rounds_done, rounds, cohort_size, batches),
    }


def described(optimizer: Optimizer) -> str:
    """Return an optimizer as text, with its learning rate and the options that differ from the defaults."""
    parameters = inspect.signature(type(optimizer).__init__).parameters
    texts = []
    for name, value in optimizer.param_groups[0].items():
        default = parameters[name].default if name in parameters else value
        if name in optimizer.defaults and (name == "lr" or value != default):
            texts.append(f"{name}={value}")
    return f"{type(optimizer).__name__}({', '.join(texts)})"


def spread(values: Sequence[int]) -> list[float]:
    """Return the minimum, the median and the maximum."""
    return [min(values), statistics.median(values), max(values)]


def costs(run: Run, done: int, rounds: int, cohort_size: int, batches: list[int]) -> Outline:
    """Return bytes, memory and seconds; empty if no round trains anything. All workers call this.

    Measures a few batches of one part of the first cohort, the one of median cost. Evaluation, callbacks and
    checkpoints are not included.
    """
    trained = {k: number for k, number in enumerate(batches) if number}
    if rounds <= done or not trained:
        return {}
    client, training, number = run.client, run.local_training, run.data.num_clients
    fit_progress = run.worker_module.fit_progress
    run.server.begin_round(done, [*plan_round(run, done).systems])
    run.worker_module.begin_round(done)
    run.methods.on_round_start(run.server)
    in_cohort = {k: trained[k] for k in run.server.cohort if k in trained}
    parts = run.runner.divide(run, in_cohort or trained)
    part = sorted(parts, key=lambda part: (parts[part], part))[len(parts) // 2]
    for _ in range(3):  # the first two warm up; the third is measured
        with patched(fit_progress, limit=min(BATCHES, fit_progress.limit or BATCHES)):
            began = time.perf_counter()
            results: Any = run.runner.run(run, part, done, dict.fromkeys(part), observed=True)
            k, update = next(results)
            seconds = time.perf_counter() - began
            if isinstance(update, Exception):
                raise update
            client.memories().commit_visit(k)
            results.close()
            progress_of_clients = (fit_progress.at(done, training.num_batches(k)) for k in part)
        num_batches = sum(sum(progress.passes) for progress in progress_of_clients)
    sums = []
    if run.trainer.buffers in RECALIBRATES:  # counts, inputs and squares of each BatchNorm layer
        for path in client.batch_norms:
            numbers = client.live[statistics_of(path)[0]].numel()
            sums.append(TensorSpec(f"recalibration/{path}.count", "float64", ()))
            sums.append(TensorSpec(f"recalibration/{path}.sums", "float64", (2, numbers)))
    leaving = [*list_tensors(encode_update(client, update)), *sums]
    leaves = [{**spec._asdict(), "shape": [*spec.shape], "bytes": spec.num_bytes} for spec in leaving]
    state = num_bytes(client.memories().get(part[0], {}))
    measured = run.workers.gather((seconds / num_batches, worker_peak_memory()), "cost of a visit")
    seconds_of_batch = [seconds_of_worker for seconds_of_worker, _ in measured]
    visit = statistics.fmean(batches) * statistics.fmean(seconds_of_batch)
    peak = max(peak for _, peak in measured)  # 0 if the system does not measure it
    # client state beyond the limit is on disk
    client_memory = min(number * state / run.workers.size, client.memories().limit)
    up = update.num_bytes + sum(entry.num_bytes for entry in sums)
    in_round = visit * cohort_size / run.workers.size
    num_versions = run.versions.most_kept(range(done, min(rounds, done + MOST_STEPS)))
    return {
        "bytes": {"down": cohort_size * broadcast_bytes(run, [k])[k], "up": cohort_size * up},
        # tensors of an update, without weight and logged values
        "leaves": leaves,
        # of the cohort on a worker, where a method's server hooks see them one by one
        "updates": bytes_of_updates(run, cohort_size),
        # of an asynchronous run: versions of what travels that are kept at a time, at most
        "versions": {"number": num_versions, "bytes": num_versions * broadcast_bytes(run, [k])[k]},
        "client_state": {"each": state, "all": number * state},
        "memory": {"worker": int(peak + client_memory) if peak else None, "clients": int(client_memory)},
        "seconds": {"visit": visit, "round": in_round, "run": in_round * (rounds - done)},
    }


def bytes_of_updates(run: Run, cohort_size: int) -> int:
    """Return the bytes of the updates on a worker, 0 if only their sums are kept; warn if memory is short.

    They are those of its own clients, and at most one entry of all clients in float64.
    """
    names = [type(method).__name__ for method in run.methods.seeing_updates]
    if not names:
        return 0
    sent = select(run.client.live, run.client.sent)
    is_wide = run.methods.overriding("transform_client_update") or run.methods.overriding("transform_updates")
    sizes = [8 * value.numel() for value in sent.values()]
    bytes_of_client = sum(sizes) if is_wide else num_bytes(sent)
    largest = max(sizes, default=0)
    size = math.ceil(cohort_size / run.workers.size) * bytes_of_client + cohort_size * largest
    free = available_memory(run.fabric.device) / (run.workers.size if run.fabric.device.type == "cpu" else 1)
    if free and size > free / 2:
        text = f"the updates of a round take {as_bytes(size)} on a worker, more than half of the free memory"
        run.trainer.warn(f"method={names}: {text}; lower trainer.cohort_size")
    return size


def as_text(plan: Outline) -> str:
    """Return a plan as aligned lines, each with its subject."""
    run, methods, model = plan["run"], plan["methods"], plan["model"]
    optimizers, clients = plan["optimizers"], plan["clients"]
    kept_numbers = model["kept_by_clients"]
    rounds_done = f", {run['rounds_done']} of them done" if run["rounds_done"] else ""
    limit = "" if run["max_seconds"] is None else f" in {run['max_seconds']:g} simulated seconds"
    in_each = f"{run['cohort']} of {count(clients['number'], 'client')} in each"
    calls = [f"{method['class']}({pairs(method['arguments'])})" for method in methods.values()]
    where = f"{count(run['workers'], 'worker')} on {run['device']}, {count(run['threads'], 'thread')} each"
    systems = pairs({key: value for key, value in (run["systems"] or {}).items() if value})
    taps = []
    for name, tap in plan["taps"].items():
        if tap["readers"]:
            taps.append(f"{name} = {tap['output']} ({tap['class']}), read by {', '.join(tap['readers'])}")
    if unread := [name for name, tap in plan["taps"].items() if not tap["readers"]]:
        taps.append(f"read by nothing: {few(unread, TAPS_SHOWN)}")
    kinds = {
        "without_batches": "train nothing",
        "short": "end with a short batch",
        "single": "end with a batch of one example (see drop_last)",
        "dropped": "drop a last batch that is not full",
    }
    ends = ", ".join(f"{clients[kind]} {text}" for kind, text in kinds.items() if clients[kind])
    order = "clients train sequentially" if run["clients_per_step"] == 1 else "clients in groups"
    numbers = {name: ", ".join(f"{value:,.10g}" for value in clients[name]) for name in EACH}
    # an empty head continues the line above
    rows = [
        ("methods", ", ".join(calls) or "none, which is FedAvg"),
        ("rounds", f"{run['rounds']}{limit}{rounds_done}; {in_each}"),
        *([("", f"simulated: {systems}; the costs below are without it")] if run["systems"] is not None else []),
        ("workers", f"{where}, precision {run['precision']}, seed {run['seed']}"),
        ("side by side", f"{order}: {run['side_by_side']}"),
        ("model", model["class"]),
        ("parameters", f"{model['trained']:,} trained, {model['frozen']:,} frozen; {model['buffers']:,} in buffers"),
        *([("", f"{kept_numbers:,} of these numbers stay with each client")] if kept_numbers else []),
        ("client optimizer", ", ".join([optimizers["client"], *optimizers["schedulers"]])),
        ("server optimizer", optimizers["server"] or "none: nothing travels"),
        *headed("taps", taps or ["none"]),
        ("callbacks", ", ".join(run["callbacks"]) or "none"),
        *([] if "SpectrumMonitor" in run["callbacks"] else [("", f"no spectra: {SPECTRA}")]),
        *((name, f"{numbers[name]} a {unit} (min, median, max)") for name, unit in EACH.items()),
        ("", f"of {count(clients['number'], 'client')}, {ends or 'all end with a full batch'}"),
        *(rows_of_costs(plan) if "seconds" in plan else [("time", "none: no round trains anything")]),
        *headed("warnings", plan["warnings"] or ["none"]),
    ]
    width = max(len(head) for head, _ in rows) + 2
    return "\n".join(f"{head.ljust(width)}{text}" for head, text in rows)


def pairs(values: Outline) -> str:
    """Return the entries as ``key=value``, separated by commas."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def headed(head: str, lines: list[str]) -> list[tuple[str, str]]:
    """Return rows with the head in the first one only."""
    return [("" if number else head, text) for number, text in enumerate(lines)]


def rows_of_costs(plan: Outline) -> list[tuple[str, str]]:
    """Return the rows about bytes, memory and time."""
    sent, state, memory, seconds = plan["bytes"], plan["client_state"], plan["memory"]["worker"], plan["seconds"]
    worker = "unknown on this system" if memory is None else f"{as_bytes(memory)} a worker"
    parts: dict[str, list[Outline]] = {}
    for entry in plan["leaves"]:
        names = entry["name"].split("/")
        parts.setdefault("/".join(names[: 2 if names[0] == "payload" else 1]), []).append(entry)
    leaves = []
    for part, entries in parts.items():
        size, tensors = sum(entry["bytes"] for entry in entries), []
        for entry in entries:
            tensors.append(f"{entry['name'].removeprefix(part)[1:]} {entry['shape']} {entry['dtype']}")
        leaves.append(truncate(f"{part}, {as_bytes(size)}: {few(tensors, TENSORS_SHOWN)}", LONGEST))
    visit, in_round, in_run = (duration(seconds[part]) for part in ("visit", "round", "run"))
    return [
        ("traffic", f"{as_bytes(sent['down'])} down and {as_bytes(sent['up'])} up a round"),
        *headed("leaves a client", [*leaves, "its number of examples, as its weight, and the values that are logged"]),
        *(
            [("updates", f"{as_bytes(plan['updates'])} a worker, which the server sees one by one")]
            * bool(plan["updates"])
        ),
        *(
            [("versions", f"{plan['versions']['number']} on each worker, {as_bytes(plan['versions']['bytes'])}")]
            * bool(plan["versions"]["number"])
        ),
        ("client state", f"{as_bytes(state['each'])} a client after its first visit, {as_bytes(state['all'])} in all"),
        ("memory", f"{worker}, {as_bytes(plan['memory']['clients'])} of it client state"),
        ("time", f"{visit} a visit, {in_round} a round, {in_run} for the rounds to come, without evaluation"),
    ]


def as_bytes(number: float) -> str:
    """Return a number of bytes in a suitable unit."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(number, 1024)), len(units) - 1) if number >= 1 else 0
    return f"{number / 1024**power:.{0 if power == 0 else 1}f} {units[power]}"


def duration(seconds: float) -> str:
    """Return seconds in a suitable unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
