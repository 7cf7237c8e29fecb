"""A client as methods see it during its visit: the user's module with its state, data description and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor

from fl_lightning.client.batch_norm import batch_norms, statistics_of
from fl_lightning.client.client_state import ClientStateStore
from fl_lightning.client.lightning.fit_progress import FitProgress
from fl_lightning.client.lightning.module_snapshot import MethodSnapshot
from fl_lightning.client.lightning.trainer_shim import TrainerShim
from fl_lightning.client.reference_models import ReferenceModels
from fl_lightning.client.taps import submodule
from fl_lightning.client.visit import Visit
from fl_lightning.client.worker_module import WorkerModule
from fl_lightning.core import foreach
from fl_lightning.core.client_info import ClientInfo
from fl_lightning.core.lazy_copies import written_entries
from fl_lightning.core.method import Method, MethodList, Payload, SentToClient, Step, call_hook, check_returned
from fl_lightning.core.seeding import rng_scope
from fl_lightning.core.state import (
    Gradients,
    State,
    as_floats,
    changed_entries,
    clone,
    entry_norms,
    first_not_finite,
    norm,
    select,
    tensors_by_path,
)
from fl_lightning.core.update import Update, VisitFacts
from fl_lightning.core.weighted import LARGE, LazyDifference, Weighted, cloned, flatten
from fl_lightning.data.client_loaders import ExampleIndices
from fl_lightning.data.labels import label_entries
from fl_lightning.storage.metric_format import tagged
from fl_lightning.storage.serializable import with_tensors
from fl_lightning.utilities.errors import ClientError, UsageError, require

# up to here, all integers have exact values in float64
LARGEST_INTEGER = 2**53
Weighting = Literal["examples", "uniform"]
Buffers = Literal["average", "keep", "local", "recalibrate", "recalibrate_once"]
# the rules by which the server recomputes the running statistics of BatchNorm
RECALIBRATES: tuple[Buffers, ...] = ("recalibrate", "recalibrate_once")
# the weights with which an update is added without rounding
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-12, 1e30
# of a server that sends a client the global state alone
NOTHING_ELSE = SentToClient({}, {}, {})
# return values of a training_step
STEP_HINT = "return a tensor, a dictionary with the key loss, or None to skip the batch"


class Client(LightningModule):
    """The user's module as one client has it during its visit: with its state, data description and memory.

    Its :meth:`training_step` returns the loss of the user's module plus the penalties of the methods. One object serves
    all clients of a process: their state is loaded in place, into the :class:`WorkerModule`, and everything else of a
    client is in its :class:`Visit`.

    Args:
        module: the user's LightningModule.
        methods: the methods of the run.
        taps: binding in ``module`` by tap name: the path of a submodule, or ``path:field``.
        memories: memories of the clients; None for memories without a limit.
        seed: base seed of the run, for random draws of methods.
        weighting: the client's weight unless a method sets one: its number of training examples, or 1 (``uniform``).
        buffers: ``average`` sends buffers and frozen parameters, ``keep`` does not change the server's, ``local``
            keeps them with each client. ``recalibrate`` sends all except the running statistics of BatchNorm, which
            the server recomputes; ``recalibrate_once`` sends these as well.
        cache_limit: bytes for a visit's cache of the reference models' taps, so that these models run once on an
            example instead of once an epoch; 0 for no cache.
        info: description of the first client, for methods before any visit.
        trainer_shim: the module's ``self.trainer``; None for one with a single epoch.

    Raises:
        UsageError: the module's state dict cannot be averaged.

    Attributes:
        visit: the present visit; between visits an empty one, of the first client.
        module: the user's module in this process.
        live: the tensors of the module's state by name.
        trainable: names of the parameters that are trained.
        others: names of the buffers and frozen parameters.
        frozen: names of the frozen parameters.
        of_methods: names of the entries of the methods' own modules (:meth:`.Method.modules`).
        tap_paths: path of the bound submodule by tap name.
        has_large_model: whether copies of the trained parameters take much memory.
        clips_gradients: whether the trainer or the module clips gradients before :meth:`.Method.on_after_clipping`.
        batch_norms: paths of the layers whose running statistics training updates.
        shares_buffers: whether the clients' float buffers are averaged, or recomputed for all.
        recomputed: names of the running statistics that the server recomputes, and that therefore travel down only.
        lifecycle: the part that the engine calls: the start and the end of visits, and dry runs.
        extra_passes: the engine's part that computes :meth:`gradients` and reads :meth:`batches`.
    """

    def __init__(
        self,
        module: LightningModule,
        methods: MethodList,
        taps: Mapping[str, str],
        memories: ClientStateStore | None = None,
        seed: int = 0,
        weighting: Weighting = "examples",
        buffers: Buffers = "average",
        cache_limit: float = 0.0,
        info: ClientInfo | None = None,
        trainer_shim: TrainerShim | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.methods, self.seed, self.weighting, self._policy = methods, seed, weighting, buffers
        transforms = bool(methods.overriding("transform_logits"))
        transform = (lambda logits: self.methods.transform_logits(self, logits)) if transforms else None
        self.worker_module = worker_module = WorkerModule(module, taps, trainer_shim, transform)
        self.live, self.trainable = worker_module.live, worker_module.trainable
        self.others, self.frozen = worker_module.others, worker_module.frozen
        names = {method.name for method in methods.overriding("modules")}
        self.of_methods = [name for name in self.live if name.partition(".")[0] in names]
        self.tap_paths = {name: submodule(binding) for name, binding in taps.items()}
        self.batch_norms = batch_norms(module)
        self.has_large_model = sum(self.live[name].numel() for name in self.trainable) >= LARGE
        clips = worker_module.trainer_shim.setting.gradient_clip_val is not None
        self.clips_gradients = clips or "configure_gradient_clipping" in worker_module.hooks
        self.shares_buffers = buffers not in ("keep", "local")
        self.recomputed: list[str] = []
        for path in self.batch_norms if buffers == "recalibrate" else ():
            self.recomputed += [name for name in statistics_of(path) if name in self.live]
        self.references = ReferenceModels(taps, worker_module.takes_index, cache_limit)
        self._memories = memories if memories is not None else ClientStateStore()
        self.visit = Visit(info or ClientInfo(0, 0, None), {}, worker_module.fit_progress, worker_module.logged)
        self.lifecycle = ClientLifecycle(self)
        self.extra_passes: Any = None
        self._sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        # set without torch, which would search it for parameters and modules at each visit
        if "_sealed" not in vars(self):
            super().__setattr__(name, value)
        elif name in vars(self):
            vars(self)[name] = value
        else:
            raise UsageError(f"client.{name}: all clients share this object; set client.scratch(self).{name} instead")

    # ------------------------------------------------------------------ which entries of the state travel
    @cached_property
    def sent(self) -> list[str]:
        """Names of the trained parameters that travel."""
        return [name for name in self.trainable if self.methods.exchanges(name)]

    @cached_property
    def sent_others(self) -> list[str]:
        """Names of the buffers that travel."""
        if not self.shares_buffers:
            return []
        silent = {*self.frozen, *self.recomputed}
        return [name for name in self.others if name not in silent and self.methods.exchanges(name)]

    @cached_property
    def sent_frozen(self) -> list[str]:
        """Names of the frozen parameters that travel once a client changes them."""
        return [name for name in self.frozen if self.methods.exchanges(name)] if self.shares_buffers else []

    @cached_property
    def travelling(self) -> list[str]:
        """Names of the entries of the state that each client of a cohort receives in each round.

        A frozen parameter is known to every client until it changes, and then sent once (:meth:`.Server.news_for`).
        """
        return self.sent + self.sent_others + self.recomputed

    @cached_property
    def bytes_of_number(self) -> int:
        """Bytes of a number of a payload or a server value: they are in float64, but travel in the parameters' type."""
        return next((self.live[name].element_size() for name in self.trainable), 4)

    @cached_property
    def kept(self) -> list[str]:
        """Names of the entries of the state that stay with each client."""
        local = set(self.others) if self._policy == "local" else set()
        return [name for name in self.live if not self.methods.exchanges(name) or name in local]

    @property
    def has_global_model(self) -> bool:
        """Whether the server has a model to evaluate: no entry of the user's module stays with the clients."""
        return {*self.kept} <= {*self.of_methods}

    @property
    def has_own_models(self) -> bool:
        """Whether the clients' models differ from the global one, by entries that stay or by hooks of methods."""
        return bool(self.kept or self.methods.personalizes)

    # ------------------------------------------------------------------ what methods use
    @property
    def info(self) -> ClientInfo:
        """Number of examples, label counts ``(C,)``, domain and id of the client."""
        return self.visit.info

    @property
    def received(self) -> State:
        """The state the visit began with, by name; do not change it.

        It is the global state w^t that the server sent, with the client's own entries where they do not travel, and
        those of :meth:`.Method.sent_state` and :meth:`.Method.start_state`.
        """
        return self.visit.received

    @property
    def change(self) -> Mapping[str, Tensor]:
        """The change y - w^t of the trained parameters in float64, read-only, after the last step.

        Entries of a large model are computed each time they are read.
        """
        visit = self.visit
        if visit.change is None:
            change = LazyDifference(self.live, visit.received, self.trainable)
            visit.change = change if self.has_large_model else MappingProxyType(dict(change))
        return visit.change

    @property
    def drift(self) -> float:
        """Euclidean norm of :attr:`change`; set before ``on_client_end``."""
        return self.visit.drift

    @property
    def weight(self) -> float:
        """p_k, before it is normalised over the cohort; set before ``on_client_end``."""
        return self.visit.weight

    @property
    def round(self) -> int:
        """The round r of the visit, from 0; in an asynchronous run the server step that uses its update."""
        return self.visit.fit_progress.round

    @property
    def version(self) -> int:
        """Number of server steps before the state that the client received: r, or fewer in an asynchronous run."""
        return self.round - self.staleness

    @property
    def staleness(self) -> int:
        """Number of server steps between the received state and round r; 0 in a synchronous run."""
        return self.visit.fit_progress.staleness

    @property
    def epoch(self) -> int:
        """The present pass over the client's data, from 0."""
        return self.visit.fit_progress.epoch

    @property
    def num_steps(self) -> int:
        """Local steps taken in this visit so far."""
        return self.visit.counts.num_steps

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in the last local step."""
        return self.visit.counts.lr

    @property
    def lr_total(self) -> float:
        """The sum of these learning rates over the local steps of this visit so far."""
        return self.visit.counts.lr_total

    @property
    def metrics(self) -> dict[str, float]:
        """Values logged in this visit by tag: ``train/loss``, ...; available after the visit.

        Callbacks read them in ``on_client_end``.
        """
        return {tagged("train", name): value.value for name, value in self.visit.values.items()}

    def state(self, own: bool = False) -> State:
        """Return a copy of the state that the module has now.

        Args:
            own: leave out what the next visit receives again, frozen parameters that travel and have not changed.
        """
        state = self.worker_module.state()
        again = {*self.sent_frozen} - {*changed_entries(state, self.received, self.sent_frozen)} if own else ()
        return {name: value for name, value in state.items() if name not in again}

    def extras(self, method: Method) -> Mapping[str, Any]:
        """Return what :meth:`.Method.sent_extras` of ``method`` sent this client; do not change it.

        A step of clients that train side by side cannot read it; ``on_client_start`` can keep it in ``scratch``.
        """
        hint = "read it in on_client_start, or set trainer.clients_per_step=1"
        require(self.visit.extras is not None, "client.extras", "in a step of clients side by side", hint)
        return (self.visit.extras or {}).get(method.name, {})

    def memory(self, method: Method) -> dict[str, Any]:
        """Return the memory of ``method`` for this client between rounds: tensors and plain values.

        An empty memory starts as the result of ``method.initial_memory``.
        """
        memory = self._memories.visited(self.info.id)
        if method.name not in memory:
            initial, hint = call_hook(method, "initial_memory", self), "return a dictionary, {} for nothing"
            check_returned(isinstance(initial, Mapping), method, "initial_memory", initial, hint)
            memory[method.name] = move_data_to_device(dict(initial), self._memories.device)
        return memory[method.name]

    def scratch(self, method: Method) -> SimpleNamespace:
        """Return the values that ``method`` keeps only for this visit, by name; empty at the start of the visit."""
        return self.visit.scratch.setdefault(method.name, SimpleNamespace())

    @torch.no_grad()
    def add_to_gradients(self, values: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Add ``scale`` times ``values`` to the gradients of the parameters of these names, in place.

        A parameter without gradient (unused, or frozen by another method) keeps none. A sparse gradient becomes dense.
        """
        gradients, addends = list[Tensor](), list[Tensor]()
        for name, value in values.items():
            parameter = self.live[name]
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            gradients.append(parameter.grad)
            addends.append(value)
        foreach.add_(gradients, addends, scale)

    @torch.no_grad()
    def add_gradients_to(self, totals: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Add ``scale`` times the gradients to ``totals``, in place, by name."""
        names = [name for name in totals if self.live[name].grad is not None]
        gradients: list[Any] = [self.live[name].grad for name in names]
        foreach.add_([totals[name] for name in names], gradients, scale)

    @torch.no_grad()
    def add_to_parameters(self, values: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Add ``scale`` times ``values`` to the parameters of these names, in place."""
        foreach.add_([self.live[name] for name in values], list(values.values()), scale)

    @torch.no_grad()
    def drift_so_far(self, names: list[str]) -> State:
        """The change y - w^t of the parameters called ``names`` at the present step, in their own precision."""
        received = self.received
        gaps = foreach.subtract([self.live[name] for name in names], [received[name] for name in names])
        return dict(zip(names, gaps, strict=True))

    def gradients(
        self,
        at: MutableMapping[str, Tensor] | None = None,
        batch: Any = None,
        loss: Literal["full", "own"] | Callable[[Step], Tensor | None] = "full",
        names: Collection[str] | None = None,
    ) -> Gradients:
        """Return the gradient of the training loss at other values of the parameters, or on another batch.

        Parameters, their ``.grad``, the optimizer, the running statistics of BatchNorm, logged values and attributes
        of the module do not change. In a local step, the pass draws the same random numbers, such as dropout
        masks, as the step's own forward pass. Outside of steps it draws them from a separate random stream and requires
        ``batch``.

        Args:
            at: values of trained parameters by name; those that it leaves out have their present values. It may also
                name buffers, such as the running statistics of a personal model: the pass begins with them, and
                replaces them in ``at`` by those after it.
            batch: a batch of :meth:`batches`; None for the batch of the present step, in a method that declares
                ``needs_gradients``.
            loss: ``full``, the loss of the step, with the methods' penalties and logits; ``own``, the loss of the
                module alone; or a function of a :class:`~fl_lightning.Step`, of this batch at these values, that
                returns a scalar, or None to read taps alone. Outside of steps, ``full`` is refused where a method has a
                penalty or changes logits.
            names: of trained parameters whose gradients are computed; None for all of them, and ``()`` for the loss
                alone, without a backward pass.

        Returns:
            The gradient of each of these parameters, 0 where the loss does not depend on it; its attribute ``loss`` is
            the loss. Both are 0 if the module skips the batch. With 16-mixed they are unscaled.

        Raises:
            UsageError: no step or argument provides a batch, or ``at`` names no entry of the state.
        """
        return self.extra_passes.gradients(at, batch, loss, self.trainable if names is None else [*names])

    def batches(self, stream: str, passes: float = 1, fraction: float = 1.0) -> Iterator[Any]:
        """The client's training batches outside of its steps, on the device and transformed as in training.

        Their order and augmentation are drawn from a stream of this name, this round and this client, and leave the
        batches of training unchanged. The same name gives the same batches again.

        Args:
            stream: name of the random stream, such as the method's.
            passes: number of passes over the data, each in a new order; ``math.inf`` for batches without end.
            fraction: share of the batches of each pass, rounded up, in (0, 1].

        Raises:
            UsageError: ``passes`` is below 0, ``fraction`` is not in (0, 1], or it is called in a step of clients
                that train side by side.
        """
        return self.extra_passes.batches(stream, passes, fraction)

    def tap_shape(self, tap: str) -> torch.Size | None:
        """Shape ``(...)`` of one example's value of ``tap``; None before the first batch of the run in this process."""
        return self.worker_module.taps.shapes.get(tap)

    def parameters_under(self, tap: str) -> list[str]:
        """Names of the trained parameters of the submodule that ``tap`` is bound to."""
        return [name for name in self.trainable if name.startswith(f"{self.tap_paths[tap]}.")]

    def log(self, name: str, value: Any, *args: Any, weight: float | None = None, **kwargs: Any) -> None:
        """Log a value of this visit as ``train/<name>``, by default the weighted mean over the visit and the clients.

        Args:
            name: the tag.
            value: a number or a scalar tensor.
            *args: as ``kwargs``, arguments of Lightning's ``log``; see :class:`.MetricLog`.
            weight: its weight; None for the number of examples of the current batch.
            **kwargs: ``reduce_fx`` and others; ``batch_size`` is another name for the weight.
        """
        size = kwargs.pop("batch_size", None)
        self.visit.logged.add(name, value, size if weight is None else weight, *args, **kwargs)

    def load_reference(self, name: str, state: State, taps: Collection[str] | None = None) -> None:
        """Load ``state`` into the reference model ``name``, a frozen copy of the module, for this visit.

        It runs in eval mode, and only as far as the last of ``taps``, the names of those to observe; None observes all.
        Methods that use the same name share one model.
        """
        if name not in self.references:
            self.references.add(name, self.reference_copy())
        self.references.load(name, state, taps)

    def observe(self, name: str) -> dict[str, Tensor]:
        """The taps of the reference model ``name`` on the current batch.

        The model is run once per batch, however many methods observe it.
        """
        return self.references.observe(name, self.worker_module.taps.values.places)

    def reference_copy(self) -> LightningModule:
        """A copy of the module in eval mode without gradients, hooks, logging and Fabric."""
        return self.worker_module.reference_copy()

    def training_step(self, batch: Any, batch_idx: int, rows: ExampleIndices | None = None) -> Tensor | None:
        """The module's loss plus the penalties; None where the module asks to skip the batch.

        ``rows`` says which of the client's examples the batch holds, where that is known.
        """
        worker_module, module, visit = self.worker_module, self.worker_module.module, self.visit
        taps, add_term = worker_module.taps, visit.logged.add_term
        if self.references.wanted:
            self.references.begin_batch(batch, batch_idx, rows)
        targets = targets_of(batch) if self.methods.methods else None
        taps.clear()
        # the hook that runs, on which depends what self.log does
        vars(module)["_current_fx_name"] = "training_step"
        taps.trains = True
        try:
            output = (
                module.training_step(batch, batch_idx) if worker_module.takes_index else module.training_step(batch)
            )
        finally:
            taps.trains = False
        # tensors first: testing for a mapping takes longer
        loss = output.get("loss") if not isinstance(output, Tensor) and isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) and output is not None:
            raise ClientError(f"training_step returned {type(output).__name__} without a loss; {STEP_HINT}")
        if loss is not None and loss.ndim and loss.numel() != 1:
            raise ClientError(f"training_step returned a loss of shape {tuple(loss.shape)}; return its mean or its sum")
        if "on_train_batch_end" in worker_module.hooks:
            visit.outputs = {}
            if loss is not None:
                # Lightning's scaled loss: the losses of a step's batches add up to their mean
                scaled = loss.detach() / visit.fit_progress.accumulate
                extras = output if isinstance(output, Mapping) else {}
                visit.outputs = {"loss": scaled, **{key: extras[key] for key in extras if key != "loss"}}
        if loss is None:
            return None
        add_term("loss", loss)
        if self.methods.methods:
            penalties, terms = self.methods.penalties(self, Step(batch, targets, taps.values))
            for name, value in (*terms.items(), *penalties.items()):
                add_term(name, value)
            for value in penalties.values():
                loss = loss + value
        return loss

    def memories(self) -> ClientStateStore:
        """The memories of the clients that this worker owns, by id."""
        return self._memories


