r"""Recomputes the running statistics of BatchNorm for a given state on the clients' training data.

With the inputs :math:`x_{ic}` of channel c of a layer, over all examples and positions of the given clients,

.. math:: \mu_c = \frac1n \sum_i x_{ic}, \qquad \sigma_c^2 = \frac1n \sum_i x_{ic}^2 - \mu_c^2

Layer by layer, each after its predecessors, these statistics make the output in eval mode equal the output in training
mode on the pooled data as one batch. The variance is therefore the population variance, which is (n - 1) / n times
torch's unbiased estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial, reduce
from itertools import islice
from operator import add
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule

from fl_lightning.client import Client
from fl_lightning.client.batch_norm import statistics_of, sums_of
from fl_lightning.client.taps import StopForward
from fl_lightning.core.seeding import derive_seed, rng_scope
from fl_lightning.core.state import State, copy_into, tensors
from fl_lightning.core.weighted import Sums, Weighted
from fl_lightning.data.client_loaders import Batches, ClientLoader
from fl_lightning.distributed.workers import Workers
from fl_lightning.engine.evaluation.evaluator import bound_step
from fl_lightning.training.device_loaders import Loaders


class Recalibration:
    """Recomputes running statistics in a frozen copy of the module.

    Runs ``training_step`` in eval mode, hence without dropout, and without the methods. Data sets of this package
    yield training images without augmentation, but with the client's noise; other loaders yield the batches of
    training.
    """

    def __init__(self, client: Client, loaders: Loaders, workers: Workers) -> None:
        self.client, self.loaders, self.workers = client, loaders, workers
        self._device = loaders.fabric.device
        self._warned = False

    @cached_property
    def _copy(self) -> LightningModule:
        return self.client.reference_copy()

    @torch.no_grad()
    def statistics(self, state: State, clients: Sequence[int], round_: int, once: bool = False) -> State:
        """Return running means and variances of a state on the data of clients, by name; empty without a batch.

        All workers call this, with the same arguments. Each example counts once, whatever the client's weight. With
        ``once``, one pass covers all layers, with the statistics of ``state`` in the preceding layers.
        """
        calls = self._calls(state, clients, round_)
        stages = [calls] if once else [{path: number} for path, number in calls.items()]
        statistics: State = {}
        for stage in stages if calls else ():
            sums = Sums(self._device)
            for k in clients[self.workers.rank :: self.workers.size]:
                self._add_client(sums, k, round_, stage, leaves=not once)
            sums.all_reduce(self.workers)
            for path, total in sums.totals.items():
                mean, square = total.mean()
                variance = (square - mean.square()).clamp_min(0.0)
                statistics |= dict(zip(statistics_of(path), (mean, variance), strict=True))
            # later layers use these statistics in the types of the state
            copy_into(tensors(self._copy), statistics)
        live = tensors(self._copy)
        return {name: live[name].clone() for name in statistics}

    def _calls(self, state: State, clients: Sequence[int], round_: int) -> dict[str, int]:
        """Count the calls of each layer in a forward, in the order of the first calls; each worker does it itself."""
        copy_into(tensors(self._copy), state)
        calls: dict[str, int] = {}

        def note(path: str, module: Any, args: tuple) -> None:
            calls[path] = calls.get(path, 0) + 1

        with self._hooked(note, self.client.batch_norms):
            for k in clients:
                with self._batches(k, round_) as batches:
                    if next(batches, False):
                        break
        unused = [path for path in self.client.batch_norms if path not in calls]
        if calls and unused and not self._warned:
            self._warned = True
            rank_zero_warn(f"the forward of a batch does not call {', '.join(unused)}; their statistics are unchanged")
        return calls

    def _add_client(self, sums: Sums, k: int, round_: int, calls: dict[str, int], leaves: bool) -> None:
        """Add the sums of a client for the layers in ``calls``, with the number of calls of each layer in a forward.

        With ``leaves``, a forward ends after the last of these calls.
        """
        sums_of_calls: dict[str, list[Weighted]] = {}

        def note(path: str, module: Any, args: tuple) -> None:
            sums_of_calls.setdefault(path, []).append(sums_of(args[0], self._device))
            if leaves and len(sums_of_calls[path]) == calls[path]:
                raise StopForward

        with self._hooked(note, calls), self._batches(k, round_) as batches:
            for _ in batches:
                sums.add({path: reduce(add, parts) for path, parts in sums_of_calls.items()})
                sums_of_calls.clear()

    @contextmanager
    def _hooked(self, note: Callable[[str, Any, tuple], None], paths: Iterable[str]) -> Iterator[None]:
        """Within this context, ``note`` is called with path, layer and input before each call of a layer."""
        with ExitStack() as stack:
            for path in paths:
                hook = partial(note, path)
                stack.callback(self._copy.get_submodule(path).register_forward_pre_hook(hook).remove)
            yield

    @contextmanager
    def _batches(self, k: int, round_: int) -> Iterator[Iterator[bool]]:
        """Yield an iterator that runs the step on the next batch of client ``k``; the batches are always the same."""
        loaders, place = self.loaders, ("recalibrate", round_, k)
        step = bound_step(self._copy, "training_step")

        def run(loader: ClientLoader) -> Iterator[bool]:
            for index, (_, batch) in enumerate(islice(loader.batches(loaders.channels_last), loaders.limit)):
                self.workers.check()
                with rng_scope(loaders.seed, *place, index), loaders.fabric.autocast(), suppress(StopForward):
                    step(loaders.to_device(batch), index)
                yield True

        with loaders.train(k, round_, "recalibrate") as loader:
            if isinstance(loader, Batches):
                loader = loader.as_stored(noise=True)
                loader.seed(derive_seed(loaders.seed, *place))
            yield run(loader)
