"""One visit of a client: an object that is made at its start and dropped after it."""

from __future__ import annotations

from operator import is_
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fl_lightning.client.lightning.fit_progress import FitProgress
    from fl_lightning.client.lightning.metric_log import MetricLog
    from fl_lightning.core.client_info import ClientInfo
    from fl_lightning.core.reduced import Reduced
    from fl_lightning.core.state import State
    from fl_lightning.data.client_loaders import ExampleIndices


class TrainingBatch(NamedTuple):
    """A batch of a visit on the device, with its index in the pass.

    Args:
        batch: the batch.
        index: its index; of clients side by side a tensor.
        rows: which of the client's examples it holds, where that is known.
        ends_step: whether the optimizer steps after it.
        states: states of the random generators before its forward pass, for :meth:`.Client.gradients`.
        versions: versions of its tensors then.
    """

    batch: Any
    index: Any
    rows: ExampleIndices | None = None
    ends_step: bool = True
    states: Any = None
    versions: Any = None


class Visit:
    """State of one client's visit outside the module, which visits do not share.

    Hooks must not modify the ``received`` state or the ``server`` tensors, which have names for errors.

    Attributes:
        extras: what the server sent this client alone, by method; None where clients train side by side.
        owners: the class of the method that gave an entry of the received state another value than the global one.
        change: the change y - w^t of the trained parameters, computed on demand after the last step.
        scratch: values of each method for this visit, by the method's name.
        counts: ``num_steps``: local steps taken so far; ``lr``: learning rate of the first parameter group in the last
            step; ``lr_total``: the sum of these learning rates.
        num_skipped: batches without a loss, which the module skips.
        num_lost: steps that 16-mixed skipped because of overflowing gradients.
        scalings: with 16-mixed, the gradient scale at the end, and the steps since it changed.
        present: the batch of the present step, where a method needs gradients in it.
        num_extra: gradients that methods have computed so far.
        epochs: the terms of the loss by name, as means over each local epoch.
        outputs: result of the module's last ``training_step``, as Lightning passes it to ``on_train_batch_end``.
        weight: p_k, before it is normalised over the cohort.
        drift: Euclidean norm of the change.
        values: logged values, reduced over the visit, after its end.
    """

    def __init__(
        self,
        info: ClientInfo,
        received: State,
        fit_progress: FitProgress,
        logged: MetricLog,
        server: Sequence[tuple[str, Tensor]] = (),
        extras: Mapping[str, Any] | None = None,
        owners: Mapping[str, str] | None = None,
    ) -> None:
        self.info, self.fit_progress, self.logged = info, fit_progress, logged
        self.extras, self.owners = extras, dict(owners or {})
        counts = [] if info.label_counts is None else [("client.info.label_counts", info.label_counts)]
        self._others = [*server, *counts]
        self.receive(received)
        self.change: Mapping[str, Tensor] | None = None
        self.scratch: dict[str, SimpleNamespace] = {}
        self.counts: Any = SimpleNamespace(num_steps=0, lr=0.0, lr_total=0.0)
        self.num_skipped = self.num_lost = self.num_extra = 0
        self.present: TrainingBatch | None = None
        self.scalings: list[tuple[float, int]] = []
        self.drift, self.weight = 0.0, 1.0
        self.epochs: list[dict[str, Reduced]] = []
        self.outputs: dict[str, Any] = {}
        self.values: dict[str, Reduced] = {}

    def receive(self, state: State) -> None:
        """Set the received state, before the first step."""
        self.received, self._number = state, len(state)
        self._tensors = [*state.values(), *(tensor for _, tensor in self._others)]
        self._versions = [tensor._version for tensor in self._tensors]

    def loss_terms(self) -> list[dict[str, float]]:
        """The terms of the loss by name, as means over each local epoch.

        They are the module's ``loss``, each method's penalty, and the terms of a penalty that has several.
        """
        return [{name: term.value for name, term in terms.items()} for terms in self.epochs]

    def written(self) -> str | None:
        """Name of a server tensor that was modified in this visit; None if all are unchanged."""
        # called after every hook of every step
        tensors, received = self._tensors, self.received
        if len(received) != self._number or not all(map(is_, received.values(), tensors)):
            return "the dictionary client.received"
        versions = [tensor._version for tensor in tensors]
        if versions == self._versions:
            return None
        names = [f"client.received[{name!r}]" for name in received] + [name for name, _ in self._others]
        changed = zip(names, versions, self._versions, strict=True)
        return next(name for name, now, before in changed if now != before)