class ClientLifecycle:
    """Starts and ends the visits of a :class:`Client`, collects its update, and makes dry runs: the engine's part."""

    def __init__(self, client: Client) -> None:
        self.client, self._idle = client, client.visit
        # gives a client what its server sends it alone
        self.sent_to: Callable[[int], SentToClient] = lambda k: NOTHING_ELSE

    def begin(
        self, info: ClientInfo, received: State, fit_progress: FitProgress, sent: SentToClient = NOTHING_ELSE
    ) -> Visit:
        """Begin a visit of client ``info.id`` with the received state and the client's own entries; load nothing."""
        client = self.client
        local_entries = client.memories().visited(info.id).get("state", {}) if client.kept else {}
        logged = client.worker_module.begin_logging(info.num_examples)
        attributes = client.methods.attributes
        server = () if attributes is None else attributes.server
        extras = tensors_by_path(sent.extras) if sent.extras else ()
        watched = [(f"client.extras: {path}", value) for path, value in extras]
        state = {**received, **sent.entries, **local_entries}
        client.visit = Visit(info, state, fit_progress, logged, [*server, *watched], sent.extras, sent.owners)
        return client.visit

    def choose_start(self, visit: Visit) -> None:
        """Let the client choose entries of the received state, which the module holds."""
        client = self.client
        if entries := client.methods.start_state(client, client.travelling):
            visit.receive({**visit.received, **entries})
            client.worker_module.load(visit.received)

    @contextmanager
    def visiting(self, info: ClientInfo, received: State, fit_progress: FitProgress) -> Iterator[Visit]:
        """A visit of client ``info.id``: begin it, load its state, then call the methods.

        At the end of the block what methods keep on themselves is as the server has left it. The visit is still there,
        for callbacks, until the next one begins or the round ends.
        """
        client = self.client
        with self.attributes_restored():
            client.worker_module.trainer_shim.fit_progress = fit_progress
            visit = self.begin(info, received, fit_progress, self.sent_to(info.id))
            client.references.clear(repeats=len(fit_progress.passes_now) > 1)
            client.worker_module.load_and_reset(visit.received)
            if client.methods.overriding("start_state"):
                self.choose_start(visit)
            client.methods.call("on_client_start", client)
            yield visit

    @contextmanager
    def attributes_restored(self) -> Iterator[None]:
        """At the end of this block what methods keep on themselves is as the server has left it."""
        client, methods = self.client, self.client.methods
        if methods.attributes is None:
            skipped = [*client.modules(), *client.parameters(), *client.buffers()]
            methods.attributes = MethodSnapshot(methods.methods, skipped)
        attributes = methods.attributes
        try:
            yield
        finally:
            attributes.restore()

    @contextmanager
    def rehearsing(self, methods: MethodList | None = None, k: int | None = None) -> Iterator[None]:
        """Return a context for any training with only these ``methods``, which restores all state at its end.

        Without ``methods``, the module alone is trained, and taps record nothing. Memories are restored, too. With
        ``k``, visits see the present memory of this client.
        """
        client, worker_module = self.client, self.client.worker_module
        before, visit, runs = client.methods, client.visit, client.references.num_runs
        paused = nullcontext() if methods is not None else worker_module.taps.recorded(False)
        try:
            with worker_module.unchanged(), client.memories().unchanged(k), paused, worker_module.training():
                # with the run's methods, which say what stays with a client
                self.begin(visit.info, visit.received, worker_module.trainer_shim.fit_progress)
                client.methods = methods or MethodList([])
                yield
        finally:
            client.methods, client.visit, client.references.num_runs = before, visit, runs
            client.references.clear()

    def personal_entries(self, info: ClientInfo, state: State) -> State:
        """The entries in which the model of a client differs from the evaluated global ``state``, from its memory.

        They are the entries that stay with the client, and the results of the methods' hooks.
        """
        client, memories, fit_progress = self.client, self.client.memories(), self.client.visit.fit_progress
        if not client.methods.personalizes:
            return memories.own_entries(info.id)
        with (
            self.rehearsing(client.methods, info.id),
            self.attributes_restored(),
            rng_scope(client.seed, "personal_state", info.id),
        ):
            visit = self.begin(info, state, fit_progress, self.sent_to(info.id))
            client.worker_module.load_and_reset(visit.received)
            entries = client.methods.personal_state(client)
            if not entries:
                self.choose_start(visit)
            differing = {name: value for name, value in visit.received.items() if value is not state.get(name)}
            return {**clone(differing), **memories.own_entries(info.id), **clone(entries)}

    def finish(self) -> Update:
        """End the visit: store the client-local entries, and return the client's update."""
        client, visit = self.client, self.client.visit
        self._end_training()
        self._check_trained()
        if client.kept:
            client.memories().visited(visit.info.id)["state"] = clone(select(client.live, client.kept))
        visit.weight = self._weight()
        return self._update(*self._sent())

    def _end_training(self) -> None:
        """Release what only local steps need, and take the values of rebound buffers into the state."""
        client, visit, worker_module = self.client, self.client.visit, self.client.worker_module
        worker_module.taps.clear()
        visit.outputs, visit.present = {}, None
        client.references.clear()
        worker_module.clear_gradients()
        worker_module.binding.commit()

    def _check_trained(self) -> None:
        """Refuse a loss or a state that became nan or infinite, and set the drift."""
        client, visit, live = self.client, self.client.visit, self.client.live
        self.check_terms()
        visit.drift = float(norm(client.change))
        if not math.isfinite(visit.drift):
            bad = next(name for name in client.change if not torch.isfinite(client.change[name]).all())
            raise ClientError(f"the weights of {bad} became nan or infinite after local step {client.num_steps - 1}")
        candidates = written_entries(live, visit.received, client.others)
        entry = first_not_finite(select(live, candidates), visit.received) if candidates else None
        if entry is not None:
            kind = "frozen parameter" if entry in client.frozen else "buffer"
            raise ClientError(f"the {kind} {entry} became nan or infinite within {client.num_steps} local steps")

    def _sent(self) -> tuple[Mapping[str, Tensor], dict[str, Payload], float]:
        """The change and the payloads that the methods send, and a number that no magnitude in the change exceeds."""
        client, visit, methods = self.client, self.client.visit, self.client.methods
        payload = methods.on_client_end(client)
        change: Mapping[str, Tensor] = LazyDifference(client.live, visit.received, client.sent)
        if methods.overriding("transform_client_update") or not client.has_large_model:
            change = select(client.change, client.sent)
        delta = methods.transform_client_update(client, change)
        largest = check_finite({} if delta is change else delta, payload)
        # no entry of a change exceeds its norm
        bound = visit.drift if delta is change else largest
        if methods.attributes is not None and methods.attributes.in_place:
            # these may refer to objects that are restored in place at the end of the visit
            delta, payload, memory = clone(delta), cloned(payload), client.memories().visited(visit.info.id)
            memory.update(with_tensors(memory, torch.clone))
        return delta, payload, bound

    def _update(self, delta: Mapping[str, Tensor], payload: dict[str, Payload], bound: float) -> Update:
        """The update with what the client sends beside this change and these payloads."""
        client, visit, live = self.client, self.client.visit, self.client.live
        # copies, so that later changes of the module do not change the update
        buffers = clone(select(live, client.sent_others))
        leave_out_large_integers(buffers, visit.received)
        frozen = dict(LazyDifference(live, visit.received, changed_entries(live, visit.received, client.sent_frozen)))
        numbers = sum(value.shape.numel() for value in flatten(payload).values())
        size = sum(live[name].nbytes for name in (*client.sent, *buffers, *frozen))
        size += numbers * client.bytes_of_number - client.methods.unsent_bytes(live, visit.info.id)
        visit.values = visit.logged.sums()
        facts = VisitFacts(client.num_steps, client.lr, visit.num_skipped, visit.num_lost, visit.scalings)
        sent = (delta, buffers, visit.weight, payload, visit.values, visit.drift, frozen, size)
        return Update(*sent, bound, facts, visit.logged.states())

    def check_terms(self) -> None:
        """Refuse a loss that cannot be trained on."""
        term = self.client.visit.logged.first_nonfinite_term()
        if term is not None:
            raise ClientError(f"{term[0]} became nan or infinite at local step {term[1]}")

    def end_round(self) -> None:
        """Drop the last visit, and set the progress to the end of the round."""
        self.client.visit = self._idle
        self.client.worker_module.end_round()

    def release(self) -> None:
        """Restore the user's module, and remove the files of clients on disk."""
        self.client.worker_module.release()
        self.client.memories().close()

    def _weight(self) -> float:
        client, methods = self.client, self.client.methods
        weight = methods.client_weight(client)
        if weight is not None and weight != 0 and not LEAST_WEIGHT <= weight <= LARGEST_WEIGHT:
            # beyond this range the sums over the cohort would round
            kind = type(methods.overriding("client_weight")[0]).__name__
            hint = f"return 0, or a number from {LEAST_WEIGHT} to {LARGEST_WEIGHT}, from {kind}.client_weight"
            raise ClientError(f"its weight is {weight}; {hint}; only the ratios of weights count")
        examples = float(client.visit.info.num_examples) if client.weighting == "examples" else 1.0
        return examples if weight is None else weight


