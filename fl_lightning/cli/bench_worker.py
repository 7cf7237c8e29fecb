"""Runs a cell of a suite: a fit of several ``--config``, in a process that a worker client has started."""

from __future__ import annotations

import math
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from joblib import cpu_count
from lightning.pytorch import LightningModule

from fl_lightning.bench.worker_client import RoundReport, locked, reason_of
from fl_lightning.callbacks import Callback
from fl_lightning.callbacks.base import logged_instead
from fl_lightning.callbacks.record import processor
from fl_lightning.cli.cli import FederatedCLI, plain_warnings, usage_error
from fl_lightning.client.run_context import RunContext
from fl_lightning.data.array_datasets import FileDataModule
from fl_lightning.engine.evaluation.evaluator import step_name
from fl_lightning.engine.fingerprint import description_of
from fl_lightning.models import ImageClassifier
from fl_lightning.storage.checkpoint import newest_checkpoint
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.utilities.errors import ChangedCodeError, ClientError, require

PHASES = ("train", "val", "test")
# distinct warnings that a cell keeps
MOST_WARNINGS = 5


class MetricReport(Callback):
    """Reports the metric of each round that has it, and ends the run where the answer is true."""

    def __init__(self, metric: str, report: RoundReport) -> None:
        self.metric, self.report, self._seen = metric, report, False

    def on_round_end(self, trainer: RunContext) -> None:
        value = trainer.metrics.get(self.metric)
        # further values may follow, such as values of a callback in the last round
        if re.match("(test|val)[/_]", self.metric) and not self._seen and logged_instead(trainer) is not None:
            hint = hint_of_metric(self.metric, trainer.client.module, trainer.metrics)
            require(value is not None, "metric", self.metric, hint)
            self._seen = True
        if value is not None and trainer.global_rank == 0 and self.report(trainer.server.round, value):
            trainer.should_stop = True


class CellCLI(FederatedCLI):
    """A fit with one more callback; without one, its objects are built and nothing is run."""

    _built: tuple[Any, Any, Any] | None = None

    def __init__(self, args: list[str], callback: Callback | None = None) -> None:
        self.callback = callback
        super().__init__(args)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": {"model", "datamodule"}}

    def setup_parser(self, *args: Any) -> None:
        # one parser serves all configs of a process
        if CellCLI._built is None:
            super().setup_parser(*args)
            CellCLI._built = self.parser, self._subcommand_parsers, self._subcommand_method_arguments
        self.parser, self._subcommand_parsers, self._subcommand_method_arguments = CellCLI._built

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks += [] if self.callback is None else [self.callback]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        if self.callback is not None:
            super()._run_subcommand(subcommand)


def run_cell(cell: Mapping[str, Any], report: RoundReport) -> dict[str, Any]:
    """Run a cell, or the rest of it; all of it where code has changed since its last checkpoint.

    Returns:
        The suite's metric by round, seconds of a round, hash of the partition, metrics of the last round, machine,
        folder of the run, digests of the user's source files, and the distinct warnings.
    """
    root = Path(cell["output"]) / cell["folder"]
    where = {"trainer": {"default_root_dir": cell["output"], "name": cell["folder"]}}
    callback = MetricReport(cell["metric"], report)
    with locked(root), recorded_warnings() as texts:
        command = fit_command([*cell["fragments"], where], root / "configs")
        # the config has the weights of the start, and a checkpoint has its own
        resumed = [*command, "--ckpt_path=last", "--weights=null"] if newest_checkpoint(root) else command
        try:
            trainer = run_fit(resumed, callback).trainer
        except ChangedCodeError as error:  # one cell is of one code
            print(f"it starts again, in a new version: {error}", file=sys.stderr, flush=True)
            trainer = run_fit(command, callback).trainer
        return outcome_of(trainer, cell["metric"]) | {"warnings": list(dict.fromkeys(texts))[:MOST_WARNINGS]}


def check_configs(task: Mapping[str, Any], report: RoundReport) -> dict[str, str]:
    """Build the objects of the configs in ``task["configs"]``, and read each data set once.

    Returns:
        The reasons of those that cannot be run.
    """
    wrong, metric, data_sets = {}, task["metric"], set[tuple[type, str]]()
    usual = {f"{phase}/loss" for phase in PHASES} | {f"{phase}/accuracy" for phase in PHASES}
    for name, fragments in task["configs"].items():
        try:
            with tempfile.TemporaryDirectory(prefix="fl_lightning-") as folder:
                cli = run_fit(fit_command(fragments, Path(folder)))
            # a metric that the run cannot log, as far as its objects tell
            no_step = metric.startswith(("val/", "val_")) and step_name(cli.model, "val") is None
            # callbacks and modules of the user may log more
            logs_usual = type(cli.model) is ImageClassifier and not cli.config["fit"]["trainer"]["callbacks"]
            unknown = logs_usual and metric.startswith(("val/", "test/")) and metric not in usual
            require(not (no_step or unknown), "metric", metric, hint_of_metric(metric, cli.model, usual))
            datamodule = cli.datamodule
            if isinstance(datamodule, FileDataModule) and (type(datamodule), datamodule.root) not in data_sets:
                datamodule.prepare_data()
                datamodule.load()
                data_sets.add((type(datamodule), datamodule.root))
        except Exception as error:
            wrong[name] = reason_of(error)
    return wrong


def fit_command(fragments: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """The command line of a fit with a ``--config`` for each fragment, which is written into a folder."""
    folder.mkdir(exist_ok=True)
    command = ["fit"]
    for number, fragment in enumerate(fragments):  # a fit takes them in this order
        path = folder / f"{number}.yaml"
        path.write_text(yaml.safe_dump(dict(fragment), sort_keys=False))
        command.append(f"--config={path}")
    return command


def run_fit(command: list[str], callback: Callback | None = None) -> CellCLI:
    """Run a fit to its end."""
    try:
        with plain_warnings():
            return CellCLI(command, callback)
    except Exception as error:
        usage = usage_error(error)
        if usage is None or usage is error:
            raise
        raise usage from error


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """A list of the texts of the warnings that the block gives to its user."""
    texts, show = list[str](), warnings.showwarning

    def record(message: Any, category: type[Warning], *place: Any, **kwargs: Any) -> None:
        if category is UserWarning:
            texts.append(" ".join(str(message).split()))
        show(message, category, *place, **kwargs)

    warnings.showwarning = record
    try:
        yield texts
    finally:
        warnings.showwarning = show


def outcome_of(trainer: FederatedTrainer, metric: str) -> dict[str, Any]:
    """The result of a run that is done."""
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
        "code": description_of(trainer.run).get("code"),
    }


def hint_of_metric(metric: str, module: LightningModule, metrics: Iterable[str]) -> str:
    """The remedy where a run does not log the metric of a suite."""
    if metric.startswith("val") and step_name(module, "val") is None:
        return f"{type(module).__name__} has no validation_step; define one that logs it"
    tags = sorted(tag for tag in metrics if re.match("(train|val|test)[/_]", tag))
    return f"the run does not log it; among others it logs {', '.join(tags)}; name one of these in the suite"


def machine() -> str:
    """The processor or GPU of this process, and the cores."""
    kind = f"{processor()} with {torch.backends.cpu.get_cpu_capability()}"  # hosts often hide the model
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else kind
    return f"{device}, {cpu_count()} cores, torch {torch.__version__}"
