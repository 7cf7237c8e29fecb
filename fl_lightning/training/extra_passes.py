"""Passes outside of the local steps: gradients at other values of the parameters, and separate batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.client.client import Gradients, targets_of
from fl_lightning.client.lightning.module_snapshot import ModuleSnapshot
from fl_lightning.client.reference_models import tensor_versions
from fl_lightning.client.visit import TrainingBatch
from fl_lightning.core import foreach
from fl_lightning.core.method import MethodList, Step
from fl_lightning.core.seeding import replayed, rng_scope
from fl_lightning.core.state import entry_norms
from fl_lightning.training.device_loaders import Loaders
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import ClientError, UsageError, require

NO_METHODS = MethodList([])
# the scale of a loss in float16, halved as often as its gradients overflow
SCALE = 2.0**16


class ExtraPasses:
    """Computes what :meth:`.Client.gradients` and :meth:`.Client.batches` return."""

    def __init__(self, fabric: Fabric, client: Client, loaders: Loaders) -> None:
        self.fabric, self.client, self.loaders = fabric, client, loaders

    def batches(self, stream: str, passes: float, fraction: float) -> Iterator[Any]:
        """The batches of a stream, which is known by the present visit."""
        require(passes >= 0, "client.batches: passes", passes, "give 0 or more")
        require(0 < fraction <= 1, "client.batches: fraction", fraction, "use a share in (0, 1]")
        visit = self.client.visit
        return self.loaders.extra(stream, visit.fit_progress.round, visit.info.id, passes, fraction)

    def gradients(
        self, at: MutableMapping[str, Tensor] | None, batch: Any, loss: Any, names: Sequence[str]
    ) -> Gradients:
        """The gradient of these parameters at other values, on a batch, without any other effect."""
        client, current, at = self.client, self.client.visit.present, {} if at is None else at
        unknown = sorted(at.keys() - client.live.keys())
        require(not unknown, "client.gradients: at", unknown, "give values of entries of the state, by name")
        is_valid = callable(loss) or loss in ("full", "own")
        require(is_valid, "client.gradients: loss", loss, "give full, own or a function")
        if batch is None and current is None:
            hint = "needs a batch; pass one, or set needs_gradients = True in the class of the method"
            raise UsageError(f"client.gradients: {hint}")
        hooks = client.methods.overriding
        is_defined = current is not None or loss != "full" or not (hooks("penalty") or hooks("transform_logits"))
        hint = "the methods' penalties belong to a step; give own or a function"
        require(is_defined, "client.gradients outside of a step: loss", loss, hint)
        unknown = sorted({*names} - {*client.trainable})
        require(not unknown, "client.gradients: names", unknown, "give names of trained parameters")
        index, rows = 0, None
        if batch is None and current is not None:
            if current.versions is not None and current.versions != tensor_versions(current.batch):
                why = "training_step changes its batch, on which a gradient is to be computed again; work on a copy"
                raise ClientError(f"{type(client.module).__name__}.{why}")
            batch, index, rows = current.batch, current.index, current.rows

        def value() -> Tensor | None:
            with self.fabric.autocast():
                step_loss = client.training_step(batch, index, rows)
                if step_loss is None or not callable(loss):  # the module skips the batch
                    return step_loss
                return loss(Step(batch, targets_of(batch), client.worker_module.taps.values))

        with self._unnoticed(batch, current, loss):
            return self.compute(at, value, names)

    @contextmanager
    def _unnoticed(self, batch: Any, present: TrainingBatch | None, loss: Any) -> Iterator[None]:
        """In this block a pass logs nothing, and changes neither values of the visit nor random numbers."""
        client, worker_module, visit = self.client, self.client.worker_module, self.client.visit
        before, outputs = visit.logged, visit.outputs
        scratch = [(vars(values), dict(vars(values))) for values in visit.scratch.values()]
        muted = before.muted()
        muted.begin_batch(batch)
        with ExitStack() as stack:
            if present is not None:
                stack.enter_context(replayed(present.states))
            else:
                where = (visit.fit_progress.round, visit.info.id, visit.num_extra)
                stack.enter_context(rng_scope(client.seed, "gradients", *where))
                visit.num_extra += 1
            if loss != "full":
                stack.enter_context(patched(client, methods=NO_METHODS))
                stack.enter_context(worker_module.taps.recorded(callable(loss)))
            try:
                visit.logged = muted
                worker_module.log_into(muted)
                yield
            finally:
                worker_module.log_into(before)
                visit.logged, visit.outputs = before, outputs
                for values, saved in scratch:
                    values.clear()
                    values.update(saved)
                if present is not None and client.references.wanted:
                    client.references.begin_batch(present.batch, present.index, present.rows)

    def compute(
        self, at: MutableMapping[str, Tensor], value: Callable[[], Tensor | None], names: Sequence[str]
    ) -> Gradients:
        """The gradient at these values from a function that gives the loss: the module's tensors get other memory.

        Clients side by side put a function of their own in its place.
        """
        client, binding = self.client, self.client.worker_module.binding
        live, snapshot = binding.held(), ModuleSnapshot(client.module)
        memory = {name: tensor.data for name, tensor in live.items()}
        moved = [name for name in names if live[name].requires_grad]
        buffers = [name for name in client.others if name not in client.frozen]
        try:
            for name in {**dict.fromkeys(buffers), **at}:
                replacement = at[name].detach().to(live[name]) if name in at else memory[name]
                live[name].data = replacement.clone() if name in buffers else replacement
            with torch.set_grad_enabled(bool(moved)):
                loss, parameters = value(), [live[name] for name in moved]
                gradients = self._backward(loss, parameters) if moved and loss is not None else []
            after = binding.held()
            at.update({name: after[name].detach() for name in buffers if name in at})
        finally:
            for name, tensor in live.items():
                tensor.data = memory[name]
            snapshot.restore()
        result, computed = Gradients(), dict(zip(moved, gradients, strict=False))
        for name in names:
            result[name] = computed[name] if name in computed else torch.zeros_like(memory[name])
        result.loss = torch.zeros(()) if loss is None else loss.detach()
        return result

    def _backward(self, loss: Tensor, parameters: list[Tensor]) -> list[Tensor]:
        if getattr(self.fabric.strategy.precision, "scaler", None) is None:
            return [*torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)]
        scale = SCALE
        while True:
            how: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            scaled = torch.autograd.grad(loss * scale, parameters, **how)
            sizes = entry_norms(dict(enumerate(scaled)), math.inf)  # type: ignore[arg-type]
            if scale <= 1 or all(map(bool, torch.stack(sizes).isfinite())):
                return foreach.multiply([*scaled], 1 / scale)
            scale /= 2
