"""One client of a group, in the module of this worker: at the start of its visit, and within a mapped step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.client.client import Gradients
from fl_lightning.client.lightning.fit_progress import FitProgress
from fl_lightning.client.lightning.module_snapshot import StateBinding
from fl_lightning.client.reference_models import ReferenceModels
from fl_lightning.client.visit import Visit
from fl_lightning.core.client_info import ClientInfo
from fl_lightning.core.state import State, clone, tensors
from fl_lightning.functional.rows import linked_zero
from fl_lightning.training.patching import patched


def start_visit(
    client: Client, info: ClientInfo, received: State, fit_progress: FitProgress
) -> tuple[Visit, State, State, dict[str, dict[str, Any]]]:
    """Start the visit of a client that trains side by side, in a module with the global state.

    Returns:
        The visit, the entries of its received state that differ from the global ones, those that a method has changed,
        and the states of the reference models.
    """
    client.worker_module.trainer_shim.fit_progress = fit_progress
    lifecycle = client.lifecycle
    visit = lifecycle.begin(info, received, fit_progress, lifecycle.sent_to(info.id))
    if client.methods.overriding("start_state") or any(visit.received[name] is not received[name] for name in received):
        client.worker_module.load(visit.received)
        lifecycle.choose_start(visit)
    entries = {name: value for name, value in visit.received.items() if value is not received[name]}
    versions = [value._version for value in client.live.values()]
    with collected(client.references) as references:
        client.methods.call("on_client_start", client)
    pairs = zip(client.live.items(), versions, strict=True)
    moved = clone({name: value for (name, value), version in pairs if value._version != version})
    if entries or moved:
        client.worker_module.load(received)
    return visit, entries, moved, references


@contextmanager
def one_client(client: Client, live: State, visit: Any, references: Mapping[str, Any]) -> Iterator[None]:
    """Return a context, for functions that are mapped over clients, with the values of one of them."""
    worker_module = client.worker_module
    attributes, trainer_shim, logged = vars(client), worker_module.trainer_shim, worker_module.logged
    before = {name: attributes[name] for name in ("live", "visit")}, trainer_shim.fit_progress
    try:
        attributes.update(live=live, visit=visit)
        trainer_shim.fit_progress = visit.fit_progress
        worker_module.log_into(visit.logged)
        models = holding(client.references, references) if references else nullcontext()
        with models:
            yield
    finally:
        attributes.update(before[0])
        trainer_shim.fit_progress = before[1]
        worker_module.log_into(logged)


@contextmanager
def collected(models: ReferenceModels) -> Iterator[dict[str, dict[str, Any]]]:
    """In this block no reference model is loaded; gives the states that would be, and the taps wanted, by model."""
    loads: dict[str, dict[str, Any]] = {}

    def note(name: str, state: Mapping[str, Tensor], taps: Collection[str] | None) -> None:
        part = loads.setdefault(name, {"taps": []})
        tap_names = {*part["taps"], *(models.tap_paths if taps is None else taps)}
        part.update(state=dict(state), taps=sorted(tap_names))

    with patched(models, load=note):
        yield loads


@contextmanager
def holding(models: ReferenceModels, loads: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """In this block the reference models have these states, and no value is cached."""
    models.clear()
    models.wanted = {name: set(part["taps"]) for name, part in loads.items()}
    with ExitStack() as stack:
        for name, part in loads.items():
            model = models.reset(name)
            live = tensors(model)
            stack.enter_context(StateBinding(model, live).swapped({**live, **part["state"]}))
        yield
    models.clear()


def mapped_gradient(
    client: Client,
    places: StateBinding,
    at: MutableMapping[str, Tensor],
    value: Callable[[], Tensor | None],
    names: Sequence[str],
) -> Gradients:
    """The gradient in a step of clients side by side, as a function of the parameters."""
    present = places.held()
    parameters = {name: at[name] if name in at else present[name] for name in names}
    parameter_names = {*client.trainable, *client.frozen}

    def of(parameters: State) -> tuple[Tensor, tuple[Tensor, State]]:
        # an operation in place on a tensor from outside would not be differentiable
        start = {name: at.get(name, tensor) for name, tensor in present.items()}
        buffers = {name: value.clone() for name, value in start.items() if name not in parameter_names}
        now = start | buffers | parameters
        live = {name: now[name] for name in client.live}
        with places.swapped(now), patched(client, live=live):
            loss, after = value(), places.held()
        loss = linked_zero(*parameters.values()) if loss is None else loss.reshape(())
        return loss, (loss, {name: after[name] for name in at if name not in parameter_names})

    gradients, (loss, buffers) = torch.func.grad(of, has_aux=True)(parameters)
    at.update(buffers)
    result = Gradients(gradients)
    result.loss = loss
    return result
