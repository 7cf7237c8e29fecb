"""What a fit would be: its parts, its sizes and its cost, from a few steps of one client."""

from __future__ import annotations

import copy
import inspect
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from fl_lightning.client.batch_norm import statistics_of
from fl_lightning.client.client import RECALIBRATES
from fl_lightning.client.clock import Clock
from fl_lightning.client.taps import submodule
from fl_lightning.data.loaders import last_batch
from fl_lightning.engine.checks import few
from fl_lightning.engine.commands.fit import begin_fit, prepare_fit
from fl_lightning.engine.evaluation.evaluator import PHASES, step_name
from fl_lightning.engine.evaluation.loop import can_share
from fl_lightning.engine.groups.group import Group, Member
from fl_lightning.engine.loaders import Loaders
from fl_lightning.engine.model_files import warn_of_arguments
from fl_lightning.engine.replaced import replaced
from fl_lightning.engine.rounds import cohort
from fl_lightning.engine.run import Run
from fl_lightning.engine.sent import Entry, contents_of, entries_of
from fl_lightning.errors import UsageError, clipped, count, text_of
from fl_lightning.method import Method
from fl_lightning.records.hyperparameters import plain_arguments
from fl_lightning.sampling import size_of_cohort
from fl_lightning.state import num_bytes, select
from fl_lightning.sums import Totals, Update

# batches of a client, and of an evaluation, that are measured
BATCHES, EVALUATED = 4, 2
# phases of the stopwatch that are spent once a batch; the others are once a visit
OF_BATCHES = ("data", "forward_backward", "correct", "step")
SPECTRA = "add --trainer.callbacks+=SpectrumMonitor, which reads the taps representation and logits"
# what is named in a line of the text; of more, only their number
TAPS_SHOWN = 6
ENTRIES_SHOWN, LONGEST = 2, 100

Outline = dict[str, Any]


def copies(model: LightningModule, methods: list[Method]) -> tuple[LightningModule, list[Method]]:
    """Copies of the model and the methods, on which the measured steps leave no trace.

    A rehearsal of the client would not do: the run is built on the module before, which sets it up, converts it and
    loads weights.

    Raises:
        UsageError: they cannot be copied.
    """
    try:
        return copy.deepcopy((model, methods))
    except Exception as error:
        hint = f"it cannot be copied ({text_of(error)}), and the doctor works on a copy"
        raise UsageError(f"model={type(model).__name__}: {hint}; call trainer.fit") from error


