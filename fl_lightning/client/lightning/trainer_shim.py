"""The object that user modules and data modules see as ``self.trainer``.

The only use of these private names of Lightning (as of 2.6): ``LightningModule._trainer``, which
its setter does not set in modules inside containers, ``LightningOptimizer._to_lightning_optimizer``, and
``Strategy._lightning_module`` and ``_lightning_optimizers``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyExperiment, Logger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch.optim import Optimizer

from fl_lightning.client.lightning.fit_progress import FitProgress

# remedies for setting an attribute of ``self.trainer``
INSTEAD = {"should_stop": "use the callback EarlyStopping, or set trainer.should_stop in your own callback"}
ARGUMENT = "pass it to the run's trainer, if that has this argument"
# attributes of a visit
KEPT_ASIDE = ("fit_progress", "optimizers", "lr_scheduler_configs", "train_dataloader", "sanity_checking")


@dataclass
class ShimConfig:
    """Settings of the run that the shim shows; ``logs`` is whether the run has loggers, on whichever worker."""

    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    precision: str = "32-true"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    datamodule: Any = None
    loggers: Callable[[], list[Any]] = list
    logs: bool = False
    default_root_dir: str = ""
    log_dir: Callable[[], Path | None] = lambda: None
    is_global_zero: bool = True
    fast_dev_run: bool = False


class LocalStrategy(SingleDeviceStrategy):
    """Lightning's strategy for one process, whose optimizer step is the engine's.

    Attributes:
        do_step: takes the optimizer, the closure and the keyword arguments of ``optimizer.step``.
        do_backward: takes the loss.
    """

    do_step: Callable[..., Any]
    do_backward: Callable[..., Any]

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        return self.do_step(optimizer, closure, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.do_backward(closure_loss, *args, **kwargs)
        return closure_loss


class SilentLogger(Logger):
    """The logger of a visit, which warns once and drops all values, since only one worker could write."""

    name = version = save_dir = None

    def __init__(self, warns: bool) -> None:
        super().__init__()
        self._warned = not warns

    @property
    def experiment(self) -> Any:
        """An object that takes any call."""
        if not self._warned:
            warnings.warn(
                "self.logger in training: a client's visit writes to no logger; use self.log, or write a callback",
                stacklevel=2,
            )
        self._warned = True
        return DummyExperiment()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.experiment.log_metrics(metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.experiment.log_hyperparams(*args, **kwargs)


class TrainerShim:
    """The part of Lightning's ``Trainer`` that a module may ask for: ``self.trainer``.

    Its values are as in one fit in which the current client trains alone. Any other name is an AttributeError, so that
    ``hasattr`` works.

    Args:
        fit_progress: position of the current visit in this fit.
        setting: constants of the run.
    """

    __slots__ = (
        "__weakref__",
        "_silent",
        "evaluated_batches",
        "fit_progress",
        "logged",
        "lr_scheduler_configs",
        "optimizers",
        "sanity_checking",
        "setting",
        "state",
        "strategy",
        "train_dataloader",
    )
    # constants: a client trains in one process, and the engine evaluates and saves
    world_size = num_nodes = num_devices = 1
    global_rank = local_rank = node_rank = 0
    barebones = should_stop = interrupted = received_sigterm = False
    progress_bar_callback = checkpoint_callback = early_stopping_callback = ckpt_path = profiler = scaler = None
    min_epochs = min_steps = max_time = None
    check_val_every_n_epoch = 1
    enable_validation = True

    def __init__(self, fit_progress: FitProgress | None = None, setting: ShimConfig | None = None) -> None:
        self.fit_progress = fit_progress or FitProgress()
        self.state = TrainerState(fn=TrainerFn.FITTING)
        self.configure(setting or ShimConfig())
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self.logged: Callable[[], dict[str, Any]] = dict
        self.evaluated_batches: list[int | float] = []
        self.train_dataloader: Any = None
        self.sanity_checking = False  # whether the sanity check runs

    def __getattr__(self, name: str) -> Any:
        page = "docs/own_module_specification.md"
        raise AttributeError(f"self.trainer.{name}: not known in a federated run; {page} lists what is")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__slots__:
            raise AttributeError(f"self.trainer.{name} cannot be set in a module; {INSTEAD.get(name, ARGUMENT)}")
        object.__setattr__(self, name, value)

    # ------------------------------------------------------------------ for the engine
    def configure(self, setting: ShimConfig) -> None:
        """Set the constants of the run."""
        self.setting = setting
        self.strategy = LocalStrategy(setting.device, precision_plugin=Precision())
        self._silent = [SilentLogger(setting.is_global_zero)] if setting.logs else []

    def attach(self, module: torch.nn.Module) -> None:
        """Become the trainer of all LightningModules in ``module``."""
        for part in module.modules():
            if "_trainer" in vars(part):
                part.__dict__["_trainer"] = self

    def detach(self, module: torch.nn.Module) -> None:
        """Leave the LightningModules in ``module`` without a trainer."""
        for part in module.modules():
            if vars(part).get("_trainer") is self:
                part.__dict__["_trainer"] = None

    @contextmanager
    def stage(self, stage: RunningStage) -> Iterator[None]:
        """Return a context for this stage."""
        before, self.state.stage = self.state.stage, stage
        try:
            yield
        finally:
            self.state.stage = before

    def begin_visit(self, optimizer: Optimizer, schedulers: list[Any], loader: Any) -> None:
        """The optimizer, schedulers and data of the visit that begins."""
        self.lr_scheduler_configs, self.train_dataloader = schedulers, loader
        if [*map(id, self.optimizers)] != [id(optimizer)] or not self.strategy._lightning_optimizers:
            self.optimizers = [optimizer]
            self.strategy._lightning_optimizers = [LightningOptimizer._to_lightning_optimizer(optimizer, self.strategy)]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Return a context for training that restores progress, optimizer, schedulers and loader at its end."""
        saved = {name: getattr(self, name) for name in KEPT_ASIDE}
        steppers, self.fit_progress = self.strategy._lightning_optimizers, replace(self.fit_progress)
        try:
            yield
        finally:
            self.strategy._lightning_optimizers = steppers
            for name, value in saved.items():
                setattr(self, name, value)

    # ------------------------------------------------------------------ progress
    current_epoch = property(attrgetter("fit_progress.current_epoch"))
    max_epochs = property(attrgetter("fit_progress.max_epochs"))
    max_steps = property(attrgetter("fit_progress.max_steps"))
    estimated_stepping_batches = property(attrgetter("fit_progress.total_steps"))
    num_training_batches = property(attrgetter("fit_progress.batches"))
    accumulate_grad_batches = property(attrgetter("fit_progress.accumulate"))
    num_val_batches = property(lambda self: self.evaluated_batches if self.validating else [])
    num_test_batches = property(lambda self: self.evaluated_batches if self.testing else [])

    @property
    def global_step(self) -> int:
        """Optimizer steps done; in an evaluation, the round."""
        return self.fit_progress.round if self.evaluating else self.fit_progress.global_step

    # ------------------------------------------------------------------ current stage
    training = property(lambda self: self.state.stage == RunningStage.TRAINING)
    validating = property(lambda self: self.state.stage == RunningStage.VALIDATING)
    testing = property(lambda self: self.state.stage == RunningStage.TESTING)
    predicting = property(lambda self: self.state.stage == RunningStage.PREDICTING)
    evaluating = property(lambda self: self.validating or self.testing)

    @property
    def is_global_zero(self) -> bool:
        """True in a visit, where a client trains alone; elsewhere on the first worker only."""
        return self.training or self.setting.is_global_zero

    # ------------------------------------------------------------------ the run
    model = lightning_module = property(attrgetter("strategy._lightning_module"))
    datamodule = property(attrgetter("setting.datamodule"))
    callbacks = property(lambda self: [])
    fast_dev_run = property(attrgetter("setting.fast_dev_run"))
    default_root_dir = property(attrgetter("setting.default_root_dir"))
    precision = property(attrgetter("setting.precision"))
    precision_plugin = property(attrgetter("strategy.precision_plugin"))
    gradient_clip_val = property(attrgetter("setting.gradient_clip_val"))

    @property
    def gradient_clip_algorithm(self) -> GradClipAlgorithmType | None:
        name = self.setting.gradient_clip_algorithm
        return None if name is None else GradClipAlgorithmType(name)

    @property
    def log_dir(self) -> str | None:
        folder = self.setting.log_dir()
        return None if folder is None else str(folder)

    @property
    def loggers(self) -> list[Any]:
        """The loggers; in a visit, and on other workers than the first, they write nothing."""
        if self.sanity_checking:
            return [SilentLogger(warns=False)] if self.setting.logs else []
        return self._silent if self.training else self.setting.loggers() or self._silent

    @property
    def logger(self) -> Any:
        return next(iter(self.loggers), None)

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Values logged in this visit or evaluation so far."""
        return self.logged()

    logged_metrics = progress_bar_metrics = callback_metrics
