"""What a fit would be: its parts, its sizes and its cost, from a few steps of one client."""

from __future__ import annotations

import copy
import inspect
import math
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from fl_lightning.client.taps import submodule
from fl_lightning.engine.commands.fit import begin_fit, prepare_fit
from fl_lightning.engine.evaluation.evaluator import PHASES, step_name
from fl_lightning.engine.evaluation.loop import can_share
from fl_lightning.engine.model_files import warn_of_arguments
from fl_lightning.engine.rounds import cohort
from fl_lightning.errors import UsageError, text_of
from fl_lightning.method import Method
from fl_lightning.records.hyperparameters import plain_arguments
from fl_lightning.sampling import size_of_cohort
from fl_lightning.state import num_bytes, select
from fl_lightning.sums import Totals, Update

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run

# batches of a client, and of an evaluation, that are measured
BATCHES, EVALUATED = 4, 2
# phases of the stopwatch that are spent once a batch; the others are once a visit
OF_BATCHES = ("data", "forward_backward", "correct", "step")
# what is named in a line of the text; of more, only their number
SHOWN = 6

Plan = dict[str, Any]


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """In this block warnings are collected instead of shown; their texts are in the list after it, each once."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        yield texts
    texts += dict.fromkeys(" ".join(str(one.message).split()) for one in caught)


def copies(model: LightningModule, methods: list[Method]) -> tuple[LightningModule, list[Method]]:
    """Copies of the model and the methods, on which the measured steps leave no trace.

    Raises:
        UsageError: they cannot be copied.
    """
    try:
        return copy.deepcopy((model, methods))
    except Exception as error:
        hint = f"it cannot be copied ({text_of(error)}), and the doctor works on a copy"
        raise UsageError(f"model={type(model).__name__}: {hint}; call trainer.fit") from error


def examine(run: Run, ckpt_path: str | Path | None, weights: Path | None = None, allow_changes: bool = False) -> Plan:
    """The plan of a fit, in plain values; all workers call this."""
    found, checkpoint = prepare_fit(run, ckpt_path, weights, allow_changes)
    begin_fit(run, fresh=found is None)
    if run.client.sent and not run.trainer.fast_dev_run:
        warn_of_arguments(run, "model.ckpt")
    batches = batches_of_visits(run)
    done = min(checkpoint["round"], run.trainer.max_rounds)
    trial = measure(run, done, batches)
    return {
        "run": of_run(run, done),
        "methods": {method.name: of_method(method) for method in run.methods.methods},
        "model": of_model(run),
        "optimizers": of_optimizers(run),
        "taps": of_taps(run),
        "clients": of_clients(run, batches),
        **of_costs(run, done, batches, trial),
    }


# ---------------------------------------------------------------------- what is known before a step
def of_run(run: Run, done: int) -> Plan:
    """Rounds, cohort and where they run."""
    trainer, number = run.trainer, run.data.num_clients
    return {
        "rounds": trainer.max_rounds,
        "rounds_done": done,
        "cohort": size_of_cohort(number, trainer.participation, trainer.cohort_size),
        "workers": run.workers.size,
        "threads": torch.get_num_threads(),
        "device": str(run.fabric.device),
        "precision": str(run.fabric.strategy.precision.precision),
        "seed": run.seed,
        "systems": None if trainer.systems is None else plain_arguments(trainer.systems),
    }


def of_method(method: Method) -> Plan:
    """The class of a method and its coefficients."""
    return {"class": type(method).__name__, "arguments": plain_arguments(method)}


def of_model(run: Run) -> Plan:
    """Numbers in the model by kind, and how many entries of its state stay with each client."""
    client = run.client
    buffers = [name for name in client.others if name not in set(client.frozen)]
    named = {"trained": client.trainable, "frozen": client.frozen, "buffers": buffers, "kept_by_clients": client.kept}
    counts = {kind: sum(client.live[name].numel() for name in names) for kind, names in named.items()}
    return {"class": type(client.module).__name__, **counts}


def of_optimizers(run: Run) -> Plan:
    """The optimizers of client and server with their options, and the module's schedulers."""
    optimizer, schedulers = run.local_training.optimizers.first
    server = run.server.optimizer
    return {
        "client": described(optimizer),
        "schedulers": [type(config.scheduler).__name__ for config in schedulers],
        "server": None if server is None else described(server),
    }