def targets_of(batch: Any) -> Tensor | None:
    """The labels of a batch: the second entry of a pair, or the entry or attribute with a usual name of labels.

    Boolean labels become integers, and integers ``(N, 1)`` become ``(N,)``.
    """
    pair = type(batch) in (tuple, list) and len(batch) > 1
    labels = batch[1] if pair else next(iter(label_entries(batch)), None)
    if not isinstance(labels, Tensor):
        return None
    if not labels.is_floating_point() and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    return labels.long() if labels.dtype == torch.bool and labels.ndim == 1 else labels


def leave_out_large_integers(values: State, received: State) -> None:
    """Leave out integers beyond 2^53 that have not changed: a mean in float64 would round them."""
    integers = [name for name, value in values.items() if value.dtype == torch.int64]
    if not integers or are_exact(
        torch.cat([tensor[name].reshape(-1) for name in integers for tensor in (values, received)])
    ):
        return
    for name in integers:
        if not (are_exact(values[name]) and are_exact(received[name])):
            if not torch.equal(values[name], received[name]):
                hint = "register it with persistent=False, or keep smaller numbers in it"
                raise ClientError(f"the buffer {name} has integers beyond 2^53, whose mean would be rounded; {hint}")
            del values[name]


def are_exact(values: Tensor) -> bool:
    """Whether float64 holds these numbers exactly, if they are integers."""
    return values.dtype != torch.int64 or bool((values.clamp(-LARGEST_INTEGER, LARGEST_INTEGER) == values).all())


def check_finite(delta: Mapping[str, Tensor], payload: Mapping[str, Mapping[str, Weighted]]) -> float:
    """Refuse an update that would make the sums over the cohort nan.

    Returns:
        The largest magnitude in ``delta``. Those of the payload's totals are noted as their bounds.
    """
    values = flatten(payload)
    # one after another, since a lazy total is computed when it is read
    largest = [foreach.norms([value.total], math.inf)[0] for value in values.values()]
    sizes = as_floats([*entry_norms(delta, math.inf), *largest])
    for name, size in zip([*delta, *map("/".join, values)], sizes, strict=True):
        if not math.isfinite(size):
            raise ClientError(f"its update is nan or infinite at {name}")
    for value, size in zip(values.values(), sizes[len(delta) :], strict=True):
        value.bound = size
    return max(sizes[: len(delta)], default=0.0)
