"""A method is one idea of a paper, written as optional hooks around a round; FedAvg is the empty list."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, overload

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection, move_data_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.server import Server
from fl_lightning.core.state import State, select
from fl_lightning.core.updates import Updates
from fl_lightning.core.weighted import LazyWeighted, Weighted
from fl_lightning.functional.rows import needs_gradient
from fl_lightning.utilities.errors import SharedStateError, UsageError, check_all, require, truncate

Value = TypeVar("Value")
# values of a method by name: ``Weighted``, or dictionaries of them to any depth
Payload = dict[str, Any]
# a penalty, with its terms for the log
Penalty = Tensor | tuple[Tensor, Mapping[str, Tensor]] | None
# the client hook that runs at present
client_hook: ContextVar[str] = ContextVar("client_hook", default="")


@dataclass
class Step:
    """The arguments of a penalty in one local step.

    Args:
        batch: the batch from the loader.
        targets: labels ``(B,)``, or None.
        taps: outputs named in :attr:`Method.requires`, ``(B, ...)`` each, with their graph. ``logits`` are raw.
            :func:`~fl_lightning.functional.as_rows` flattens an output to rows ``(B, d)``.
    """

    batch: Any
    targets: Tensor | None
    taps: dict[str, Tensor]


class SentToClient(NamedTuple):
    """What the server sends one client alone.

    Args:
        entries: entries of the state that it receives in place of the global ones, by name.
        extras: values in addition to the state, by the name of the method.
        owners: class of the method that gives each of the entries.
    """

    entries: Mapping[str, Tensor]
    extras: Mapping[str, Any]
    owners: Mapping[str, str]


class ServerValue(Generic[Value]):
    """A value that a method keeps on the server, declared as an attribute of its class.

    ::

        class SCAFFOLD(Method):
            global_variate = ServerValue(Server.zeros)

    It is set to ``initial(server)`` when ``fit`` starts, and a checkpoint holds it: tensors, plain values and
    dictionaries of them. Each client of a cohort receives it, and ``bytes/down`` counts it, with floating-point numbers
    in the parameters' type.

    Args:
        initial: gives the value before the first round.
        travels: set it to False for a value that clients do not receive. Client hooks must not read it, nor, at real
            sites, ``on_round_start``, which runs there, too.
    """

    def __init__(self, initial: Callable[[Server], Value], travels: bool = True) -> None:
        self.initial, self.travels, self.name = initial, travels, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, method: None, owner: type) -> ServerValue[Value]: ...
    @overload
    def __get__(self, method: Method, owner: type) -> Value: ...
    def __get__(self, method: Method | None, owner: type) -> ServerValue[Value] | Value:
        if method is None:
            return self
        hook, missing = client_hook.get(), self.name not in vars(method)
        if not self.travels and (hook or missing):
            reader = hook or "a hook at a site, or before fit,"
            hint = "which clients do not receive; declare it as ServerValue(..., travels=True)"
            raise UsageError(f"method={owner.__name__}: {reader} reads {self.name}, {hint}")
        if missing:
            raise AttributeError(f"{owner.__name__}.{self.name} has no value before fit")
        return vars(method)[self.name]

    def __set__(self, method: Method, value: Value) -> None:
        vars(method)[self.name] = value


class Method:
    """The hooks of a method; each does nothing until it is overridden.

    Client hooks run on the client's worker, server hooks once a round. Values of a client between rounds belong in
    ``client.memory(self)``, values of one visit in ``client.scratch(self)``, and values of the server in attributes
    declared as :class:`ServerValue`. Changes of other attributes by client hooks are undone at the end of the visit.

    Attributes:
        name: name for logs, payloads and memories: by default the lower-cased class name, which subclasses inherit;
            override it as in ``name = "mine"``.
        memory_keys: keys of ``client.memory(self)`` between rounds, each with its meaning.
        requires: names of the taps it reads, checked before round 0.
        needs_label_counts: whether it reads ``client.info.label_counts``, checked before round 0.
        needs_exchange: whether it needs a run that exchanges weights, checked before round 0.
        assumes_fresh: whether it assumes that all clients of a round have received the present state, which an
            asynchronous run refuses.
        has_personal_models: whether it gives each client its own model, which only one method of a list may do; by
            default those with :meth:`personal_state`, :meth:`sent_state`, :meth:`sent_extras` or :meth:`start_state`.
        evaluation_point: when in a round :meth:`personal_state` is the client's model, which the tags of callbacks
            name: at the beginning of its next visit (``received``), at the end of its local steps, before the
            aggregation (``trained``), or after some steps from the global model (``adapted``).
        needs_gradients: whether it calls ``client.gradients`` in a local step, on the present batch.
        replaces_gradients: whether it also replaces the gradients of the step, which only one method of a list may do.
            Its ``on_before_optimizer_step`` runs first, and the other methods add their corrections.
    """

    name = ""
    memory_keys: ClassVar[Mapping[str, str]] = {}
    requires: tuple[str, ...] = ()
    needs_label_counts = False
    needs_exchange = False
    assumes_fresh = False
    has_personal_models: bool | None = None
    evaluation_point: Literal["received", "trained", "adapted"] = "received"
    needs_gradients = False
    replaces_gradients = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.name:
            cls.name = cls.__name__.lower()

    @property
    def proximal(self) -> float:
        r"""Coefficient :math:`\mu` of the proximal term :math:`\mu / 2 \lVert y - w^t \rVert^2` it adds, 0 for none."""
        return 0.0

    @property
    def gives_personal_models(self) -> bool:
        """Whether it gives each client its own model; see ``has_personal_models``."""
        hooks = ("personal_state", "sent_state", "sent_extras", "start_state")
        by_default = any(overrides(self, hook) for hook in hooks)
        return by_default if self.has_personal_models is None else self.has_personal_models

    @property
    def corrects_gradients(self) -> bool:
        """Whether it acts around the optimizer's step, which an optimizer such as LBFGS does not allow."""
        hooks = ("on_before_optimizer_step", "on_after_clipping", "on_after_optimizer_step")
        return any(overrides(self, hook) for hook in hooks)

    def modules(self, module: nn.Module, taps: Mapping[str, str]) -> dict[str, nn.Module]:
        """Return modules of the method's own, which train with the client's, by name.

        For the run, they are submodules of ``module``, and their entries are in the state: ``<method>.<name>.weight``.
        The client's optimizer moves the parameters on which the method's loss depends, and :meth:`exchanges` says which
        entries travel. On all workers the random generators are in the same state.

        Args:
            module: the user's module, with its initial weights.
            taps: path of the bound submodule by name, of each tap in :attr:`requires`.
        """
        return {}

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        """Check the module and its optimizer before round 0; raise a UsageError if the method does not fit.

        No client has trained yet: ``client.info`` describes client 0.
        """

    def initial_memory(self, client: ClientContext) -> dict[str, Any]:
        """Return the initial content of ``client.memory(self)``, in the client's first visit.

        It must depend only on ``client.info``, ``client.received`` and streams of :mod:`fl_lightning.core.seeding`, so
        that the number of workers cannot change it.
        """
        return {}

    def exchanges(self, key: str) -> bool:
        """Whether the state entry ``key`` travels; an entry that does not stays in the client's memory."""
        return True

    def sent_state(self, server: Server, k: int) -> Mapping[str, Tensor] | None:
        """Entries of the state that client ``k`` receives in place of the global ones, by name; None for no entry.

        They must travel in each round. They are ``client.received``, from which its change is measured. As
        :meth:`sent_extras`, it runs on the server for each visit and each evaluation of the client, and must depend on
        its arguments, server values and derived seeds alone.
        """
        return None

    def sent_extras(self, server: Server, k: int) -> Mapping[str, Any] | None:
        """Tensors and numbers, in dictionaries that may be nested, that client ``k`` alone receives with the state.

        The client reads them as ``client.extras(self)``.
        """
        return None

    def start_state(self, client: ClientContext) -> Mapping[str, Tensor] | None:
        """Entries of ``client.received`` that the client replaces before :meth:`on_client_start`, by name, or None.

        It chooses them by what it received, its memory and its data, for each visit and each evaluation, and changes
        nothing. The rules are those of :meth:`sent_state`.
        """
        return None

    def sent_numbers(self, k: int) -> Mapping[str, int]:
        """How many numbers of an entry client ``k`` receives and sends, by name, where they are fewer than all.

        Only the counts of bytes depend on it.
        """
        return {}

    def on_client_start(self, client: ClientContext) -> None:
        """After the client has received the state, before its first step."""

    def transform_logits(self, client: ClientContext, logits: Tensor) -> Tensor:
        """The logits ``(B, C)`` that the module's own loss sees, in training only; of the same shape."""
        return logits

    def penalty(self, client: ClientContext, step: Step) -> Penalty:
        """A scalar tensor that is added to the loss and logged as ``train/<name>``; None for no term.

        A penalty of several terms may return a pair: their sum, and a dictionary of the terms with their coefficients,
        which are logged as ``train/<name>/<term>``.
        """
        return None

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        """Before the gradients, which are unscaled, are clipped and applied: correct them in place.

        A step that 16-mixed loses, since its gradients overflow, calls none of the hooks around the optimizer's step.
        """

    def on_after_clipping(self, client: ClientContext, optimizer: Optimizer) -> None:
        """After the corrections of all methods and clipping: read the gradients, but do not change them."""

    def on_after_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        """After the optimizer has moved the parameters: correct them in place."""

    def on_client_end(self, client: ClientContext) -> Payload | None:
        """Return the payload after the last local step, computed for example from ``client.change``.

        It has ``Weighted`` values by name, in dictionaries that may be nested. The server gets their sums, nested
        likewise.
        """
        return None

    def transform_client_update(self, client: ClientContext, delta: State) -> State:
        """The change of the parameters that the client sends, after :meth:`on_client_end`: the same entries."""
        return delta

    def client_weight(self, client: ClientContext) -> float | None:
        """The client's weight in the mean, None to leave it to ``trainer.weighting``.

        It is 0, or a number from 1e-12 to 1e30, with which sums are exact: the ratios of the clients' weights count.
        """
        return None

    def on_fit_start(self, server: Server) -> None:
        """Once, before the first round."""

    def attackers(self, server: Server) -> Collection[int]:
        """Clients that it lets harm the others, which ``PersonalAccuracy`` and ``Scores`` leave out in all rounds."""
        return ()

    def on_round_start(self, server: Server) -> None:
        """Before the clients of a round."""

    def transform_updates(self, server: Server, updates: Updates) -> Updates:
        """The updates of the clients of a round, before they are aggregated."""
        return updates

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        """The change that replaces the weighted mean of the updates, which only one method of a list may compute.

        It may have new values of floating-point buffers, too; the others take their means.
        """
        raise NotImplementedError

    def transform_update(self, server: Server, delta: State, payload: Payload) -> State:
        """The mean change of the parameters, before the server optimizer: the same entries."""
        return delta

    def on_round_end(self, server: Server, payload: Payload) -> None:
        """After the server's step; ``payload`` holds the sums of what :meth:`on_client_end` returned on the clients."""

    def evaluated_state(self, server: Server, state: State) -> State:
        """The global state that is evaluated and saved, where it is not the one that is sent."""
        return state

    def personal_state(self, client: ClientContext) -> State | None:
        """The state that is evaluated for a client, where it is not the one that its next visit would begin with.

        It is called between rounds, also for a client without a visit so far, and nothing that it changes lasts. The
        client has its memory and its data, and the module holds ``client.received``: the evaluated global
        model, with the entries that stay with the client or that :meth:`sent_state` gives. Entries that the result
        leaves out have their received values; None leaves out all, and leaves the choice to :meth:`start_state`.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Server-side state: a copy of every :class:`ServerValue`."""
        names = [value.name for value in self._server_values()]
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, each value on the device of the one that :meth:`reset` made.

        A site is not given the values that do not travel, and has none.
        """
        for value in self._server_values():
            if not value.travels and value.name not in state:
                vars(self).pop(value.name, None)
                continue
            initial, saved = list[Tensor](), copy.deepcopy(state[value.name])
            apply_to_collection(vars(self).get(value.name), Tensor, initial.append)
            setattr(self, value.name, move_data_to_device(saved, initial[0].device) if initial else saved)

    def reset(self, server: Server) -> None:
        """Set every :class:`ServerValue` to its initial value, before :meth:`on_fit_start`."""
        for value in self._server_values():
            setattr(self, value.name, value.initial(server))

    def _server_values(self) -> list[ServerValue]:
        declared: dict[str, Any] = {}
        for kind in reversed(type(self).__mro__):
            declared |= vars(kind)
        return [value for value in declared.values() if isinstance(value, ServerValue)]


def require_sgd(who: str, optimizer: Optimizer, hint: str, momentum: bool = True) -> None:
    """Refuse any client optimizer but SGD, in which a step is a sum of gradients times one learning rate.

    ``momentum`` says whether it may have (plain) momentum; ``hint``, what to do instead.
    """
    require(isinstance(optimizer, SGD), f"{who} with the optimizer", type(optimizer).__name__, hint)
    for key in ("nesterov", "dampening", *(() if momentum else ("momentum",))):
        largest = max(group[key] for group in optimizer.param_groups)
        require(not largest, f"{who} with the client optimizer's {key}", largest, hint)
    for key in ("lr", "momentum"):
        values = sorted({group[key] for group in optimizer.param_groups})
        require(len(values) == 1, f"{who} with the client optimizer's {key}", values, "give all parameters the same")


class MethodList:
    """The composition of a list of methods at each hook.

    Penalties and gradient corrections add, transforms compose in list order, ``exchanges`` is a logical and, and two
    different client weights are an error. Results of hooks are checked, and errors name the method.

    Attributes:
        attributes: the :class:`~fl_lightning.client.lightning.module_snapshot.MethodSnapshot` at the start of visits;
            None after a server hook.
        overriding: methods that override a hook, in the order in which they are called, by name of the hook.
        needs_gradients: whether any of them calls ``client.gradients`` in a local step.
    """

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = list(methods)
        self.attributes: Any = None
        self._warned: set[str] = set()
        # a server hook may set another hook of a method
        self.overriding = cache(self._overriding)
        hooks = [name for name in dir(Method) if name.startswith("on_")]
        for method in self.methods:
            hint = "give objects of Method's subclasses, such as FedProx(mu=0.01)"
            require(isinstance(method, Method), "method", method, hint)
            base = "is the base of all methods and does nothing; use a subclass such as FedProx"
            require(type(method) is not Method, "method", "Method", base)
            for hook, _ in inspect.getmembers(type(method), inspect.isfunction):
                is_valid = hook in hooks or not hook.startswith("on_")
                hint = f"unknown hook; available: {', '.join(hooks)}"
                require(is_valid, "method", f"{type(method).__name__}.{hook}", hint)
            taps = method.requires
            listed = isinstance(taps, (tuple, list)) and all(isinstance(tap, str) for tap in taps)
            hint = 'use a tuple of names of taps, such as ("representation",)'
            require(listed, f"method={type(method).__name__}: requires", taps, hint)
        replaces = any(method.replaces_gradients for method in self.methods)
        self.needs_gradients = replaces or any(method.needs_gradients for method in self.methods)
        for name in self.names:
            if self.names.count(name) > 1:
                hint = f"keep one of them, or rename one of their classes: name = 'my{name}'"
                raise UsageError(f"method={self.names}: {name} stands twice in the list; {hint}")

    def wanted_taps(self) -> dict[str, str]:
        """The taps that the methods read or change, each with the name of the class that does."""
        users: dict[str, str] = {}
        for method in self.methods:
            users |= dict.fromkeys(method.requires, type(method).__name__)
        for method in reversed(self.methods):
            if overrides(method, "transform_logits"):
                users["logits"] = type(method).__name__
        return users

    def _overriding(self, hook: str) -> list[Method]:
        methods = [method for method in self.methods if overrides(method, hook)]
        if hook == "on_before_optimizer_step":
            methods.sort(key=lambda method: not method.replaces_gradients)
        return methods

    def add_modules(self, module: nn.Module, taps: Mapping[str, str]) -> dict[str, nn.Module]:
        """Add the methods' own modules to the user's module; return them by the names of the methods."""
        added: dict[str, nn.Module] = {}
        for method in self.overriding("modules"):
            parts, hint = method.modules(module, taps), "return a dictionary of modules by name"
            values = parts.values() if isinstance(parts, Mapping) else [None]
            valid = all(isinstance(part, nn.Module) for part in values)
            check_returned(valid, method, "modules", parts, hint)
            name, model = method.name, type(module).__name__
            require(not hasattr(module, name), f"model={model}", name, "a method has modules of this name; rename it")
            added[name] = nn.ModuleDict(parts)
            module.add_module(name, added[name])
        return added

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        """Let each method refuse what does not fit it, and refuse what does not fit together."""
        exclusive: dict[str, Callable[[Method], bool]] = {
            "gives a client its own model": lambda m: m.gives_personal_models,
            "replaces the gradients of a step": lambda m: m.replaces_gradients,
            "changes the logits by label counts": lambda m: m.needs_label_counts and overrides(m, "transform_logits"),
            "aggregates the updates": lambda m: overrides(m, "aggregate"),
        }

        def check_exclusive(act: str) -> None:
            names = [type(method).__name__ for method in self.methods if exclusive[act](method)]
            require(len(names) < 2, "method", names, f"each {act}; keep one of them")

        checks = [partial(method.setup, client, optimizer) for method in self.methods]
        check_all([*checks, *(partial(check_exclusive, act) for act in exclusive)])
        self.client_weight(client)  # raises if two methods disagree
        needing = [type(method).__name__ for method in self.methods if method.needs_exchange]
        if needing and not client.sent:
            silent = []
            for method in self.methods:
                if not any(map(method.exchanges, client.trainable)):
                    silent.append(type(method).__name__)
            raise UsageError(
                f"method={needing}: {', '.join(needing)} acts on the weights that clients send, and "
                f"{' and '.join(silent) or 'this list'} sends none; take one of them out"
            )

    @property
    def proximal(self) -> float:
        """The sum of the methods' proximal coefficients."""
        return sum(method.proximal for method in self.methods)

    def exchanges(self, key: str) -> bool:
        """Whether no method keeps the entry with the client."""
        answers = [method.exchanges(key) for method in self.methods]
        for method, answer in zip(self.methods, answers, strict=True):
            is_answer = isinstance(answer, bool)
            check_returned(is_answer, method, "exchanges", answer, f"return True if {key!r} travels, or False")
        return all(answers)

    def call(self, hook: str, client: ClientContext, *args: Any) -> None:
        """Call a hook of a client that returns nothing, of each method in list order: corrections add."""
        for method in self.overriding(hook):
            call_hook(method, hook, client, *args)

    def transform_logits(self, client: ClientContext, logits: Tensor) -> Tensor:
        """Apply the methods' transforms in list order."""
        for method in self.overriding("transform_logits"):
            check_logits(method, client, logits)
            changed = call_hook(method, "transform_logits", client, logits)
            fits = isinstance(changed, Tensor) and changed.shape == logits.shape
            check_returned(fits, method, "transform_logits", changed, "return logits in the shape that they came in")
            logits = changed
        return logits

    def penalties(self, client: ClientContext, step: Step) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The penalties that are added to the loss, by the method's name, and the terms of those that have several."""
        penalties, terms = dict[str, Tensor](), dict[str, Tensor]()
        for method in self.overriding("penalty"):
            term = call_hook(method, "penalty", client, step)
            if term is None:
                continue
            if isinstance(term, tuple):
                term, parts = term
                for name, value in parts.items():
                    terms[f"{method.name}/{name}"] = value
            number = isinstance(term, Tensor) and term.numel() == 1 and term.is_floating_point()
            if not number:
                check_returned(False, method, "penalty", term, "return a scalar tensor of real numbers, or None")
            if not (term.requires_grad or method.name in self._warned or needs_gradient(term)):
                self._warned.add(method.name)
                # of fixed taps, as of a frozen encoder, the sanity check has warned
                required_taps = [step.taps[tap] for tap in method.requires]
                if not required_taps or any(map(needs_gradient, required_taps)):
                    rank_zero_warn(
                        f"method={type(method).__name__}: penalty returned a tensor without gradient, which has no "
                        "effect on training; return None for no term"
                    )
            penalties[method.name] = term.reshape(()) if term.ndim else term
        return penalties, terms

    def on_client_end(self, client: ClientContext) -> dict[str, Payload]:
        """Return the payload of each method by name."""
        sent: dict[str, Payload] = {}
        for method in self.methods:
            payload = call_hook(method, "on_client_end", client)
            hint = "return a dictionary of Weighted by name, such as {'norm': Weighted.of(client.drift)}, or None"
            check_returned(payload is None or isinstance(payload, Mapping), method, "on_client_end", payload, hint)
            for name, value in (payload or {}).items():
                check_returned(is_nested({name: value}, can_be_added), method, "on_client_end", {name: value}, hint)
            sent[method.name] = dict(payload or {})
        return sent

    def transform_client_update(self, client: ClientContext, delta: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Apply the methods' transforms in list order."""
        for method in self.overriding("transform_client_update"):
            transformed = call_hook(method, "transform_client_update", client, delta)
            delta = checked_state(method, "transform_client_update", transformed, delta)
        return delta

    def client_weight(self, client: ClientContext) -> float | None:
        """The weight that the methods agree on, None where none gives one."""
        weights: dict[str, float] = {}
        for method in self.overriding("client_weight"):
            weight = call_hook(method, "client_weight", client)
            if weight is None:
                continue
            number = isinstance(weight, Real) and not isinstance(weight, bool)
            check_returned(number, method, "client_weight", weight, "return a number of 0 or more, or None")
            weights[method.name] = float(weight)
        if len(set(weights.values())) > 1:
            names = list(weights)
            raise UsageError(f"method={names}: they ask for different client weights {weights}; keep one of them")
        return next(iter(weights.values()), None)

    def on_fit_start(self, server: Server) -> None:
        """Set the server values of each method to their initial ones, then call its hook, in list order."""
        if names := [type(method).__name__ for method in self.overriding("transform_logits")]:
            rank_zero_info(
                f"method={names}: training metrics of the module, such as train/accuracy, use logits changed by the "
                "method; evaluation uses raw logits"
            )
        for method in self._with_new_attributes():
            method.reset(server)
            method.on_fit_start(server)

    def honest_clients(self, server: Server) -> list[int]:
        """The clients that no method lets attack."""
        attackers = set[int]().union(*(method.attackers(server) for method in self.methods))
        return [k for k in range(server.num_clients) if k not in attackers]

    def on_round_start(self, server: Server) -> None:
        """Call the hook of each method, in list order."""
        for method in self._with_new_attributes():
            method.on_round_start(server)

    def sent_to(self, server: Server, k: int, names: Collection[str]) -> SentToClient:
        """What client ``k`` alone receives; ``names`` are the entries of the state that travel in each round."""
        results, owners = {}, dict[str, str]()
        for method in self.overriding("sent_state"):
            results[method] = method.sent_state(server, k)
        entries = replaced_entries("sent_state", results, server.state, names, owners)
        return SentToClient(entries, self.sent_extras(server, k), owners)

    def sent_extras(self, server: Server, k: int) -> dict[str, Any]:
        """What client ``k`` alone receives in addition to the state, by method."""
        extras = {}
        for method in self.overriding("sent_extras"):
            values = method.sent_extras(server, k) or {}
            hint = "return a dictionary of tensors and numbers by name, which may be nested, or None"
            check_returned(is_nested(values, is_number), method, "sent_extras", values, hint)
            # the client gets dictionaries of its own
            extras[method.name] = apply_to_collection(values, Tensor, lambda tensor: tensor)
        return extras

    def start_state(self, client: ClientContext, names: Collection[str]) -> State:
        """The entries of ``client.received`` that the client replaces; ``names`` are those that may be."""
        methods = self.overriding("start_state")
        results = {method: call_hook(method, "start_state", client) for method in methods}
        return replaced_entries("start_state", results, client.received, names, client.visit.owners)

    def unsent_bytes(self, state: Mapping[str, Tensor], k: int) -> int:
        """Bytes of the entries that client ``k`` neither receives nor sends, since it has a part of them."""
        size = 0
        for method in self.overriding("sent_numbers"):
            for name, number in method.sent_numbers(k).items():
                size += (state[name].numel() - number) * state[name].element_size()
        return size

    @property
    def personalizes(self) -> bool:
        """Whether the model that is evaluated for a client may differ from the global one by a method's hook."""
        return any(self.overriding(hook) for hook in ("personal_state", "sent_state", "start_state"))

    @property
    def seeing_updates(self) -> list[Method]:
        """The methods whose server hooks see the updates one by one."""
        hooks = ("transform_updates", "aggregate")
        return [m for m in self.methods if any(overrides(m, hook) for hook in hooks)]

    def aggregate(self, server: Server, updates: Updates) -> State:
        """Apply the methods' ``transform_updates`` in list order, then ``aggregate`` or else the weighted mean.

        Returns:
            The change of the parameters and new values of floating-point buffers; empty if all weights are 0.
        """
        for method in self._with_new_attributes():
            if overrides(method, "transform_updates"):
                updates = method.transform_updates(server, updates.as_seen_by(method.name))
                hint = "return the updates, or updates.replaced(rows)"
                check_returned(isinstance(updates, Updates), method, "transform_updates", updates, hint)
        if not updates.weights.any():
            return {}
        for method in self.overriding("aggregate"):
            change = method.aggregate(server, updates.as_seen_by(method.name))
            buffers = {*updates.float_buffers} & (change.keys() if isinstance(change, Mapping) else set())
            return checked_state(method, "aggregate", change, select(server.state, [*updates.names, *buffers]))
        return dict(updates.combined(updates.weights, mean=True))

    def transform_update(self, server: Server, delta: State, payload: dict[str, Payload]) -> State:
        """Apply the methods' transforms in list order, each with its own payload."""
        for method in self._with_new_attributes():
            transformed = method.transform_update(server, delta, payload.get(method.name, {}))
            delta = checked_state(method, "transform_update", transformed, delta)
        return delta

    def on_round_end(self, server: Server, payload: dict[str, Payload]) -> None:
        """Call the hook of each method with its own payload, in list order."""
        for method in self._with_new_attributes():
            method.on_round_end(server, payload.get(method.name, {}))

    def evaluated_state(self, server: Server) -> State:
        """Pass the global state through each method's ``evaluated_state``, in list order."""
        state = server.state
        for method in self._with_new_attributes():
            state = checked_state(method, "evaluated_state", method.evaluated_state(server, state), state)
        return state

    def personal_state(self, client: ClientContext) -> State:
        """The entries in which the state that is evaluated for a client differs from ``client.received``."""
        for method in self.overriding("personal_state"):
            state = call_hook(method, "personal_state", client)
            hint = "return entries of client.received by name, or None"
            fits = isinstance(state, Mapping) and state.keys() <= client.received.keys()
            check_returned(state is None or fits, method, "personal_state", state, hint)
            return checked_state(method, "personal_state", state, select(client.received, state)) if state else {}
        return {}

    @property
    def evaluation_point(self) -> str:
        """The prefix of the tags of measurements on the clients' models; empty for received models."""
        points = (method.evaluation_point for method in self.overriding("personal_state"))
        return next((f"{point}/" for point in points if point != "received"), "")

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The server-side state of each method."""
        return {method.name: method.state_dict() for method in self.methods}

    def sent_state_dict(self) -> dict[str, dict[str, Any]]:
        """The result of :meth:`state_dict` without the server values that do not travel."""
        state = self.state_dict()
        for method in self.methods:
            for value in method._server_values():
                if not value.travels:
                    state[method.name].pop(value.name, None)
        return state

    def sent_values(self) -> list[Any]:
        """The server values that clients receive."""
        return [getattr(method, name) for method, name in self._sent_names()]

    @contextmanager
    def with_sent_values(self, values: Sequence[Any]) -> Iterator[None]:
        """In this block client hooks read these values, in the order of :meth:`sent_values`."""
        values_before, self.attributes = self.sent_values(), None
        try:
            for (method, name), value in zip(self._sent_names(), values, strict=True):
                setattr(method, name, value)
            yield
        finally:
            for (method, name), value in zip(self._sent_names(), values_before, strict=True):
                setattr(method, name, value)
            self.attributes = None

    def _sent_names(self) -> list[tuple[Method, str]]:
        names = []
        for method in self.methods:
            names += [(method, value.name) for value in method._server_values() if value.travels]
        return names

    def load_state_dict(self, state: dict[str, dict[str, Any]], device: torch.device) -> None:
        """Restore what :meth:`state_dict` gave, on the device of the run, unless a method has its own there."""
        for method in self._with_new_attributes():
            method.load_state_dict(move_data_to_device(state[method.name], device))

    @property
    def names(self) -> list[str]:
        """The methods' names, in list order."""
        return [method.name for method in self.methods]

    def _with_new_attributes(self) -> list[Method]:
        """Return the methods for a server hook, after which the snapshot of their attributes is taken again."""
        self.attributes = None
        self.overriding.cache_clear()
        return self.methods


def overrides(method: Method, hook: str) -> bool:
    """Return whether a method overrides a hook, in its class or as an attribute."""
    return hook in vars(method) or getattr(type(method), hook) is not getattr(Method, hook)


def call_hook(method: Method, hook: str, client: ClientContext, *args: Any) -> Any:
    """The result of a client hook."""
    outer = client_hook.set(hook)
    try:
        return getattr(method, hook)(client, *args)
    finally:
        client_hook.reset(outer)
        changed = client.visit.written()
        if changed is not None:
            hint = "which all clients share; change a copy, such as value.clone()"
            raise SharedStateError(f"method={type(method).__name__}: {hook} wrote to {changed}, {hint}")


def check_logits(method: Method, client: ClientContext, logits: Tensor) -> None:
    """Refuse logits that are not one for each label that a method counts."""
    counts = client.info.label_counts if method.needs_label_counts else None
    if counts is not None and logits.shape[-1:] != counts.shape[-1:]:
        hint = f"it counts labels of {len(counts)} classes; give labels that are classes, and a logit for each"
        raise UsageError(f"method={type(method).__name__}: logits={tuple(logits.shape)}: {hint}")


def check_returned(condition: bool, method: Method, hook: str, value: object, hint: str) -> None:
    """Refuse the result of a method's hook."""
    if not condition:
        words = "None" if value is None else f"the {type(value).__name__} {truncate(repr(value), 60)}"
        if isinstance(value, Tensor):
            words = f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
        raise UsageError(f"method={type(method).__name__}: {hook} returned {words}; {hint}")


def checked_state(method: Method, hook: str, result: Any, state: Mapping[str, Tensor]) -> State:
    """Return a hook's result for ``state``, if it is a state with the same entries."""
    hint = "return a dictionary with a tensor for each entry that it was given"
    check_returned(isinstance(result, Mapping), method, hook, result, hint)
    for name, value in state.items():
        fits = isinstance(result.get(name), Tensor) and result[name].shape == value.shape
        check_returned(fits, method, f"{hook}[{name!r}]", result.get(name), f"{hint}: {tuple(value.shape)}")
    for name in result.keys() - state.keys():
        check_returned(False, method, f"{hook}[{name!r}]", result[name], f"{hint}, and no additional entries")
    return dict(result)


def replaced_entries(
    hook: str,
    results: Mapping[Method, Any],
    state: Mapping[str, Tensor],
    names: Collection[str],
    owners: dict[str, str],
) -> State:
    """Join what a hook of several methods returned, entries that replace those of ``state``, and note the owners."""
    entries: State = {}
    for method, result in results.items():
        kind = type(method).__name__
        is_state = result is None or isinstance(result, Mapping)
        check_returned(is_state, method, hook, result, "return entries of the state by name, or None")
        for name, value in (result or {}).items():
            hint = "return entries that travel in each round, not frozen ones or ones that stay with the clients"
            require(name in names, f"method={kind}: {hook}", name, hint)
            fits = isinstance(value, Tensor) and value.shape == state[name].shape
            hint = f"return a tensor {tuple(state[name].shape)}"
            check_returned(fits, method, f"{hook}[{name!r}]", value, hint)
            kinds = [owners.setdefault(name, kind), kind]
            require(kinds[0] == kind, "method", kinds, f"each gives clients their {name}; keep one of them")
            entries[name] = (value.detach() if value.requires_grad else value).to(state[name])
    return entries


def is_nested(value: object, fits: Callable[[Any], bool]) -> bool:
    """Whether a value ``fits``, or is a dictionary of such values by name, which may be nested."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and is_nested(part, fits) for name, part in value.items())
    return fits(value)


def is_number(value: Any) -> bool:
    """Whether a client may receive a value: a tensor or a number."""
    return isinstance(value, (Tensor, Real))


def can_be_added(value: Any) -> bool:
    """Whether a method may send a value: a total and a weight in tensors."""
    has_total = isinstance(value, LazyWeighted) or (isinstance(value, Weighted) and isinstance(value.total, Tensor))
    return has_total and isinstance(value.weight, Tensor)
