"""Evaluation of what is loaded in the resident module, its batches dealt out over the workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from fl_lightning.client import count_examples
from fl_lightning.logged import tagged
from fl_lightning.seeding import ambient
from fl_lightning.state import Sums

if TYPE_CHECKING:
    from fl_lightning.engine import Team
    from fl_lightning.worker import Worker


class Evaluator:
    """Runs the module's own validation or test step.

    Args:
        worker: the resident module and the data.
        team: the workers that share the batches.
        call: calls a hook of the callbacks.

    Attributes:
        shared: whether each worker sees a part of the batches in the present evaluation.
    """

    def __init__(self, worker: Worker, team: Team, call: Callable[..., Any]) -> None:
        self.worker, self.team, self.call = worker, team, call
        self.shared = False

    @torch.no_grad()
    def evaluate(self, phase: str, observed: bool = True, shared: bool = True) -> dict[str, float]:
        """Metrics by tag on the ``val`` or ``test`` data, in eval mode; none without data.

        If ``observed``, callbacks see each batch's taps; unless ``shared``, this worker alone evaluates all batches.
        """
        loaders, name = self.loaders(phase), self._step_name(phase)
        if not loaders or name is None:
            return {}
        module, stage = self.worker.client.module, "validation" if name == "validation_step" else "test"
        self.shared = shared and self.team.size > 1 and can_share(module, stage)
        module.eval()
        self.worker.client.logged.clear()
        sums = Sums()
        with ambient(self.worker.seed, phase):
            getattr(module, f"on_{stage}_epoch_start")()
            for index, loader in enumerate(loaders):
                self._evaluate_loader(loader, index, name, phase, observed, sums)
            getattr(module, f"on_{stage}_epoch_end")()
        sums.add(self.worker.client.logged.sums())
        self.add_up(sums)
        if observed:
            self.call("on_evaluation_end", phase=phase)
        return {tagged(phase, key): float(value) for key, value in sums.means().items()}

    def add_up(self, sums: Sums) -> None:
        """Make sums over the batches of this worker those over all batches."""
        if self.shared:
            self.team.add_up(sums)

    def loaders(self, phase: str) -> list[Iterable]:
        data = self.worker.data
        found = data.val_dataloader() if phase == "val" else data.test_dataloader()
        return [self.worker.prepared(one) for one in (found if isinstance(found, (list, tuple)) else [found])]

    def _evaluate_loader(self, loader: Iterable, index: int, name: str, phase: str, observed: bool, sums: Sums) -> None:
        client = self.worker.client
        step = getattr(client.module, name)
        extra = {"dataloader_idx": index} if is_param_in_hook_signature(step, "dataloader_idx", explicit=True) else {}
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        for batch_idx, batch in self._batches(loader):
            self.team.check()
            moved = self.worker.to_device(batch)
            client.logged.batch_size = count_examples(moved)
            # each batch has an address of its own, so that it matters to none who evaluates the others
            with ambient(self.worker.seed, phase, index, batch_idx), self.worker.fabric.autocast():
                step(moved, batch_idx, **extra) if takes_index else step(moved, **extra)
            sums.add(client.logged.take())
            if observed:
                self.call("on_evaluation_batch_end", phase=phase, taps=client.tapped)

    def _batches(self, loader: Any) -> Iterator[tuple[int, Any]]:
        """The batches of this worker with their indices."""
        rank, size = (self.team.rank, self.team.size) if self.shared else (0, 1)
        limit = self.worker.limit_batches
        if hasattr(loader, "batch"):
            return ((i, loader.batch(i)) for i in range(len(loader))[slice(rank, limit, size)])
        return itertools.islice(enumerate(loader), rank, limit, size)

    def _step_name(self, phase: str) -> str | None:
        """The step of the module that evaluates ``phase``: its own, or for test the validation step."""
        names = ("validation_step",) if phase == "val" else ("test_step", "validation_step")
        return next((name for name in names if is_overridden(name, self.worker.client.module)), None)


def can_share(module: LightningModule, stage: str) -> bool:
    """Whether the batches can be dealt out: not where the module adds something up over them by itself."""
    hooks = (f"on_{stage}_epoch_start", f"on_{stage}_epoch_end")
    alone = any(isinstance(part, Metric) for part in module.modules())
    return not alone and not any(is_overridden(hook, module) for hook in hooks)
