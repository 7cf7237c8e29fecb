"""The work of one process: clients visit the resident module, one after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client import Client
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.engine import Stopwatch, Team
from fl_lightning.errors import ClientError, UsageError
from fl_lightning.references import Rows
from fl_lightning.seeding import address, ambient
from fl_lightning.state import State, Sums, Weighted, means, select, weigh


@dataclass
class Update:
    """What a client sends: its change (or what the methods made of it), its buffers, and sums.

    Args:
        delta: change of the parameters that travel.
        others: values of the buffers and frozen parameters that travel.
        weight: p_k, before it is normalised over the cohort.
        payload: what the methods send, under ``<method>/<key>``.
        logged: what was logged in this visit.
        drift: norm of the change of the trained parameters.
    """

    delta: State
    others: State
    weight: float
    payload: dict[str, Weighted]
    logged: dict[str, Weighted]
    drift: float

    def entries(self) -> dict[str, Weighted]:
        """All of it, by names that begin with its part."""
        weight = torch.tensor(float(self.weight), dtype=torch.float64)
        found = {"clients": Weighted.of(1.0), "drift": Weighted.of(self.drift, weight)}
        for part, state in (("delta", self.delta), ("others", self.others)):
            scaled = weigh(list(state.values()), self.weight)
            found |= {f"{part}/{name}": Weighted(total, weight) for name, total in zip(state, scaled, strict=True)}
        for part, sums in (("payload", self.payload), ("logged", self.logged)):
            found |= {f"{part}/{name}": value for name, value in sums.items()}
        return found


class Totals:
    """The sums over the updates of a cohort; memory does not grow with the cohort."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        # Apple's GPUs have no float64
        self.sums = Sums("cpu" if torch.device(device).type == "mps" else device)

    def add(self, update: Update) -> None:
        self.sums.add(update.entries())

    @property
    def num_clients(self) -> int:
        return int(self.sums.totals["clients"].total) if self.sums.layout else 0

    @property
    def drift(self) -> float:
        """Mean norm of the clients' changes."""
        return float(self.sums.totals["drift"].mean()) if self.sums.layout else 0.0

    def means(self, part: str) -> State:
        """The means of ``delta``, ``others`` or what was ``logged``, by name; none where all weights are 0."""
        found = self.sums.under(part)
        return means({name: value for name, value in found.items() if part == "logged" or bool(value.weight)})

    @property
    def payload(self) -> dict[str, Weighted]:
        return self.sums.under("payload")


