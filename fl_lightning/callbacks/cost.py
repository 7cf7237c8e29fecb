"""The costs of a run: arithmetic, traffic, memory of clients, seconds and memory, by round and in total."""

from __future__ import annotations

import csv
import io
import sys
import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.callbacks.measurement import PeriodicCallback, skips
from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.state import num_bytes
from fl_lightning.core.weighted import Sums, Weighted
from fl_lightning.data.client_loaders import num_batches
from fl_lightning.storage.atomic_io import write_atomically

# tags by column of the file
METRIC_OF_COLUMN = {
    "clients": "clients",
    "steps": "cost/steps",
    "flops": "cost/flops",
    "flops_extra": "cost/flops_extra",
    "forwards_extra": "cost/forwards_extra",
    "bytes_down": "bytes/down",
    "bytes_up": "bytes/up",
    "client_state": "cost/client_state",
    "seconds": "time/counted",
    "memory_peak": "memory/peak",
}
ADDED = ("steps", "flops", "flops_extra", "forwards_extra", "bytes_down", "bytes_up", "seconds")


class CostLedger(PeriodicCallback):
    r"""Counts the costs of each round, and writes ``cost.csv``: a row for each round, with running totals.

    Its columns, and the tags of their metrics:

    - ``methods``: the run's methods; ``clients``: number of clients that sent an update; ``steps`` (``cost/steps``):
      local steps of all clients.
    - ``flops`` (``cost/flops``): floating-point operations of local training; ``flops_extra`` (``cost/flops_extra``):
      the operations that methods add to the module's own. ``flops_extra/<name>`` counts one method;
      these need not add up if methods share a reference model or freeze layers.
    - ``forwards_extra`` (``cost/forwards_extra``): forward passes of reference models.
    - ``bytes_down`` (``bytes/down``): bytes that the server sends to the cohort: the entries of the global state that
      travel, and the values of methods (:class:`.ServerValue`). ``bytes_up`` (``bytes/up``): bytes that it receives.
    - ``client_state`` (``cost/client_state``): mean bytes that a client of the round keeps for its next visit;
      ``client_state/<name>`` is the part of a method, ``client_state/state`` the part of client-local entries.
    - ``seconds`` (``time/counted``): from drawing the cohort to the end of the round, without writing checkpoints.
    - ``memory_peak`` (``memory/peak``): largest memory of a worker in bytes: on a GPU the allocations of this round,
      on a CPU the resident memory of the process since its start.
    - ``<column>_total``: the sum over all rounds so far, for additive columns.

    Operations are approximate: matrix products and convolutions, as ``torch.utils.flop_counter``
    counts them (a multiplication and an addition are two); normalisation, activations, the optimizer, and the methods'
    operations on gradients and weights do not count. One step of one client is counted, forward and backward, in rounds
    0 and 1 and then every ``every_n_rounds`` rounds, outside of training, and multiplied by all local steps: an
    incomplete last batch counts as a full batch. Extra operations of a method with reference models are multiplied by
    their forward passes instead. Evaluation and callbacks count only in ``seconds`` and ``memory_peak``.

    Args:
        every_n_rounds: rounds from one count of a step, and one update of the file, to the next, at least 1. The file
            is also updated in the last round.

    Raises:
        UsageError: the argument is below 1.
    """

    file = "cost.csv"

    def on_fit_start(self, trainer: RunContext) -> None:
        super().on_fit_start(trainer)
        self._step: dict[str, Any] = {}

    def on_round_start(self, trainer: RunContext) -> None:
        self._began, self._sums = time.perf_counter(), Sums()
        self._runs = trainer.client.references.num_runs
        round_ = trainer.server.round
        # methods with a client's previous model cost more in later visits
        returns = not trainer.client.memories().owners.keys().isdisjoint(trainer.server.cohort)
        if round_ <= 1 or self.is_multiple(round_) or not self._step or returns > self._step["returns"]:
            self._step = count_step(trainer) or self._step
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        memory = trainer.client.memories().get(client.info.id, {})
        sizes = {name: Weighted.of(num_bytes(part)) for name, part in memory.items()}
        counted = {"steps": Weighted.summed(client.num_steps, 1), "clients": Weighted.of(1)}
        self._sums.add({**counted, "kept": sizes} if sizes else counted)

    def on_round_end(self, trainer: RunContext) -> None:
        runs = sum(trainer.gather(trainer.client.references.num_runs - self._runs))
        trainer.all_reduce(self._sums)
        totals = self._sums.totals
        steps = int(totals["steps"].total) if totals else 0
        clients = float(totals["clients"].total) if totals else 0.0
        kept_totals = totals.get("kept", {})
        memory_sizes = {name: float(part.total) / clients for name, part in kept_totals.items()}
        sizes = {f"client_state/{name}": size for name, size in memory_sizes.items()}
        sizes = {"client_state": sum(memory_sizes.values()), **sizes}
        for name, value in {**self._operations(steps, runs), **sizes}.items():
            trainer.log(f"cost/{name}", value)
        trainer.log("memory/peak", max(trainer.gather(worker_peak_memory())))
        trainer.log("time/counted", max(trainer.gather(time.perf_counter() - self._began)))
        if self.is_multiple(trainer.server.round + 1):
            self._write(trainer)

    def on_last_round_end(self, trainer: RunContext) -> None:
        self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"step": dict(self._step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = dict(state.get("step", {}))

    def _operations(self, steps: int, runs: int) -> dict[str, float]:
        """Return the operations of a round with ``steps`` local steps and ``runs`` passes of reference models."""
        step, counted = self._step, {"steps": float(steps), "forwards_extra": float(runs)}
        if step:
            # with a cache, or in first visits, reference models run less than once a step
            passes = runs / step["runs"] if step["runs"] else steps
            times = {name: passes if name in step["observing"] else steps for name in step["extra"]}
            every = step["joint"] * passes
            for name, value in step["extra"].items():
                every += value * (times[name] - passes)
                counted[f"flops_extra/{name}"] = value * times[name]
            counted |= {"flops": step["own"] * steps + every, "flops_extra": every}
        return counted

    def _write(self, trainer: RunContext) -> None:
        """Write the file with a row for each round: its metrics and the sums so far."""
        if trainer.run_dir is None:
            return
        rows, methods = [*trainer.history, trainer.metrics], "+".join(trainer.methods.names) or "fedavg"
        prefixes = ("cost/flops_extra/", "cost/client_state/")
        parts = {tag for row in rows for tag in row if tag.startswith(prefixes)}
        columns = METRIC_OF_COLUMN | {tag.removeprefix("cost/"): tag for tag in sorted(parts)}
        text, totals = io.StringIO(), dict.fromkeys(ADDED, 0.0)
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["round", "methods", *columns, *(f"{name}_total" for name in ADDED)])
        for row in rows:
            totals = {name: total + row.get(columns[name], 0.0) for name, total in totals.items()}
            values = [*map(row.get, columns.values()), *totals.values()]
            cells = []
            for value in values:
                cells.append(int(value) if value is not None and float(value).is_integer() else value)
            table.writerow([int(row["round"]), methods, *cells])
        write_atomically(trainer.run_dir / self.file, lambda partial: partial.write_text(text.getvalue()))