def described(optimizer: Optimizer) -> str:
    """An optimizer with its learning rate and the options that are not the default ones."""
    defaults = {name: one.default for name, one in inspect.signature(type(optimizer).__init__).parameters.items()}
    options = {name: value for name, value in optimizer.param_groups[0].items() if name in optimizer.defaults}
    shown = [f"{name}={value}" for name, value in options.items() if name == "lr" or value != defaults.get(name, value)]
    return f"{type(optimizer).__name__}({', '.join(shown)})"


def of_taps(run: Run) -> Plan:
    """Each tap that the module or the trainer names: what it is bound to, and which classes read it."""
    module, trainer = run.client.module, run.trainer
    known = {**getattr(module, "taps", {}), **trainer.taps}
    readers: list[Any] = [*run.methods.methods, *trainer.callbacks]
    parts = dict(module.named_modules())
    return {
        name: {
            "output": binding,
            "class": type(parts[submodule(binding)]).__name__ if submodule(binding) in parts else None,
            "readers": [type(one).__name__ for one in readers if name in one.requires],
        }
        for name, binding in known.items()
    }


def batches_of_visits(run: Run) -> list[int]:
    """The batches of a visit of each client."""
    clock = run.resident.clock
    lengths = [run.local_training.batches(k) for k in range(run.data.num_clients)]
    of_length = {length: sum(replace(clock, batches=length).passes) for length in set(lengths)}
    return [of_length[length] for length in lengths]


def of_clients(run: Run, batches: list[int]) -> Plan:
    """How many examples and batches clients have, and which last batches are not full."""
    clients = range(run.data.num_clients)
    ends = Counter(last_batch(run, k) for k in clients)
    return {
        "number": len(clients),
        "examples": spread([run.data.info(k).num_examples for k in clients]),
        "batches": spread(batches),
        "without_batches": batches.count(0),
        **{kind: ends[kind] for kind in ("short", "single", "dropped")},
    }


def last_batch(run: Run, k: int) -> str:
    """What the last batch of client ``k`` is: ``full``, ``short``, ``single`` (one example), ``dropped`` or unknown."""
    loader, number = run.data.train_dataloader(k), run.data.info(k).num_examples
    size = getattr(loader, "batch_size", None)
    if not size:
        return "unknown"
    rest = number % size
    if rest == 0:
        return "full"
    return "dropped" if getattr(loader, "drop_last", False) else "single" if rest == 1 else "short"


def spread(values: Sequence[int]) -> list[float]:
    """The least, the median and the largest of some numbers."""
    return [min(values), statistics.median(values), max(values)]


# ---------------------------------------------------------------------- what is measured
def measure(run: Run, done: int, batches: list[int]) -> Plan:
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
    visit = visited(run, k, done)
    evaluation = {phase: seconds_of_evaluation(run, phase) for phase in PHASES}
    return {**visit, "evaluation": evaluation, "peak": peak_memory(run)}


def visited(run: Run, k: int, round_: int) -> Plan:
    """Seconds and bytes of a short visit of client ``k``; one batch goes before it, in which much is done once."""
    limited_visit(run, k, round_, 1)
    run.stopwatch.reset()
    update, taken = limited_visit(run, k, round_, BATCHES)
    seconds = dict(run.stopwatch.seconds)
    began = time.perf_counter()
    Totals(run.fabric.device).add(update)
    adding = time.perf_counter() - began
    return {
        "client": k,
        "batches": taken,
        "batch": sum(seconds.get(phase, 0.0) for phase in OF_BATCHES) / taken,
        "visit": adding + sum(value for phase, value in seconds.items() if phase not in OF_BATCHES),
        "up": update.num_bytes,
        "state": num_bytes(run.client.memories().get(k, {})),
    }