class Worker:
    """Trains one client after another on the resident :class:`Client`.

    Args:
        fabric: device and precision.
        client: the resident module.
        data: the clients' data.
        seed: base seed of all addressed streams.
        team: the workers, whose loss ends this one's work.
        local_epochs: passes over the client's data.
        local_steps: local steps instead of passes.
        weighting: client weight where no method gives one.
        buffers: what becomes of floating and integer buffers.
        gradient_clip_val: largest gradient norm, None for none.
        limit_batches: batches of a pass, None for all.
        channels_last: memory format of images.
        cache_references: run frozen reference models once an example and visit.
    """

    def __init__(
        self,
        fabric: Fabric,
        client: Client,
        data: FederatedDataModule,
        seed: int,
        team: Team,
        local_epochs: int = 1,
        local_steps: int | None = None,
        weighting: str = "examples",
        buffers: str = "average",
        gradient_clip_val: float | None = None,
        limit_batches: int | None = None,
        channels_last: bool = False,
        cache_references: bool = False,
    ) -> None:
        self.fabric, self.client, self.data, self.seed, self.team = fabric, client, data, seed, team
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.weighting, self.gradient_clip_val = weighting, gradient_clip_val
        self.limit_batches, self.channels_last = limit_batches, channels_last
        self.lr_factor = 1.0
        self.clock = Stopwatch()
        self._optimizer: Optimizer | None = None
        self._options: list[dict[str, Any]] = []
        client.references.caching = cache_references
        exchanged = {name for name in client.live if client.methods.exchanges(name)}
        self.sent = client.sent
        self.sent_others = [name for name in client.others if name in exchanged] if buffers == "average" else []
        local = set(client.others) if buffers == "local" else set()
        self.kept = [name for name in client.live if name not in exchanged or name in local]
        self._precision = fabric.strategy.precision
        self._full = fabric.device.type == "cpu" and not str(self._precision.precision).endswith("true")

    def visit(self, k: int, round_: int, received: State) -> Update:
        """Client ``k`` trains in round ``round_`` from ``received``.

        Raises:
            ClientError: anything that failed, named by client, round and, where known, the loss term and step.
        """
        self.clock.start()
        try:
            with ambient(self.seed, "train", round_, k):
                self.client.start(self.data.info(k), received)
                self._train(self.loader(k, round_))
                self.client.finish(self.kept)
                return self._collect()
        except UsageError:
            raise
        except Exception as error:
            raise ClientError(f"client {k}, round {round_}: {error}") from error
        finally:
            self.client.memories().settle(k)
            self.clock.lap("collect")

    def loader(self, k: int, round_: int) -> Iterable:
        """The client's loader; where it has a generator, that is set to the address of this visit."""
        loader = self.prepared(self.data.train_dataloader(k))
        generator = getattr(loader, "generator", None)
        if generator is not None:
            generator.manual_seed(address(self.seed, "batches", round_, k))
        return loader

    def prepared(self, loader: Any) -> Any:
        """A loader which gives images in the memory format that is wanted, where it knows how."""
        if hasattr(loader, "channels_last"):
            loader.channels_last = self.channels_last
        return loader

    def to_device(self, batch: Any) -> Any:
        """A batch on the device, in the precision's type and memory format."""
        if not self._full:
            batch = self._precision.convert_input(self.fabric.to_device(batch))
        return channels_last(batch) if self.channels_last else batch

    def _train(self, loader: Iterable) -> None:
        module = self.client.module
        optimizer, schedulers = self._fresh_optimizer()
        watched = any(config.reduce_on_plateau for config in schedulers)
        module.on_train_start()
        self.clock.lap("load")
        for epoch, batches in enumerate(self._epochs(loader)):
            self.client.epoch = epoch
            module.on_train_epoch_start()
            if watched:
                self.client.logged.mark()
            for index, batch in enumerate(batches):
                if self._step(self.to_device(batch), index, rows_of(loader), optimizer):
                    self._step_schedulers(schedulers, "step", self.client.num_steps)
            module.on_train_epoch_end()
            self._step_schedulers(schedulers, "epoch", epoch + 1)
        module.on_train_end()

    def _fresh_optimizer(self) -> tuple[Optimizer, list[LRSchedulerConfig]]:
        """An optimizer without a past: the last one, as it was before its first step, or one built anew."""
        if self._optimizer is None or not can_reset(self._optimizer):
            optimizer, schedulers = configure_optimizer(self.client)
            self._options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            self._optimizer = None if schedulers else optimizer
        else:
            optimizer, schedulers = self._optimizer, []
            optimizer.state.clear()
            for group, options in zip(optimizer.param_groups, self._options, strict=True):
                group.update(options)
        scale_learning_rates(optimizer, schedulers, self.lr_factor)
        return optimizer, schedulers

    def _epochs(self, loader: Iterable) -> Iterator[Iterable]:
        """The passes over the client's data; with ``local_steps`` they go on until the steps are done."""
        batches = len(loader)  # type: ignore[arg-type]
        left = batches * self.local_epochs if self.local_steps is None else self.local_steps
        left = left if self.limit_batches is None else min(left, self.limit_batches)
        while left > 0 and batches > 0:
            yield itertools.islice(loader, left)
            left -= batches

    def _step(self, batch: Any, index: int, rows: Rows | None, optimizer: Optimizer) -> bool:
        """One local step; False where the module skipped the batch."""
        client, module = self.client, self.client.module
        self.team.check()
        self.clock.lap("data")
        module.on_train_batch_start(batch, index)
        with self.fabric.autocast():
            loss = client.training_step(batch, index, rows)
        if loss is None:
            return False
        module.on_before_zero_grad(optimizer)
        optimizer.zero_grad()
        module.on_before_backward(loss)
        self.fabric.backward(loss)
        module.on_after_backward()
        self.clock.lap("forward_backward")
        self._precision.unscale_gradients(optimizer)
        client.methods.on_before_optimizer_step(client, optimizer)
        self._clip()
        module.on_before_optimizer_step(optimizer)
        self.clock.lap("correct")
        client.lr = optimizer.param_groups[0]["lr"]
        self.fabric.strategy.optimizer_step(optimizer)
        client.methods.on_after_optimizer_step(client, optimizer)
        client.num_steps += 1
        module.on_train_batch_end({"loss": loss.detach()}, batch, index)
        self.clock.lap("step")
        return True

    def _clip(self) -> None:
        if self.gradient_clip_val is not None:
            parameters = [self.client.live[name] for name in self.client.trainable]
            torch.nn.utils.clip_grad_norm_(parameters, self.gradient_clip_val)

    def _step_schedulers(self, schedulers: list[LRSchedulerConfig], interval: str, done: int) -> None:
        """Step the module's own schedulers as Lightning does within a fit: per local epoch or per local step."""
        for config in schedulers:
            if config.interval == interval and done % config.frequency == 0:
                metric = self.client.logged.current(config.monitor) if config.reduce_on_plateau else None
                self.client.module.lr_scheduler_step(config.scheduler, metric)

    def _collect(self) -> Update:
        client = self.client
        asked = client.methods.client_weight(client)
        examples = float(client.info.num_examples) if self.weighting == "examples" else 1.0
        client.weight = examples if asked is None else asked
        payload = client.methods.on_client_end(client)
        delta = client.methods.transform_client_update(client, select(client.change, self.sent))
        others = select(client.live, self.sent_others)
        check_finite({**delta, **{name: value.total for name, value in payload.items()}})
        return Update(delta, others, client.weight, payload, client.logged.sums(), client.drift)


