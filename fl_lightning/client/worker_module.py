"""The user's module in a worker process, with all that a run puts into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.lightning.metric_log import MetricLog
from fl_lightning.client.lightning.module_snapshot import ModuleSnapshot, StateBinding, check_state, temporary_hooks
from fl_lightning.client.lightning.trainer_shim import TrainerShim
from fl_lightning.client.reference_models import reference_copy
from fl_lightning.client.taps import Taps
from fl_lightning.core.state import State, clone, copy_into, tensors
from fl_lightning.utilities import lightning_compat

# stages in which the logits are not transformed, though the module may be in training mode, with dropout for example
EVALUATES = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.PREDICTING)


class WorkerModule:
    """The user's module, in which the clients of a process train one after another, and the global model is evaluated.

    Its trainer is a :class:`TrainerShim`, it logs into :attr:`logged`, and taps hook its submodules. Attributes outside
    its state dict are restored at the start of each visit and each evaluation. ``transform`` changes the logits
    ``(B, C)`` in training.

    Raises:
        UsageError: the module's state dict cannot be averaged.

    Attributes:
        live: the tensors of the state by name, which stay the same objects for the whole run.
        others: names of the buffers and frozen parameters.
        hooks: names of Lightning's hooks and steps that the module overrides.
        takes_index: whether ``training_step`` takes the index of the batch.
        fit_progress: progress in the round, with the batches of the first client that has any.
        binding: the places of these tensors in the module.
        evaluated: values of the last evaluations of the global model, which visits see in ``callback_metrics``.
    """

    def __init__(
        self,
        module: LightningModule,
        bindings: Mapping[str, str],
        trainer_shim: TrainerShim | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.module, self.trainer_shim = module, trainer_shim or TrainerShim()
        self.fit_progress = self.trainer_shim.fit_progress
        self.hooks = overridden_hooks(module)
        self.live = tensors(module)
        self.trainable = [name for name, value in self.live.items() if value.requires_grad]
        self.others = [name for name, value in self.live.items() if not value.requires_grad]
        self.frozen = [name for name in self.others if isinstance(self.live[name], nn.Parameter)]
        self.takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        check_state(module, self.live)
        self.evaluated: dict[str, Tensor] = {}
        self._transform = transform
        self.binding, self._start = StateBinding(module, self.live), ModuleSnapshot(module)
        self._parameters = list(module.parameters())
        self._released = False
        self._left: ModuleSnapshot | None = None
        self.taps = Taps(module, bindings, None if transform is None else self._transformed)
        self._install()

    def call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the module, where it overrides it."""
        if hook not in self.hooks:
            return None
        attributes = vars(self.module)
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], hook
        try:
            return getattr(self.module, hook)(*args, **kwargs)
        finally:
            attributes["_current_fx_name"] = before

    def begin_hook(self, name: str) -> None:
        """Note which hook or step runs, on which depends what ``self.log`` does."""
        vars(self.module)["_current_fx_name"] = name

    def begin_run(self) -> None:
        """Store the module's modes, attributes and non-persistent buffers as the start of each visit."""
        self._start = ModuleSnapshot(self.module)

    def begin_round(self, round_: int) -> None:
        """Set the progress, also where no client of the round trains in this process."""
        self.trainer_shim.fit_progress = self.fit_progress = self.fit_progress.at(round_)

    def end_round(self) -> None:
        """Set the progress to the end of the round, whichever client was the last to train in this process."""
        self.trainer_shim.fit_progress = self.fit_progress.at_end_of_round()

    def begin_logging(self, examples: float | None = None) -> MetricLog:
        """Start a new log, for the visit of a client with this number of examples, or for an evaluation (None)."""
        logged = MetricLog(self.module, self.evaluated, examples)
        self.log_into(logged)
        return logged

    def log_into(self, logged: MetricLog) -> None:
        """Let the module, and the LightningModules within it, log here."""
        self.logged, self.trainer_shim.logged = logged, logged.callback_metrics
        for attributes in self._lightning:
            attributes["log"], attributes["log_dict"] = logged.log, logged.log_dict

    @property
    def numel(self) -> int:
        """The number of values in the state."""
        return sum(value.numel() for value in self.live.values())

    def state(self) -> State:
        """A copy of the state that the module has now."""
        self.binding.commit()
        return clone(self.live)

    def load(self, state: State) -> None:
        """Load a state into the module."""
        self.binding.rebind()
        copy_into(self.live, state)

    def load_and_reset(self, state: State) -> None:
        """Load a state, and restore everything outside the state to the start of the run, without gradients."""
        self.clear_gradients()
        self.load(state)
        self._start.restore()

    def clear_gradients(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """In this block the module trains; hooks that it registers are removed."""
        with self.trainer_shim.stage(RunningStage.TRAINING), temporary_hooks(self.module):
            yield

    @contextmanager
    def evaluating(self, stage: str) -> Iterator[None]:
        """In this block the module evaluates: ``stage`` is ``validate``, ``test`` or ``predict``.

        It begins and ends with the attributes, modes and buffers of the start of the run.
        """
        name = {"validate": "validation"}.get(stage, stage)
        self._start.restore()
        self.end_round()
        if self._released:
            self._install()
        try:
            with self.trainer_shim.stage(RunningStage(stage)), temporary_hooks(self.module):
                getattr(self.module, f"on_{name}_model_eval")()
                try:
                    yield
                finally:
                    self.call(f"on_{name}_model_train")
        finally:
            self._start.restore()
            if self._released:
                self._uninstall()

    def keep_attributes(self, workers: int) -> None:
        """Let the user's module keep the attributes that an evaluation sets, unless several workers each set a part."""
        # objects of torchmetrics have the batches of all workers
        parts = [part for part in self.module.modules() if not isinstance(part, (Metric, MetricCollection))]
        owners = [*map(vars, parts)]
        if workers > 1 and self._start.changed(owners):
            text = f"the step sets attributes, and each of {workers} workers has a part, so they are dropped"
            rank_zero_warn(f"model={type(self.module).__name__}: {text}; pass trainer.devices=1")
        else:
            self._left = ModuleSnapshot(self.module)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Return a context that restores the module at its end.

        It begins with the attributes and buffers of the start of the run.
        """
        state, now, logged = self.state(), ModuleSnapshot(self.module), self.logged
        try:
            self._start.restore()
            with self.trainer_shim.preserved():
                yield
        finally:
            self.log_into(logged)
            try:
                self.load(state)
            finally:
                now.restore()

    def reference_copy(self) -> LightningModule:
        """A copy of the module in eval mode without gradients, hooks, logging and Fabric."""
        now = ModuleSnapshot(self.module)
        try:
            self.taps.remove()
            self._start.restore()  # no copy of a client in the middle of its visit
            copied = reference_copy(self.module, self.trainer_shim)
            self.trainer_shim.attach(copied)
            return copied
        finally:
            now.restore()
            self.taps.install()

    def release(self) -> None:
        """Restore the module, except kept attributes: without hooks, with its own ``log`` and ``forward``."""
        self.taps.remove()
        self.binding.rebind()
        self._start.restore()
        if self._left is not None:
            modes = [(part, part.training) for part in self.module.modules()]
            self._left.restore()
            for part, mode in modes:
                part.training = mode
        self._uninstall()
        self._released = True

    def _transformed(self, logits: Tensor) -> Tensor:
        trains = self.module.training and self.trainer_shim.state.stage not in EVALUATES
        return self._transform(logits) if trains and self._transform is not None else logits

    def _install(self) -> None:
        kind = lightning_compat.LightningModule
        self._lightning = [vars(part) for part in self.module.modules() if isinstance(part, kind)]
        self.trainer_shim.attach(self.module)
        self.trainer_shim.strategy._lightning_module = self.module
        self.begin_logging()

    def _uninstall(self) -> None:
        self.trainer_shim.detach(self.module)
        for attributes in self._lightning:
            for name in ("log", "log_dict", "forward"):
                attributes.pop(name, None)


def overridden_hooks(module: LightningModule) -> frozenset[str]:
    """Names of Lightning's public functions that a module overrides."""
    members: dict[str, Any] = {}
    for base in reversed(LightningModule.__mro__):
        if base.__module__.startswith(("lightning", "pytorch_lightning")):
            members |= vars(base)
    # forward is not a hook, and may be compiled here
    names = {name for name in members if name[0] != "_" and callable(members[name])} - {"forward"}
    return frozenset(name for name in names if lightning_compat.is_overridden(name, module))