def limited_visit(run: Run, k: int, round_: int, most: int) -> tuple[Update, int]:
    """A visit of at most so many batches: what the client sends, and the number of batches."""
    clock = run.resident.clock
    before = clock.limit
    clock.limit = most if before is None else min(most, before)
    try:
        return run.local_training.visit(k, round_, run.server.state), sum(clock.passes)
    finally:
        clock.limit = before


def seconds_of_evaluation(run: Run, phase: str) -> float:
    """Expected seconds of an evaluation on this worker: those of a few batches, times their number."""
    if not run.evaluator.has_data(phase) or step_name(run.client.module, phase) is None:
        return 0.0
    state = run.methods.evaluated_state(run.server)
    whole = sum(run.loaders.length(loader) for loader in run.loaders.evaluation(phase))
    before = run.loaders.limit
    try:
        for limit in (1, EVALUATED):
            run.loaders.limit = limit if before is None else min(limit, before)
            began = time.perf_counter()
            with run.workers.alone():
                run.evaluator.one_model(phase, state, observed=False)
            taken = time.perf_counter() - began
            part = sum(run.loaders.length(loader) for loader in run.loaders.evaluation(phase))
    finally:
        run.loaders.limit = before
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
def of_costs(run: Run, done: int, batches: list[int], trial: Plan) -> Plan:
    """Bytes, memory and seconds of a round; all workers call this."""
    trials = run.workers.gather(trial)
    if not trial:
        return {}
    mean = {key: statistics.fmean(one[key] for one in trials) for key in ("batch", "visit")}
    number, size = run.data.num_clients, of_run(run, done)["cohort"]
    client, workers = run.client, run.workers.size
    down = num_bytes(select(run.server.state, client.sent + client.sent_others))
    visits = [mean["visit"] + mean["batch"] * taken for taken in batches]
    training = max(size * statistics.fmean(visits) / workers, max(visits) if size == number else 0.0)
    evaluation = evaluation_seconds(run, trials)
    rounds, every = run.trainer.max_rounds - done, run.trainer.eval_every_n_rounds
    evaluations = math.ceil(rounds / every)
    # what lies beyond the limit is on disk
    kept = min(number * trial["state"] / workers, client.memories().limit)
    peaks = [one["peak"] for one in trials if one["peak"] is not None]
    return {
        "bytes": {"down": size * down, "up": size * trial["up"]},
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


def evaluation_seconds(run: Run, trials: list[Plan]) -> float:
    """Expected seconds of an evaluation: of the global model, or of the own models of all clients."""
    whole = 0.0
    for phase in PHASES:
        seconds = statistics.fmean(one["evaluation"][phase] for one in trials)
        name = step_name(run.client.module, phase)
        stage = "test" if name == "test_step" else "validation"
        if run.client.kept:
            whole += seconds * run.data.num_clients / run.workers.size
        else:
            whole += seconds / (run.workers.size if can_share(run.client, stage) else 1)
    return whole


# ---------------------------------------------------------------------- as text
def as_text(plan: Plan) -> str:
    """A plan as aligned lines: what it is about, and what it is."""
    rows = [
        *rows_of_run(plan),
        *rows_of_model(plan),
        *rows_of_taps(plan["taps"]),
        *rows_of_clients(plan["clients"]),
        *(rows_of_costs(plan) if "seconds" in plan else [("expected", "nothing: no round trains anything")]),
        *[("warnings" if number == 0 else "", text) for number, text in enumerate(plan["warnings"] or ["none"])],
    ]
    width = max(len(head) for head, _ in rows) + 2
    return "\n".join(f"{head.ljust(width)}{text}" for head, text in rows)


Row = tuple[str, str]


def rows_of_run(plan: Plan) -> list[Row]:
    """The methods, the rounds, and where they run."""
    run, methods = plan["run"], plan["methods"]
    done = f", {run['rounds_done']} of them done" if run["rounds_done"] else ""
    given = [", ".join(f"{key}={value}" for key, value in one["arguments"].items()) for one in methods.values()]
    calls = [f"{one['class']}({text})" for one, text in zip(methods.values(), given, strict=True)]
    where = f"{count(run['workers'], 'worker')} on {run['device']}, {count(run['threads'], 'thread')} each"
    systems = ", ".join(f"{key}={value}" for key, value in (run["systems"] or {}).items() if value)
    return [
        ("methods", ", ".join(calls) or "none, which is FedAvg"),
        ("rounds", f"{run['rounds']}{done}; {run['cohort']} of {count(plan['clients']['number'], 'client')} in each"),
        *([("", f"simulated: {systems}; the costs below are without it")] if run["systems"] is not None else []),
        ("workers", f"{where}, precision {run['precision']}, seed {run['seed']}"),
    ]


def rows_of_model(plan: Plan) -> list[Row]:
    """The model and the optimizers."""
    model, optimizers = plan["model"], plan["optimizers"]
    schedulers = "".join(f", {name}" for name in optimizers["schedulers"])
    rows = [
        ("model", model["class"]),
        ("parameters", f"{model['trained']:,} trained, {model['frozen']:,} frozen; {model['buffers']:,} in buffers"),
    ]
    if model["kept_by_clients"]:
        rows.append(("", f"{model['kept_by_clients']:,} of these numbers stay with each client"))
    return [
        *rows,
        ("client optimizer", optimizers["client"] + schedulers),
        ("server optimizer", optimizers["server"] or "none: nothing travels"),
    ]


def rows_of_taps(taps: Plan) -> list[Row]:
    """The taps that are read, each with its readers, and the names of the others."""
    read = {name: tap for name, tap in taps.items() if tap["readers"]}
    rows = [
        f"{name} = {tap['output']} ({tap['class']}), read by {', '.join(tap['readers'])}" for name, tap in read.items()
    ]
    others = [name for name in taps if name not in read]
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        rows.append(f"read by nothing: {', '.join(others[:SHOWN])}{more}")
    return [("taps" if number == 0 else "", text) for number, text in enumerate(rows or ["none"])]


def rows_of_clients(clients: Plan) -> list[Row]:
    """Examples and batches of the clients."""
    kinds = {
        "without_batches": "train nothing",
        "short": "end with a short batch",
        "single": "end with a batch of one example",
        "dropped": "drop a last batch that is not full",
    }
    ends = [f"{clients[kind]} {text}" for kind, text in kinds.items() if clients[kind]]
    return [
        ("examples", f"{listed(clients['examples'])} a client (min, median, max)"),
        ("batches", f"{listed(clients['batches'])} a visit (min, median, max)"),
        ("", f"of {count(clients['number'], 'client')}, {', '.join(ends) or 'all end with a full batch'}"),
    ]


def rows_of_costs(plan: Plan) -> list[Row]:
    """Bytes, memory and time that are expected, and what they are extrapolated from."""
    sent, state, memory = plan["bytes"], plan["client_state"], plan["memory"]["worker"]
    seconds, measured = plan["seconds"], plan["measured"]
    worker = "unknown on this system" if memory is None else f"{size(memory)} a worker"
    source = f"{measured['batches']} batches of client {measured['client']}"
    return [
        ("traffic", f"{size(sent['down'])} down and {size(sent['up'])} up a round"),
        ("client state", f"{size(state['each'])} a client after its first visit, {size(state['all'])} in all"),
        ("memory", f"{worker}, of which {size(plan['memory']['clients'])} client state"),
        ("time", f"{duration(seconds['round'])} a round, {duration(seconds['run'])} for the rounds to come"),
        ("", f"training {duration(seconds['training'])}, evaluation {duration(seconds['evaluation'])}"),
        ("extrapolated", f"from {source} and {measured['evaluation_batches']} batches of evaluation,"),
        ("", "to all clients; without callbacks and checkpoints"),
    ]


def listed(values: Sequence[float]) -> str:
    """Numbers, separated by commas."""
    return ", ".join(f"{value:,.10g}" for value in values)


def count(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
