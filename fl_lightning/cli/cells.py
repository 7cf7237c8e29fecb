"""``python -m fl_lightning.cli.cells`` runs the cells of a suite: each is a fit of several ``--config``."""

from __future__ import annotations

import gc
import math
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule

from fl_lightning.bench.runner import RoundReport, serve
from fl_lightning.callbacks import Callback
from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.base import logged_instead
from fl_lightning.callbacks.record import processor
from fl_lightning.cli.cli import FederatedCLI, plain_warnings, usage_error
from fl_lightning.engine.evaluation.evaluator import step_name
from fl_lightning.errors import ChangedCodeError, ClientError, require
from fl_lightning.trainer import FederatedTrainer


class MetricReport(Callback):
    """Reports the metric of each round that has it, and ends the run where that is the answer."""

    def __init__(self, metric: str, report: RoundReport) -> None:
        self.metric, self.report, self._seen = metric, report, False

    def on_round_end(self, trainer: RunAccess) -> None:
        value = trainer.metrics.get(self.metric)
        # others may come later, such as those of a callback in the last round
        if re.match("(test|val)[/_]", self.metric) and not self._seen and logged_instead(trainer) is not None:
            hint = hint_of_metric(self.metric, trainer.client.module, trainer.metrics)
            require(value is not None, "metric", self.metric, hint)
            self._seen = True
        if value is not None and trainer.global_rank == 0 and self.report(trainer.server.round, value):
            trainer.should_stop = True


class CellCLI(FederatedCLI):
    """A fit with one more callback, whose parser is built once in a process.

    Args:
        args: command line.
        callback: the callback.
    """

    _built: tuple[Any, Any, Any] | None = None

    def __init__(self, args: list[str], callback: Callback) -> None:
        self.callback = callback
        super().__init__(args)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": {"model", "datamodule"}}

    def setup_parser(self, *args: Any) -> None:
        if CellCLI._built is None:
            super().setup_parser(*args)
            CellCLI._built = self.parser, self._subcommand_parsers, self._subcommand_method_arguments
        self.parser, self._subcommand_parsers, self._subcommand_method_arguments = CellCLI._built

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks.append(self.callback)
        return trainer


def run_cell(cell: Mapping[str, Any], report: RoundReport) -> dict[str, Any]:
    """Run a cell, or what is left of it; all of it where the user's code has changed since its last checkpoint.

    Returns:
        The suite's metric by round, seconds of a round, hash of the partition, metrics of the last round, machine,
        folder of the run, and digests of the user's source files.

    Raises:
        UsageError: the cell's config is not valid, or the run does not log the metric.
        ClientError: the run failed, or its metric is not finite.
    """
    root = Path(cell["output"]) / cell["folder"]
    where = {"trainer": {"default_root_dir": cell["output"], "name": cell["folder"]}}
    callback = MetricReport(cell["metric"], report)
    command, configs = ["fit"], root / "configs"
    configs.mkdir(exist_ok=True)
    for number, fragment in enumerate([*cell["fragments"], where]):  # a fit takes them in this order
        path = configs / f"{number}.yaml"
        path.write_text(yaml.safe_dump(dict(fragment), sort_keys=False))
        command.append(f"--config={path}")
    try:
        resumes = ["--ckpt_path=last"] * any(root.glob("version_*"))
        return outcome_of(fitted([*command, *resumes], callback), cell["metric"])
    except ChangedCodeError as error:
        # one cell is of one code
        print(f"it begins anew, in a new version: {error}", file=sys.stderr, flush=True)
        return outcome_of(fitted(command, callback), cell["metric"])


def fitted(command: list[str], callback: Callback) -> Any:
    """The trainer of a fit that has come to an end."""
    try:
        with plain_warnings(), as_before():
            return CellCLI(command, callback).trainer
    except Exception as error:
        usage = usage_error(error)
        if usage is None or usage is error:
            raise
        raise usage from error


def outcome_of(trainer: FederatedTrainer, metric: str) -> dict[str, Any]:
    """What a run that is done tells of itself.

    Raises:
        UsageError: it has no such metric.
        ClientError: the metric of a round is not finite.
    """
    values = {int(row["round"]): row[metric] for row in trainer.history if metric in row}
    require(bool(values), "metric", metric, hint_of_metric(metric, trainer.run.client.module, trainer.metrics))
    for round_, value in values.items():
        if not math.isfinite(value):
            raise ClientError(f"round {round_}: {metric} is {value}")
    seconds = [row["time/round"] for row in trainer.history[1:] if "time/round" in row]
    return {
        "values": values,
        "seconds": statistics.median(seconds) if seconds else None,
        "plan": trainer.data.plan.hash,
        "metrics": dict(trainer.metrics),
        "machine": machine(),
        "run_dir": str(trainer.run_dir),
        "code": trainer.run.description.get("code"),
    }


def hint_of_metric(metric: str, module: LightningModule, metrics: Mapping[str, float]) -> str:
    """The remedy where a run does not log the metric of a suite."""
    if metric.startswith("val") and step_name(module, "val") is None:
        return f"{type(module).__name__} has no validation_step; define one that logs it"
    known = sorted(tag for tag in metrics if re.match("(train|val|test)[/_]", tag))
    return f"the run does not log it; among others it logs {', '.join(known)}; name one of these in the suite"


def machine() -> str:
    """The processor or GPU of this process, and the cores."""
    cores = f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"
    kind = f"{processor()} with {torch.backends.cpu.get_cpu_capability()}"  # hosts often hide the model
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else kind
    return f"{device}, {cores}, torch {torch.__version__}"


@contextmanager
def as_before() -> Iterator[None]:
    """Leave what is the process's, and what user code may change, as it was before the block."""
    dtype, folder, path, variables = torch.get_default_dtype(), os.getcwd(), list(sys.path), dict(os.environ)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        os.chdir(folder)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(variables)


def free_memory() -> None:
    """Free what the last cell has left; a GPU that a failed run has left unusable ends the process here."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    gc.freeze()  # the imported libraries hold many objects, which each collection would look through
    try:
        serve(run_cell, free_memory)
    finally:
        gc.unfreeze()  # else libraries complain of leaks