def count_step(trainer: RunContext) -> dict[str, Any]:
    """Return the operations of one local step of a client of the cohort; all workers call this.

    ``own`` counts the module alone, ``joint`` the part of all methods, ``extra`` that of each; ``runs`` counts passes
    of reference models, which the methods in ``observing`` use. ``returns`` is whether the client has a memory. The
    result is empty if no client of the cohort has a batch, or if the client fails in a run that skips such clients.
    """
    owners, datamodule, names = trainer.client.memories().owners, trainer.data, trainer.methods.names
    # a client without a previous visit may have nothing to compare with
    clients = sorted(trainer.server.cohort, key=lambda k: (k not in owners, k))
    k = next((k for k in clients if num_batches(datamodule, k)), None)
    counted: dict[str, Any] = {}
    if k is not None and trainer.global_rank == owners.get(k, 0):

        def operations(methods: list[str]) -> tuple[int, int]:
            with FlopCounterMode(display=False) as counter:
                runs = trainer.rehearse(k, methods)
            return counter.get_total_flops(), runs

        try:
            (base, _), (every, runs) = operations([]), operations(names)
            parts = {name: operations([name]) for name in names}
            extra = {name: total - base for name, (total, _) in parts.items()}
            observing = [name for name, (_, own_runs) in parts.items() if own_runs]
            counted = {"own": base, "joint": every - base, "extra": extra, "runs": runs}
            counted |= {"observing": observing, "returns": k in owners}
        except Exception as error:
            if not skips(trainer, error):
                raise
    return next((of_worker for of_worker in trainer.gather(counted) if of_worker), {})


def worker_peak_memory() -> float:
    """Return the peak memory of this process in bytes: allocated on the GPU, or resident on a CPU."""
    if torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # on Windows
        return 0.0
    # Linux counts in KiB, macOS in bytes
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