def examine(
    run: Run, ckpt_path: str | Path | None, weights: Path | None = None, allow_changes: bool = False
) -> Outline:
    """The plan of a fit, in plain values; all workers call this."""
    source, checkpoint = prepare_fit(run, ckpt_path, weights, allow_changes)
    begin_fit(run, fresh=source is None)
    if run.client.sent and not run.trainer.fast_dev_run:
        warn_of_arguments(run, "model.ckpt")
    trainer, client, clock, number = run.trainer, run.client, run.resident.clock, run.data.num_clients
    lengths = [run.local_training.batches(k) for k in range(number)]
    visits = {length: sum(replace(clock, batches=length).passes) for length in set(lengths)}
    batches = [visits[length] for length in lengths]
    done = min(checkpoint["round"], trainer.max_rounds)
    cohort_size = size_of_cohort(number, trainer.participation, trainer.cohort_size)
    frozen = set(client.frozen)
    entries = {
        "trained": client.trainable,
        "frozen": client.frozen,
        "buffers": [name for name in client.others if name not in frozen],
        "kept_by_clients": client.kept,
    }
    optimizer, schedulers = run.local_training.optimizers.first
    server, ends = run.server.optimizer, Counter(last_batch(run.data, k) for k in range(number))
    trial = measure(run, done, batches)
    parts = dict(client.module.named_modules())
    readers: list[Any] = [*run.methods.methods, *trainer.callbacks]
    return {
        "run": {
            "rounds": trainer.max_rounds,
            "rounds_done": done,
            "cohort": cohort_size,
            "workers": run.workers.size,
            "threads": torch.get_num_threads(),
            "device": str(run.fabric.device),
            "precision": str(run.fabric.strategy.precision.precision),
            "seed": run.seed,
            "clients_per_step": run.local_training.choice.size,
            "side_by_side": run.local_training.choice.reason,
            "systems": None if trainer.systems is None else plain_arguments(trainer.systems),
            "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        },
        "methods": {
            method.name: {"class": type(method).__name__, "arguments": plain_arguments(method)}
            for method in run.methods.methods
        },
        # numbers in the model by kind, and how many of them stay with each client
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
        # how many examples and batches they have, and which last batches are not full
        "clients": {
            "number": number,
            "examples": spread([run.data.info(k).num_examples for k in range(number)]),
            "batches": spread(batches),
            "without_batches": batches.count(0),
            **{kind: ends[kind] for kind in ("short", "single", "dropped")},
        },
        **of_costs(run, done, cohort_size, batches, trial),
    }


def described(optimizer: Optimizer) -> str:
    """An optimizer with its learning rate and the options that are not the default ones."""
    defaults = {name: p.default for name, p in inspect.signature(type(optimizer).__init__).parameters.items()}
    options = {name: value for name, value in optimizer.param_groups[0].items() if name in optimizer.defaults}
    shown = [f"{name}={value}" for name, value in options.items() if name == "lr" or value != defaults.get(name, value)]
    return f"{type(optimizer).__name__}({', '.join(shown)})"


def spread(values: Sequence[int]) -> list[float]:
    """The least, the median and the largest of some numbers."""
    return [min(values), statistics.median(values), max(values)]


# ---------------------------------------------------------------------- what is measured
def measure(run: Run, done: int, batches: list[int]) -> Outline:
    """What a few steps of one client and a few batches of evaluation take; nothing where nothing is trained."""
    trained = sorted((number, k) for k, number in enumerate(batches) if number)
    if done >= run.trainer.max_rounds or not trained:
        return {}
    if run.fabric.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.fabric.device)
    _, k = trained[len(trained) // 2]
    run.server.begin_round(done, cohort(run, done))
    run.resident.begin_round(done)
    run.methods.on_round_start(run.server)
    clock, group = run.resident.clock, group_of(run, k)
    with limited(clock, 1):
        visit_first(run, group, done)  # in which much is done once
    run.stopwatch.reset()
    with limited(clock, BATCHES):
        update = visit_first(run, group, done)
        taken = sum(sum(clock.at(done, run.local_training.batches(j)).passes) for j in group)
    seconds = dict(run.stopwatch.seconds)
    began = time.perf_counter()
    Totals(run.fabric.device).add(update)
    adding = time.perf_counter() - began
    return {
        "client": k,
        "batches": taken,
        "batch": sum(seconds.get(phase, 0.0) for phase in OF_BATCHES) / taken,
        "visit": (adding + sum(value for phase, value in seconds.items() if phase not in OF_BATCHES)) / len(group),
        "up": update.num_bytes + sum(entry.num_bytes for entry in sums_of_recalibration(run)),
        "leaves": [*entries_of(contents_of(run.client, update)), *sums_of_recalibration(run)],
        "state": num_bytes(run.client.memories().get(k, {})),
        "evaluation": {phase: seconds_of_evaluation(run, phase) for phase in PHASES},
        "peak": peak_memory(run),
    }


def sums_of_recalibration(run: Run) -> list[Entry]:
    """Return the sums from which the server recomputes the statistics of BatchNorm: counts, inputs and squares."""
    if run.trainer.buffers not in RECALIBRATES:
        return []
    sizes = {path: run.client.live[statistics_of(path)[0]].numel() for path in run.client.batch_norms}
    parts = [(path, *part) for path, size in sizes.items() for part in (("count", ()), ("sums", (2, size)))]
    return [Entry(f"recalibration/{path}.{name}", "float64", shape) for path, name, shape in parts]


def group_of(run: Run, k: int) -> list[int]:
    """Clients that train side by side, of which client ``k`` is the first: those nearest to it in their batches."""
    steps, size = run.local_training.batches, min(run.local_training.choice.size, len(run.server.cohort))
    others = [j for j in range(run.data.num_clients) if steps(j) and j != k]
    group = [k, *sorted(others, key=lambda j: abs(steps(j) - steps(k)))[: size - 1]]
    return sorted(group, key=lambda j: -steps(j))


def visit_first(run: Run, group: list[int], round_: int) -> Update:
    """Train a group, and return what its first client sends."""
    if len(group) == 1:
        return run.local_training.visit(group[0], round_, run.server.state)
    visits = Group(run.local_training, [Member(k) for k in group], round_, run.server.state)
    with visits.training_all():
        return visits.update(0)


@contextmanager
def limited(batched: Clock | Loaders, batches: int) -> Iterator[None]:
    """In this block a visit, or an evaluation, has at most so many batches."""
    with replaced(batched, limit=batches if batched.limit is None else min(batches, batched.limit)):
        yield


def seconds_of_evaluation(run: Run, phase: str) -> float:
    """Expected seconds of an evaluation on this worker: those of a few batches, times their number."""
    if not run.evaluator.has_data(phase) or step_name(run.client.module, phase) is None:
        return 0.0
    state = run.methods.evaluated_state(run.server)
    whole = sum(run.loaders.length(loader) for loader in run.loaders.evaluation(phase))
    for limit in (1, EVALUATED):
        with limited(run.loaders, limit), run.workers.local_only():
            began = time.perf_counter()
            run.evaluator.one_model(phase, state, observed=False)
            taken = time.perf_counter() - began
            part = sum(run.loaders.length(loader) for loader in run.loaders.evaluation(phase))
    return taken * whole / part if part else 0.0


def peak_memory(run: Run) -> int | None:
    """Most bytes that this worker has held so far, of the GPU where it has one; None where that is not known."""
    if run.fabric.device.type == "cuda":
        return torch.cuda.max_memory_allocated(run.fabric.device)
    try:
        import resource  # which Windows does not have
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------------- what is expected
def of_costs(run: Run, done: int, size: int, batches: list[int], trial: Outline) -> Outline:
    """Bytes, memory and seconds of a round; all workers call this."""
    trials = run.workers.gather(trial)
    if not trial:
        return {}
    mean = {key: statistics.fmean(worker[key] for worker in trials) for key in ("batch", "visit")}
    number, client, workers = run.data.num_clients, run.client, run.workers.size
    down = num_bytes(select(run.server.state, client.sent + client.sent_others + client.recomputed))
    visits = [mean["visit"] + mean["batch"] * taken for taken in batches]
    training = max(size * statistics.fmean(visits) / workers, max(visits) if size == number else 0.0)
    evaluation = 0.0  # of the global model, or of the own models of all clients
    for phase in PHASES:
        stage = "test" if step_name(client.module, phase) == "test_step" else "validation"
        models, sharing = (number, workers) if client.kept else (1, workers if can_share(client, stage) else 1)
        evaluation += statistics.fmean(worker["evaluation"][phase] for worker in trials) * models / sharing
    rounds, every = run.trainer.max_rounds - done, run.trainer.eval_every_n_rounds
    evaluations = math.ceil(rounds / every)
    # what lies beyond the limit is on disk
    kept = min(number * trial["state"] / workers, client.memories().limit)
    peaks = [worker["peak"] for worker in trials if worker["peak"] is not None]
    return {
        "bytes": {"down": size * down, "up": size * trial["up"]},
        # what a client sends, beside its weight and what is logged
        "leaves": [{**entry._asdict(), "shape": [*entry.shape], "bytes": entry.num_bytes} for entry in trial["leaves"]],
        "client_state": {"each": trial["state"], "all": number * trial["state"]},
        "memory": {"worker": int(max(peaks) + kept) if peaks else None, "clients": int(kept)},
        "seconds": {
            "training": training,
            "evaluation": evaluation,
            "round": training + evaluation * evaluations / rounds,
            "run": training * rounds + evaluation * evaluations,
        },
        "measured": {"client": trial["client"], "batches": trial["batches"], "evaluation_batches": EVALUATED, **mean},
    }


# ---------------------------------------------------------------------- as text
def as_text(plan: Outline) -> str:
    """A plan as aligned lines: what it is about, and what it is."""
    run, methods, model, optimizers, clients = (plan[k] for k in ("run", "methods", "model", "optimizers", "clients"))
    kept, done = model["kept_by_clients"], f", {run['rounds_done']} of them done" if run["rounds_done"] else ""
    calls = [f"{method['class']}({pairs(method['arguments'])})" for method in methods.values()]
    where = f"{count(run['workers'], 'worker')} on {run['device']}, {count(run['threads'], 'thread')} each"
    systems = pairs({key: value for key, value in (run["systems"] or {}).items() if value})
    read = {name: tap for name, tap in plan["taps"].items() if tap["readers"]}
    taps = [f"{k} = {tap['output']} ({tap['class']}), read by {', '.join(tap['readers'])}" for k, tap in read.items()]
    others = [name for name in plan["taps"] if name not in read]
    taps += [f"read by nothing: {few(others, TAPS_SHOWN)}"] * bool(others)
    kinds = {
        "without_batches": "train nothing",
        "short": "end with a short batch",
        "single": "end with a batch of one example (see drop_last)",
        "dropped": "drop a last batch that is not full",
    }
    ends = ", ".join(f"{clients[kind]} {text}" for kind, text in kinds.items() if clients[kind])
    beside = "one client after the other" if run["clients_per_step"] == 1 else "clients in groups"
    # a head that is empty continues the line above
    rows = [
        ("methods", ", ".join(calls) or "none, which is FedAvg"),
        ("rounds", f"{run['rounds']}{done}; {run['cohort']} of {count(clients['number'], 'client')} in each"),
        *([("", f"simulated: {systems}; the costs below are without it")] if run["systems"] is not None else []),
        ("workers", f"{where}, precision {run['precision']}, seed {run['seed']}"),
        ("side by side", f"{beside}: {run['side_by_side']}"),
        ("model", model["class"]),
        ("parameters", f"{model['trained']:,} trained, {model['frozen']:,} frozen; {model['buffers']:,} in buffers"),
        *([("", f"{kept:,} of these numbers stay with each client")] if kept else []),
        ("client optimizer", ", ".join([optimizers["client"], *optimizers["schedulers"]])),
        ("server optimizer", optimizers["server"] or "none: nothing travels"),
        *headed("taps", taps or ["none"]),
        ("callbacks", ", ".join(run["callbacks"]) or "none"),
        *([] if "SpectrumMonitor" in run["callbacks"] else [("", f"no spectra: {SPECTRA}")]),
        ("examples", f"{listed(clients['examples'])} a client (min, median, max)"),
        ("batches", f"{listed(clients['batches'])} a visit (min, median, max)"),
        ("", f"of {count(clients['number'], 'client')}, {ends or 'all end with a full batch'}"),
        *(rows_of_costs(plan) if "seconds" in plan else [("expected", "nothing: no round trains anything")]),
        *headed("warnings", plan["warnings"] or ["none"]),
    ]
    width = max(len(head) for head, _ in rows) + 2
    return "\n".join(f"{head.ljust(width)}{text}" for head, text in rows)


def pairs(values: Outline) -> str:
    """``key=value`` of each entry."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def headed(head: str, lines: list[str]) -> list[tuple[str, str]]:
    """Rows of which the first has a head."""
    return [("" if number else head, text) for number, text in enumerate(lines)]


def rows_of_costs(plan: Outline) -> list[tuple[str, str]]:
    """Bytes, memory and time that are expected, and what they are extrapolated from."""
    sent, state, memory = plan["bytes"], plan["client_state"], plan["memory"]["worker"]
    seconds, measured = plan["seconds"], plan["measured"]
    worker = "unknown on this system" if memory is None else f"{size(memory)} a worker"
    source = f"{measured['batches']} batches of client {measured['client']}"
    return [
        ("traffic", f"{size(sent['down'])} down and {size(sent['up'])} up a round"),
        *headed("leaves a client", rows_of_leaving(plan["leaves"])),
        ("client state", f"{size(state['each'])} a client after its first visit, {size(state['all'])} in all"),
        ("memory", f"{worker}, of which {size(plan['memory']['clients'])} client state"),
        ("time", f"{duration(seconds['round'])} a round, {duration(seconds['run'])} for the rounds to come"),
        ("", f"training {duration(seconds['training'])}, evaluation {duration(seconds['evaluation'])}"),
        ("extrapolated", f"from {source} and {measured['evaluation_batches']} batches of evaluation,"),
        ("", "to all clients; without callbacks and checkpoints"),
    ]


def rows_of_leaving(entries: Sequence[Outline]) -> list[str]:
    """What a client sends, part by part: names and shapes of the first few entries, and the bytes of all."""
    parts: dict[str, list[Outline]] = {}
    for entry in entries:
        parts.setdefault(
            "/".join(entry["name"].split("/")[: 2 if entry["name"].startswith("payload/") else 1]), []
        ).append(entry)
    lines = []
    for part, several in parts.items():
        names = [f"{entry['name'].removeprefix(part)[1:]} {entry['shape']} {entry['dtype']}" for entry in several]
        whole = f"{part}, {size(sum(entry['bytes'] for entry in several))}: {few(names, ENTRIES_SHOWN)}"
        lines.append(clipped(whole, LONGEST))
    return [*lines, "its number of examples, as its weight, and the values that are logged"]


def listed(values: Sequence[float]) -> str:
    """Numbers, separated by commas."""
    return ", ".join(f"{value:,.10g}" for value in values)


def size(number: float) -> str:
    """A number of bytes in the unit that suits it."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(number, 1024)), len(units) - 1) if number >= 1 else 0
    return f"{number / 1024**power:.{0 if power == 0 else 1}f} {units[power]}"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