def check_finite(sent: Mapping[str, Tensor]) -> None:
    """Refuse to add what would make every sum nan.

    Raises:
        ClientError: something that a client sends is nan or infinite.
    """
    sizes = torch._foreach_norm(list(sent.values()), ord=math.inf) if sent else []
    for name, size in zip(sent, sizes, strict=True):
        if not math.isfinite(size):
            raise ClientError(f"what it sends as {name} is nan or infinite")


def configure_optimizer(client: Client) -> tuple[Optimizer, list[LRSchedulerConfig]]:
    """A fresh optimizer (and schedulers) of the user's module.

    Raises:
        UsageError: the module returns no optimizer, or several.
    """
    returned: Any = client.module.configure_optimizers()
    optimizers, schedulers, monitor = _configure_optimizers(returned or [])
    if len(optimizers) != 1:
        raise UsageError(
            f"model={type(client.module).__name__}: configure_optimizers gives {len(optimizers)} optimizers; "
            "a client is trained with one, return one"
        )
    return optimizers[0], _configure_schedulers_automatic_opt(schedulers, monitor)


def can_reset(optimizer: Optimizer) -> bool:
    """Whether an optimizer is as new without its state: torch's own are, where nothing is hooked to them."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return type(optimizer).__module__.startswith("torch.optim.") and not any(hooks)


def scale_learning_rates(optimizer: Optimizer, configs: list[LRSchedulerConfig], factor: float) -> None:
    """Multiply the learning rates of an optimizer, and the base rates of its schedulers, by ``factor``."""
    if factor == 1.0:
        return
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] = group[key] * factor
    for config in configs:
        if hasattr(config.scheduler, "base_lrs"):
            config.scheduler.base_lrs = [rate * factor for rate in config.scheduler.base_lrs]


def rows_of(loader: Any) -> Rows | None:
    """Which of the client's examples the last batch of ``loader`` holds; None where it does not tell."""
    index = getattr(loader, "current", None)
    return None if index is None else Rows(index, len(loader.rows), loader.batch_size)


def channels_last(batch: Any) -> Any:
    """Images ``(B, C, H, W)`` at the top level of a batch, in the channels_last memory format."""
    if isinstance(batch, Tensor):
        return batch.contiguous(memory_format=torch.channels_last) if batch.ndim == 4 else batch
    if isinstance(batch, (list, tuple)):
        return type(batch)(channels_last(part) for part in batch)
    if isinstance(batch, dict):
        return {name: channels_last(part) for name, part in batch.items()}
    return batch
