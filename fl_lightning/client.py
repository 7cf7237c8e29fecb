"""The client: the one resident LightningModule of a process, which clients visit with their data and memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from fl_lightning.data.datamodule import ClientInfo
from fl_lightning.errors import ClientError
from fl_lightning.logged import Logged
from fl_lightning.method import Method, MethodList, Step
from fl_lightning.state import State, clone, copy_into, difference, norm, select, tensors
from fl_lightning.taps import Taps


class Client(LightningModule):
    """A visit: the user's module with a client's state, data description and memory in it.

    Its :meth:`training_step` is the loss of the user's module plus the penalties of the methods. The module is loaded
    in place; nothing is built per client.

    Args:
        module: the user's LightningModule.
        methods: what acts on the client.
        taps: tap name to submodule path of ``module``.

    Attributes:
        received: the global state w^t that the server sent, by name; do not change it.
        info: number of examples, label counts ``(C,)``, domain and id of the client.
        num_steps: local steps taken in this visit so far.
        drift: Euclidean norm of :attr:`change`, after the visit.
        lr: learning rate of the first parameter group, as of the last local step.
        trainable: names of the parameters that are trained.
        others: names of the buffers and frozen parameters.
    """

    def __init__(self, module: LightningModule, methods: MethodList, taps: Mapping[str, str]) -> None:
        super().__init__()
        self.module = module
        self.methods = methods
        self.logged = Logged()
        self.live = tensors(module)
        self.trainable = [name for name, value in self.live.items() if value.requires_grad]
        self.others = [name for name in self.live if name not in set(self.trainable)]
        self.received: State = {}
        self.info = ClientInfo(0, 0, None)
        self.num_steps = 0
        self.drift = 0.0
        self.lr = 0.0
        self._memories: dict[int, dict[str, dict[str, Any]]] = {}
        self._references: dict[str, tuple[LightningModule, Taps]] = {}
        self._observed: dict[str, dict[str, Tensor]] = {}
        self._wanted: dict[str, set[str]] = {}
        self._change: State | None = None
        self._batch: tuple[Any, int] = (None, 0)
        self.tap_paths = dict(taps)
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._hook_taps()
        replaced: Any = module
        replaced.log, replaced.log_dict = self._log, self._log_dict

    # ------------------------------------------------------------------ what methods use
    @property
    def parameters_received(self) -> list[Tensor]:
        """The received values of the trained parameters, in the order of :attr:`parameters_trained`."""
        return [self.received[name] for name in self.trainable]

    @property
    def parameters_trained(self) -> list[Tensor]:
        """The live parameters that are trained."""
        return [self.live[name] for name in self.trainable]

    @property
    def change(self) -> Mapping[str, Tensor]:
        """y - w^t of the trained parameters in float64, read-only; computed once, after the last step."""
        if self._change is None:
            self._change = difference(select(self.live, self.trainable), self.received)
        return MappingProxyType(self._change)

    def state(self) -> State:
        """A copy of the client's present state."""
        return clone(self.live)

    def memory(self, method: Method) -> dict[str, Any]:
        """What ``method`` keeps for this client between rounds: tensors and plain values."""
        return self._memories.setdefault(self.info.id, {}).setdefault(method.name, {})

    def freeze(  # type: ignore[override]
        self, name: str, state: State, taps: Collection[str] | None = None
    ) -> None:
        """Keep a frozen copy of the module, in eval mode, with ``state``, to be observed at ``taps`` in this visit.

        Without ``taps`` it is observed at every tap there is.
        """
        if name not in self._references:
            self._references[name] = self._twin()
        copy_into(tensors(self._references[name][0]), state)
        self._wanted.setdefault(name, set()).update(self.tap_paths if taps is None else taps)

    @torch.no_grad()
    def observe(self, name: str) -> dict[str, Tensor]:
        """The taps of the frozen model ``name`` on the current batch, run only as far as the last one asked for.

        It is run once per batch, however many methods observe it.
        """
        if name not in self._observed:
            twin, taps = self._references[name]
            arguments = self._batch if self._takes_index else self._batch[:1]
            self._observed[name] = taps.run_until(self._wanted[name], lambda: twin.training_step(*arguments))
        return self._observed[name]

    # ------------------------------------------------------------------ what the engine uses
    def start(self, info: ClientInfo, received: State) -> None:
        """Begin the visit of ``info.id``: load the received state and what the client kept, then ask the methods."""
        self.info, self.received = info, received
        self.num_steps, self._change = 0, None
        self.logged.clear()
        self._wanted.clear()
        copy_into(self.live, {**received, **self._memories.get(info.id, {}).get("state", {})})
        self.module.train()
        self.methods.on_client_start(self)

    def finish(self, kept: list[str]) -> None:
        """End the visit: check that the result is finite, and remember the entries that do not travel."""
        self._taps.values = {}
        self._observed = {}
        self._check_finite()
        if kept:
            self._memories.setdefault(self.info.id, {})["state"] = clone(select(self.live, kept))

    def load(self, state: State) -> None:
        """Put a state into the module, for evaluation."""
        copy_into(self.live, state)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """The module's loss plus the penalties; None where the module asks to skip the batch."""
        self._batch, self._observed = (batch, batch_idx), {}
        self.logged.batch_size = count_examples(batch)
        output = self.module.training_step(*(self._batch if self._takes_index else self._batch[:1]))
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return None
        self.logged.add_term("loss", loss)
        for name, value in self.methods.penalties(self, Step(batch, targets_of(batch), self._taps.values)).items():
            self.logged.add_term(name, value)
            loss = loss + value
        return loss

    def release(self) -> None:
        """Give the module back as it came: without hooks, without our ``log``."""
        self._taps.remove()
        module: Any = self.module
        for name in ("log", "log_dict"):
            module.__dict__.pop(name, None)
        module.fabric = None

    @property
    def tapped(self) -> dict[str, Tensor]:
        """The taps of the last forward."""
        return self._taps.values

    def memories(self) -> dict[int, dict[str, dict[str, Any]]]:
        """All clients' memories by id and method."""
        return self._memories

    # ------------------------------------------------------------------ inside
    def _hook_taps(self) -> None:
        self._taps = Taps(self.module, self.tap_paths, self._transform_logits)

    def _transform_logits(self, logits: Tensor) -> Tensor:
        return self.methods.transform_logits(self, logits) if self.module.training else logits

    def _log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        self.logged.add(name, value, batch_size)

    def _log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            self._log(name, value, **kwargs)

    def _twin(self) -> tuple[LightningModule, Taps]:
        """A frozen copy with taps of its own; hooks and the bound ``log`` must not be copied with it."""
        self._taps.remove()
        try:
            twin: Any = copy.deepcopy(self.module, {id(self): self, id(self.module._fabric): self.module._fabric})
        finally:
            self._hook_taps()
        twin.eval().requires_grad_(False)
        twin.log = twin.log_dict = lambda *args, **kwargs: None
        return twin, Taps(twin, self.tap_paths)

    def _check_finite(self) -> None:
        term = self.logged.first_bad_term()
        if term is not None:
            raise ClientError(f"{term[0]} became nan or infinite at local step {term[1]}")
        self.drift = float(norm(self.change))
        if not math.isfinite(self.drift):
            bad = next(name for name, value in self.change.items() if not torch.isfinite(value).all())
            raise ClientError(f"the weights of {bad} became nan or infinite after local step {self.num_steps - 1}")


def count_examples(batch: Any) -> int:
    """The number of examples of a batch: the length of its first tensor, 1 where it has none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((count_examples(part) for part in parts), 1)


def targets_of(batch: Any) -> Tensor | None:
    """The labels of a batch: the second entry of a pair, or the entry that is called as labels are."""
    if isinstance(batch, Mapping):
        return next((batch[key] for key in ("target", "targets", "label", "labels", "y") if key in batch), None)
    if isinstance(batch, (list, tuple)) and len(batch) > 1 and isinstance(batch[1], Tensor):
        return batch[1]
    return None


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises over the batch in one dimension, which a batch of one example cannot."""
    return any(isinstance(part, nn.BatchNorm1d) for part in module.modules())
