"""The resident module of a worker process, in which its clients train one after another: each time a *visit*."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning import foreach, namespaces
from fl_lightning.client.attributes import Attributes, ReadOnly
from fl_lightning.client.batch import targets_of
from fl_lightning.client.entry import Arguments
from fl_lightning.client.logged import Logged, tagged
from fl_lightning.client.memory import Memories, copied
from fl_lightning.client.references import References, frozen_copy
from fl_lightning.client.stand_in import StandIn
from fl_lightning.client.taps import Taps, submodule
from fl_lightning.client.transient import Places, Transient, check_state, hooks_undone, settings_undone
from fl_lightning.data.datamodule import ClientInfo
from fl_lightning.data.loaders import Rows
from fl_lightning.errors import ClientError
from fl_lightning.method import Method, MethodList, Step, check_returned, overrides
from fl_lightning.state import State, clone, copy_into, difference, first_not_finite, norm, num_bytes, select, tensors
from fl_lightning.sums import Reduced, Update, Weighted
from fl_lightning.sums.weighted import cloned, flatten

Weighting = Literal["examples", "uniform"]
Buffers = Literal["average", "keep", "local"]
# what a step changes of a client, beside the state of the module
OF_VISIT = ("methods", "logged", "num_steps", "num_skipped", "lr", "lr_total", "epoch", "outputs")
# the weights with which an update is added without rounding
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-12, 1e30
# what the begin of a visit sets, too
OF_START = ("info", "received", "_read_only", "_change", "_values")


class Client(LightningModule):
    """The user's module as one client has it during its visit: with its state, data description and memory.

    Its :meth:`training_step` is the loss of the user's module plus the penalties of the methods. There is one object
    for all clients of a process: the state of each is loaded in place, and nothing is built per client.

    Args:
        module: the user's LightningModule.
        methods: the methods of the run.
        taps: tap name to what it is bound to in ``module``: the path of a submodule, or ``path:field``.
        memories: what clients keep between rounds; None is memories without a limit.
        seed: base seed of the run, for what a method draws.
        weighting: the client's weight where no method gives one: its number of training examples, or 1 (``uniform``).
        buffers: ``average`` sends buffers and frozen parameters, ``keep`` leaves the server's as they are, ``local``
            keeps them with each client.
        cache_limit: bytes in which a visit keeps the reference models' taps of each example, so that they run on it
            once, not once an epoch; 0 keeps none.
        info: description of the first client, which methods may look at before any visit.
        stand_in: what ``self.trainer`` is in the module; None is one of a single epoch.

    Raises:
        UsageError: the module's state dict cannot be averaged.

    Attributes:
        received: the state the visit began with, by name: the global state w^t that the server sent, and the client's
            own entries where they do not travel; do not change it.
        info: number of examples, label counts ``(C,)``, domain and id of the client.
        weight: p_k, before it is normalised over the cohort; set before ``on_client_end``.
        epoch: the present pass over the client's data, from 0.
        num_steps: local steps taken in this visit so far.
        num_skipped: batches of this visit without a loss, which the module skips.
        drift: Euclidean norm of :attr:`change`; set before ``on_client_end``.
        lr: learning rate of the first parameter group in the last local step.
        lr_total: the sum of these learning rates over the local steps of this visit so far.
        trainable: names of the parameters that are trained.
        others: names of the buffers and frozen parameters.
        tap_paths: tap name to the path of the submodule that it is bound to.
        frozen: names of the frozen parameters.
        hooks: names of Lightning's hooks and steps that the module overrides.
        keeps_epochs: whether :attr:`epochs` is kept, which a callback may set before the first round.
        epochs: the terms of the loss by name, as means over each local epoch of this visit, where they are kept: the
            module's ``loss``, each method's penalty, and the terms of a penalty that has several.
        outputs: what the module's last ``training_step`` returned, as Lightning gives it to ``on_train_batch_end``.
    """

    def __init__(
        self,
        module: LightningModule,
        methods: MethodList,
        taps: Mapping[str, str],
        memories: Memories | None = None,
        seed: int = 0,
        weighting: Weighting = "examples",
        buffers: Buffers = "average",
        cache_limit: float = 0.0,
        info: ClientInfo | None = None,
        stand_in: StandIn | None = None,
    ) -> None:
        super().__init__()
        self.module, self.methods, self.seed = module, methods, seed
        self.stand_in = stand_in or StandIn()
        self.hooks = overridden_hooks(module)
        self.weighting, self.buffer_policy = weighting, buffers
        self.logged = Logged(module)
        self.live = tensors(module)
        self.trainable = [name for name, value in self.live.items() if value.requires_grad]
        self.others = [name for name in self.live if name not in set(self.trainable)]
        self.frozen = [name for name in self.others if isinstance(self.live[name], nn.Parameter)]
        check_state(module, self.live)
        self._places, self._transient = Places(module, self.live), Transient(module)
        self._parameters_of_module = list(module.parameters())
        self._released = False
        self._first_batches = self.stand_in.clock.batches
        self.outputs: dict[str, Any] = {}
        self.received: State = {}
        self._read_only = ReadOnly({})
        self._values: dict[str, Reduced] = {}
        self.info = info or ClientInfo(0, 0, None)
        self.weight = 1.0
        self.epoch = 0
        self.num_steps = 0
        self.num_skipped = 0
        self.drift = 0.0
        self.lr = self.lr_total = 0.0
        self.keeps_epochs = False
        self.epochs: list[dict[str, float]] = []
        self._memories = memories if memories is not None else Memories()
        self._change: State | None = None
        self._bindings = dict(taps)
        self.tap_paths = {name: submodule(binding) for name, binding in taps.items()}
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.references = References(self._bindings, self._takes_index, cache_limit)
        self._taps = self._hooked_taps()
        self._install()
        # others are of the class, and computed when they are first asked for
        self._num_attributes = len(vars(self)) + 2
        self._attributes = {*vars(self), *dir(Client), "_attributes"}

    # ------------------------------------------------------------------ what methods use
    @cached_property
    def sent(self) -> list[str]:
        """Names of the trained parameters that travel."""
        return [name for name in self.trainable if self.methods.exchanges(name)]

    @property
    def change(self) -> Mapping[str, Tensor]:
        """The change y - w^t of the trained parameters in float64, read-only; computed once, after the last step."""
        if self._change is None:
            self._change = difference(select(self.live, self.trainable), self.received)
        return MappingProxyType(self._change)

    @property
    def metrics(self) -> dict[str, float]:
        """What was logged in this visit, by tag: ``train/loss``, ...; it is there once the visit has ended.

        A callback reads it in ``on_client_end``.
        """
        return {tagged("train", name): value.value for name, value in self._values.items()}

    def state(self) -> State:
        """A copy of the state that the module has now."""
        self._places.settle()
        return clone(self.live)

    def memory(self, method: Method) -> dict[str, Any]:
        """What ``method`` keeps for this client between rounds: tensors and plain values.

        While it is empty, it is what ``method.initial_memory`` gives.
        """
        memory = self._memories.visited(self.info.id)
        if method.name not in memory:
            initial, hint = method.initial_memory(self), "return a dictionary, {} for nothing"
            check_returned(isinstance(initial, Mapping), method, "initial_memory", initial, hint)
            memory[method.name] = move_data_to_device(dict(initial), self._memories.device)
        return memory[method.name]

    @torch.no_grad()
    def add_to_gradients(self, values: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Add ``scale`` times ``values`` to the gradients of the parameters of these names, in place.

        A parameter without gradient (unused, or frozen by another method) keeps none. A sparse gradient becomes dense.
        """
        live = [(self.live[name], value) for name, value in values.items()]
        for parameter, _ in live:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        pairs = [(parameter.grad, value) for parameter, value in live if parameter.grad is not None]
        foreach.add_([gradient for gradient, _ in pairs], [addend for _, addend in pairs], scale)

    @torch.no_grad()
    def add_gradients_to(self, totals: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Add ``scale`` times the gradients to ``totals``, in place, by name."""
        pairs = [(total, self.live[name].grad) for name, total in totals.items()]
        given = [(total, gradient) for total, gradient in pairs if gradient is not None]
        foreach.add_([total for total, _ in given], [gradient for _, gradient in given], scale)

    @torch.no_grad()
    def add_to_parameters(self, values: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Add ``scale`` times ``values`` to the parameters of these names, in place."""
        foreach.add_([self.live[name] for name in values], list(values.values()), scale)

    @torch.no_grad()
    def drift_so_far(self, names: list[str]) -> State:
        """The change y - w^t of the parameters called ``names`` at the present step, in their own precision."""
        gaps = foreach.subtract([self.live[name] for name in names], [self.received[name] for name in names])
        return dict(zip(names, gaps, strict=True))

    def parameters_under(self, tap: str) -> list[str]:
        """Names of the trained parameters of the submodule that ``tap`` is bound to."""
        return [name for name in self.trainable if name.startswith(f"{self.tap_paths[tap]}.")]

    def log(self, name: str, value: Any, *args: Any, weight: float | None = None, **kwargs: Any) -> None:
        """Log a value of this visit as ``train/<name>``, by default the weighted mean over the visit and the clients.

        Args:
            name: the tag.
            value: a number or a scalar tensor.
            *args: those of Lightning's ``log``, as are ``kwargs``; see :class:`~fl_lightning.client.logged.Logged`.
            weight: its weight; None is the number of examples of the present batch.
            **kwargs: ``reduce_fx`` and others; ``batch_size`` is another name for the weight.
        """
        given = kwargs.pop("batch_size", None) if weight is None else weight
        self.logged.add(name, value, given, **dict(zip(Arguments._fields, args, strict=False)), **kwargs)

    def log_term(self, method: Method, name: str, value: Tensor) -> None:
        """Log a term of a method's penalty as ``train/<method>/<name>``, the mean over the visit and the clients.

        It is logged with its coefficient, as it enters the loss: the terms of a method add up to ``train/<method>``.
        """
        self.logged.add_term(f"{method.name}/{name}", value)

    def load_reference(self, name: str, state: State, taps: Collection[str] | None = None) -> None:
        """Load ``state`` into the reference model ``name``, a frozen copy of the module, for this visit.

        It runs in eval mode, and only as far as the last of ``taps``, the names of those to observe; None observes all.
        Methods that use the same name share one model.
        """
        if name not in self.references:
            self.references.add(name, self.frozen_copy())
        self.references.load(name, state, taps)

    def observe(self, name: str) -> dict[str, Tensor]:
        """The taps of the reference model ``name`` on the current batch.

        The model is run once per batch, however many methods observe it.
        """
        return self.references.observe(name, self._taps.values.places)

    def frozen_copy(self) -> LightningModule:
        """A copy of the module in eval mode without gradients, hooks, logging and Fabric."""
        self._taps.remove()
        now = Transient(self.module)
        self._transient.restore()  # the copy is not that of a client in the middle of its visit
        try:
            frozen = frozen_copy(self.module, [self, self.stand_in])
            self.stand_in.attach(frozen)
            return frozen
        finally:
            now.restore()
            self._taps = self._hooked_taps()

    # ------------------------------------------------------------------ what the engine uses
    @cached_property
    def sent_others(self) -> list[str]:
        """Names of the buffers that travel."""
        return [name for name in self.others if name not in set(self.frozen) and self._travels(name)]

    @cached_property
    def sent_frozen(self) -> list[str]:
        """Names of the frozen parameters that travel once a client changes them."""
        return [name for name in self.frozen if self._travels(name)]

    @cached_property
    def kept(self) -> list[str]:
        """Names of the entries of the state that stay with each client; none in a run with one global model."""
        local = set(self.others) if self.buffer_policy == "local" else set()
        return [name for name in self.live if not self.methods.exchanges(name) or name in local]

    def begin_run(self) -> None:
        """Take the module as it is now for what each visit begins with: modes, attributes, non-persistent buffers."""
        self._transient = Transient(self.module)

    def call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the user's module, where it overrides it."""
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

    def begin_round(self, round_: int) -> None:
        """Set the clock, also where no client of the round trains in this process."""
        self.stand_in.clock.round = round_

    def end_round(self) -> None:
        """Set the clock to the end of the round, whichever client was the last to train in this process."""
        self.stand_in.clock.end_of_round(self._first_batches)

    def end_fit(self, rounds: int) -> None:
        """Set the clock to where the round after the last of these ``rounds`` would begin, and call the hook."""
        clock = self.stand_in.clock
        clock.round, clock.epoch, clock.step, clock.batches = rounds, 0, 0, self._first_batches
        self.call("on_fit_end")

    def start(self, info: ClientInfo, received: State) -> None:
        """Begin the visit of client ``info.id``: load the received state and its own entries, then call the methods."""
        if len(vars(self)) > self._num_attributes:
            for name in vars(self).keys() - self._attributes:
                delattr(self, name)  # a method has set it in the last visit
            self._num_attributes = len(vars(self))  # with those that were computed meanwhile
        self.info, self.received = info, dict(received)
        if self.kept:
            self.received |= self.own_entries(info.id) or self.methods.initial_state(self)
        others = [] if self.methods.attributes is None else self.methods.attributes.server
        counts = [] if info.label_counts is None else [("client.info.label_counts", info.label_counts)]
        self._read_only = ReadOnly(self.received, [*others, *counts])
        self.epoch, self.num_steps, self.num_skipped, self._change = 0, 0, 0, None
        self._values, self.epochs, self.lr_total = {}, [], 0.0
        self.logged.clear(info.num_examples)
        self.references.start(repeats=len(self.stand_in.clock.passes_now) > 1)
        self.load(self.received)
        self._transient.restore()
        for parameter in self._parameters_of_module:
            parameter.grad = None
        self.methods.on_client_start(self)

    @contextmanager
    def local_training(self) -> Iterator[None]:
        """In this block the module trains; hooks that it registers, and what methods keep, are as before at the end."""
        methods, module = self.methods, self.module
        if methods.attributes is None:
            known = {*map(id, self.modules()), *map(id, module.parameters()), *map(id, module.buffers())}
            methods.attributes = Attributes(methods.methods, known)
        attributes = methods.attributes
        with self.stand_in.stage(RunningStage.TRAINING), hooks_undone(module), settings_undone():
            try:
                yield
            finally:
                attributes.restore()

    def written(self) -> str | None:
        """What was written to in this visit though it is the server's; None for nothing."""
        return self._read_only.written()

    def begin_epoch(self, epoch: int) -> None:
        """Begin a pass over the client's data."""
        self.epoch = self.stand_in.clock.epoch = epoch

    def end_epoch(self) -> None:
        """End a pass, after the module's hook: reduce what was logged in it, which schedulers then watch."""
        if self.keeps_epochs:
            self.epochs.append(self.logged.terms_of_epoch())
        self.logged.end_epoch()

    @contextmanager
    def apart(self, methods: MethodList | None = None) -> Iterator[None]:
        """In this block the module trains by its own loss and ``methods``, if any, and nothing of the visit changes."""
        before = {name: getattr(self, name) for name in (*OF_VISIT, *OF_START)}
        now, clock = Transient(self.module), copy.copy(self.stand_in.clock)
        self.methods = methods or MethodList([])
        self._log_into(Logged(self.module))
        self._transient.restore()
        try:
            # methods read the taps, and transform the logits
            with self.taps.paused() if methods is None else nullcontext(), self.local_training():
                yield
        finally:
            now.restore()
            vars(self.stand_in.clock).update(vars(clock))
            vars(self).update(before)
            self._log_into(before["logged"])

    def training_step(self, batch: Any, batch_idx: int, rows: Rows | None = None) -> Tensor | None:
        """The module's loss plus the penalties; None where the module asks to skip the batch.

        ``rows`` says which of the client's examples the batch holds, where that is known.
        """
        self.references.begin_batch(batch, batch_idx, rows)
        self._taps.clear()
        loss = self.own_loss(batch, batch_idx)
        if loss is None:
            return None
        self.logged.add_term("loss", loss)
        for name, value in self.methods.penalties(self, Step(batch, targets_of(batch), self._taps.values)).items():
            self.logged.add_term(name, value)
            loss = loss + value
        return loss

    def own_loss(self, batch: Any, batch_idx: int) -> Tensor | None:
        """The loss of the user's module."""
        self.begin_hook("training_step")
        with self._taps.training():
            output = self.module.training_step(*((batch, batch_idx) if self._takes_index else (batch,)))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) and output is not None:
            raise ClientError(f"training_step returned {type(output).__name__} without a loss; {STEP_HINT}")
        if loss is not None and loss.ndim and loss.numel() != 1:
            raise ClientError(f"training_step returned a loss of shape {tuple(loss.shape)}; return its mean or its sum")
        if "on_train_batch_end" in self.hooks:
            self.outputs = self._outputs(output, loss)
        return loss

    def begin_step(self, optimizer: Optimizer) -> None:
        """Let the methods correct the gradients, before they are clipped."""
        self.methods.on_before_optimizer_step(self, optimizer)

    def end_step(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped: call the methods, and count the step."""
        self.lr = optimizer.param_groups[0]["lr"]
        self.lr_total += self.lr
        self.methods.on_after_optimizer_step(self, optimizer)
        self.num_steps += 1

    def finish(self) -> Update:
        """End the visit: keep the entries that do not travel, and return what the client sends.

        Raises:
            ClientError: a loss term, the result or something that the client sends is nan or infinite.
        """
        self._taps.clear()
        self.outputs = {}
        self.references.end()
        self._places.settle()
        self._check_finite()
        if self.kept:
            self._memories.visited(self.info.id)["state"] = clone(select(self.live, self.kept))
        self.weight = self._weight()
        payload = self.methods.on_client_end(self)
        delta = self.methods.transform_client_update(self, select(self.change, self.sent))
        check_finite(delta, payload)
        if self.methods.attributes is not None and self.methods.attributes.in_place:
            # these may refer to what is restored in place at the end of the visit
            delta, payload, memory = clone(delta), cloned(payload), self._memories.visited(self.info.id)
            memory.update(copied(memory))
        # copies: what happens to the module after the visit changes nothing in what was sent
        others, frozen = clone(select(self.live, self.sent_others)), self._changed_frozen()
        numbers = sum(value.total.numel() for value in flatten(payload).values())
        size = num_bytes(select(self.live, [*self.sent, *others, *frozen])) + numbers * self._bytes_of_number
        self._values = self.logged.sums()
        return Update(delta, others, self.weight, payload, self._values, self.drift, frozen, size)

    def check_terms(self) -> None:
        """Refuse a loss that cannot be trained on.

        Raises:
            ClientError: a term of the loss is nan or infinite.
        """
        term = self.logged.first_bad_term()
        if term is not None:
            raise ClientError(f"{term[0]} became nan or infinite at local step {term[1]}")

    def load(self, state: State) -> None:
        """Load a state into the module outside of a visit, for evaluation."""
        self._places.bind()
        copy_into(self.live, state)

    def load_afresh(self, state: State) -> None:
        """Load a state, and bring back what is in no state as it was when the run began."""
        self.load(state)
        self._transient.restore()

    @contextmanager
    def evaluating(self, stage: str) -> Iterator[None]:
        """In this block the module evaluates: ``stage`` is ``validate``, ``test`` or ``predict``.

        It begins with the attributes and buffers of the start of the run, and ends with the modes of then.
        """
        name = {"validate": "validation"}.get(stage, stage)
        self._transient.restore()
        self.end_round()
        if self._released:
            self._install()
        with self.stand_in.stage(RunningStage(stage)), hooks_undone(self.module), settings_undone():
            getattr(self.module, f"on_{name}_model_eval")()
            try:
                yield
            finally:
                self.call(f"on_{name}_model_train")
                self._transient.restore_modes()
                if self._released:
                    self._uninstall()

    def release(self) -> None:
        """Give the user's module back as it was, and remove the files of clients on disk.

        The module is then without hooks, and has its own ``log`` and ``forward`` again.
        """
        self._taps.remove()
        self._places.bind()
        self._transient.restore()
        self._uninstall()
        self._released = True
        self._memories.close()

    @property
    def taps(self) -> Taps:
        """The taps of the user's module."""
        return self._taps

    def own_entries(self, k: int) -> State:
        """The state entries that stay with client ``k``, as its last visit left them; none before its first."""
        return self._memories.get(k, {}).get("state", {})

    def memories(self) -> Memories:
        """The memories of the clients that this worker owns, by id."""
        return self._memories

    # ------------------------------------------------------------------ inside
    def _outputs(self, output: Any, loss: Tensor | None) -> dict[str, Any]:
        if loss is None:
            return {}
        # the loss as Lightning gives it, of which as many as there are batches in a step add up to their mean
        detached = loss.detach() / self.stand_in.clock.accumulate
        return {"loss": detached} | {k: v for k, v in (output if loss is not output else {}).items() if k != "loss"}

    def _install(self) -> None:
        """Let the module, and the LightningModules within it, log here and find the stand-in as their trainer."""
        self.stand_in.attach(self.module)
        self.stand_in.strategy._lightning_module = self.module
        self._log_into(self.logged)

    def _log_into(self, logged: Logged) -> None:
        self.logged, self.stand_in.logged = logged, logged.callback_metrics
        for part in self.module.modules():
            if isinstance(part, namespaces.LightningModule):
                replaced: Any = part
                replaced.log, replaced.log_dict = logged.log, logged.log_dict

    def _uninstall(self) -> None:
        self.stand_in.detach(self.module)
        for part in self.module.modules():
            for name in ("log", "log_dict", "forward") if isinstance(part, namespaces.LightningModule) else ():
                part.__dict__.pop(name, None)

    def _hooked_taps(self) -> Taps:
        return Taps(self.module, self._bindings, self._transform_logits)

    def _transform_logits(self, logits: Tensor) -> Tensor:
        # a module may evaluate in training mode, with dropout for example
        trains = self.module.training and not (self.stand_in.evaluating or self.stand_in.predicting)
        return self.methods.transform_logits(self, logits) if trains else logits

    def _travels(self, other: str) -> bool:
        return self.methods.exchanges(other) and self.buffer_policy == "average"

    def _changed_frozen(self) -> State:
        """The change of the frozen parameters that this visit has changed: most often none."""
        changed = [name for name in self.sent_frozen if not torch.equal(self.live[name], self.received[name])]
        return difference(select(self.live, changed), self.received)

    @cached_property
    def _bytes_of_number(self) -> int:
        """Bytes of a number in what methods send: it is added in float64, but sent in the parameters' type."""
        return next((self.live[name].element_size() for name in self.trainable), 4)

    def _weight(self) -> float:
        given = self.methods.client_weight(self)
        examples = float(self.info.num_examples) if self.weighting == "examples" else 1.0
        if given is not None and given != 0 and not LEAST_WEIGHT <= given <= LARGEST_WEIGHT:
            # beyond this range the sums over the cohort would round
            kinds = [type(method).__name__ for method in self.methods.methods if overrides(method, "client_weight")]
            hint = f"return 0, or a number from {LEAST_WEIGHT} to {LARGEST_WEIGHT}, from {kinds[0]}.client_weight"
            raise ClientError(f"its weight is {given}; {hint}; only the ratios of weights count")
        return examples if given is None else given

    def _check_finite(self) -> None:
        self.check_terms()
        self.drift = float(norm(self.change))
        if not math.isfinite(self.drift):
            bad = next(name for name, value in self.change.items() if not torch.isfinite(value).all())
            raise ClientError(f"the weights of {bad} became nan or infinite after local step {self.num_steps - 1}")
        entry = first_not_finite(select(self.live, self.others), self.received) if self.others else None
        if entry is not None:
            kind = "frozen parameter" if entry in self.frozen else "buffer"
            raise ClientError(f"the {kind} {entry} became nan or infinite within {self.num_steps} local steps")


# what a training_step may return
STEP_HINT = "return a tensor, a dictionary with the key loss, or None to skip the batch"


def overridden_hooks(module: LightningModule) -> frozenset[str]:
    """Names of Lightning's public functions that a module overrides."""
    # forward is no hook, and may be a compiled one here
    names = [name for name, value in vars_of(LightningModule).items() if callable(value) and name != "forward"]
    return frozenset(name for name in names if namespaces.is_overridden(name, module))


def vars_of(kind: type) -> dict[str, Any]:
    """The public members that a class has of itself or of Lightning's mixins."""
    members: dict[str, Any] = {}
    for base in (one for one in kind.__mro__ if one.__module__.startswith(("lightning", "pytorch_lightning"))):
        members = {**{name: value for name, value in vars(base).items() if name[0] != "_"}, **members}
    return members


def check_finite(delta: State, payload: Mapping[str, Mapping[str, Weighted]]) -> None:
    """Refuse an update that would make the sums over the cohort nan.

    Raises:
        ClientError: something that a client sends is nan or infinite.
    """
    sent = {**delta, **{"/".join(path): value.total for path, value in flatten(payload).items()}}
    for name, size in zip(sent, foreach.norms(list(sent.values()), math.inf), strict=True):
        if not math.isfinite(size):
            raise ClientError(f"what it sends as {name} is nan or infinite")
