"""The part of a trainer that implements the context of callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from fl_lightning.aggregation import Sums
from fl_lightning.callbacks.context import Gathered, Observed, RunContext
from fl_lightning.client import Client
from fl_lightning.errors import UsageError, choices, require
from fl_lightning.method import MethodList
from fl_lightning.server import Server
from fl_lightning.state import State


class RunAccess(RunContext):
    """Implements :class:`~fl_lightning.callbacks.context.RunContext` by the parts of a run."""

    def __init__(self) -> None:
        self.should_stop = self.save_best = False
        self._run: Any = None
        self._fitted: Any = None

    @property
    def run(self) -> Any:
        if self._run is None:
            raise RuntimeError("the trainer has no run yet; call fit, validate or test")
        return self._run

    @property
    def server(self) -> Server:
        return self.run.server

    @property
    def client(self) -> Client:
        return self.run.client

    @property
    def methods(self) -> MethodList:
        return self.run.methods

    @property
    def data(self) -> Any:
        return self.run.data

    @property
    def seed(self) -> int:
        return self.run.seed

    @property
    def run_dir(self) -> Path | None:
        return None if self._run is None else self._run.folder.path

    @property
    def metrics(self) -> dict[str, float]:
        return {} if self._run is None else self._run.metrics.current

    @property
    def history(self) -> list[dict[str, float]]:
        return [] if self._run is None else self._run.metrics.history

    @property
    def resumed(self) -> bool:
        return self.run.folder.resumed

    @property
    def resumed_from(self) -> Path | None:
        return self.run.folder.source

    @property
    def summary_writers(self) -> list[Any]:
        return self.run.folder.summary_writers

    @property
    def global_rank(self) -> int:
        return self.run.fabric.global_rank

    @property
    def world_size(self) -> int:
        return self.run.fabric.world_size

    def log(self, name: str, value: float) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"trainer.log: {name}={value!r}: log a number") from error
        self.run.metrics.update({name: number})

    def log_figure(self, name: str, figure: Any) -> None:
        self.run.folder.log_figure(name, figure, self.server.round)

    def warn(self, message: str) -> None:
        rank_zero_warn(message, stacklevel=5)

    def gather(self, value: Gathered) -> list[Gathered]:
        return self.run.workers.gather(value)

    def all_reduce(self, sums: Sums) -> None:
        sums.all_reduce(self.run.workers)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self.run.workers.local_only():
            yield

    def domains_of(self, phase: str) -> list[str]:
        return self.run.loaders.domains(phase)

    @property
    def has_own_test_data(self) -> bool:
        return not self.run.loaders.missing_test_data_reason

    def num_examples(self, domain: str, phase: str = "test") -> int:
        return self.run.loaders.num_examples(domain, phase)

    def has_data(self, phase: str, client: int | None = None) -> bool:
        loaders = self.run.loaders.evaluation(phase, client)
        return any(len(loader) for loader in loaders) if client is not None else bool(loaders)

    def evaluate(
        self, phase: str, state: State | None = None, client: int | None = None, domain: str | None = None
    ) -> dict[str, float]:
        known = phase == "test" or (phase == "val" and client is None)
        require(known, "trainer.evaluate: phase", phase, "use val or test; with client, use test")
        whole, before = self._whole(state, client, domain, phase if client is None else ""), self.client.state()
        try:
            return self.run.evaluator.evaluate_global_model(phase, whole, observed=False, data_of=client, domain=domain)
        finally:
            self.client.worker_module.load(before)

    def representations(
        self,
        state: State | None,
        taps: tuple[str, ...],
        data: Literal["test", "train"] = "test",
        client: int | None = None,
        examples: int | None = None,
        domain: str | None = None,
    ) -> Iterator[Observed]:
        require(data in ("test", "train"), "trainer.representations: data", data, "use test or train")
        require(examples is None or examples >= 1, "trainer.representations: examples", examples, "use 1 or more")
        require(
            examples is None or data == "test",
            "trainer.representations: data",
            data,
            "a probe needs test data; remove examples",
        )
        whole = self._whole(state, client, domain, "test" if data == "test" and client is None else "")
        # in the batch order of the next round, not in the order of the training that just ended
        return self.run.representations.observe(whole, taps, data, client, self.server.round + 1, examples, domain)

    def recalibrated(
        self, state: State | None = None, clients: Sequence[int] | None = None, once: bool = False
    ) -> State:
        some = range(self.data.num_clients) if clients is None else clients
        return self.run.recalibration.statistics(self._whole(state), some, self.server.round, once)

    def fine_tune(self, client: int, state: State | None, steps: int) -> State:
        self._check(client, state)
        require(steps >= 0, "trainer.fine_tune: steps", steps, "use 0 or more")
        owner = self.client.memories().owners.get(client, self.global_rank) if self.client.kept else self.global_rank
        hint = f"worker {owner} owns its local entries; fine-tune the clients in trainer.client.memories()"
        require(owner == self.global_rank, "trainer.fine_tune: client", client, hint)
        whole = {
            **self.methods.evaluated_state(self.server),
            **self.client.memories().own_entries(client),
            **(state or {}),
        }
        return self.run.local_training.fine_tune(client, self.server.round, whole, steps)

    def training_logits(self, client: int, logits: Tensor) -> Tensor:
        self._check(client)
        some = MethodList(self.methods.having("transform_logits"))
        if not some.methods:
            return logits
        state = self.methods.evaluated_state(self.server)
        return self.run.local_training.transformed(client, self.server.round, state, some, logits)

    def rehearse(self, client: int, methods: Sequence[str] | None = None) -> int:
        self._check(client)
        some = MethodList([one for one in self.methods.methods if methods is None or one.name in methods])
        return self.run.local_training.rehearse(client, self.server.round, self.server.state, some)

    def _whole(
        self, state: State | None, client: int | None = None, domain: str | None = None, phase: str = ""
    ) -> State:
        """Return the global model, updated by the local entries of ``client``, from its owner, and by ``state``.

        All workers call this. ``phase`` is empty for the data of a client and for training data.
        """
        self._check(client, state)
        if domain is not None:
            known = self.domains_of(phase) if phase else []
            hint = f"unknown domain; available in these data: {', '.join(known) or 'none'}"
            require(domain in known, "domain", domain, f"{hint}; pass no client")
        own: State = {}
        if client is not None and self.client.kept:
            asked = self.gather((client, self.client.memories().own_entries(client)))
            same = all(k == client for k, _ in asked)
            require(same, "client", client, "differs between workers; pass the same client on all workers")
            own = next((entries for _, entries in asked if entries), {})
        return {**self.methods.evaluated_state(self.server), **own, **(state or {})}

    def _check(self, client: int | None, state: State | None = None) -> None:
        """Refuse an unknown client, and a state of another model."""
        number, live = self.data.num_clients, self.client.live
        require(client is None or client in range(number), "client", client, f"use an id from 0 to {number - 1}")
        for name, value in (state or {}).items():
            if name not in live:
                raise UsageError(f"state={name!r}: the model has no such entry; available: {choices(live, name)}")
            shape = tuple(live[name].shape)
            require(
                tuple(value.shape) == shape, f"state: {name}", tuple(value.shape), f"pass a tensor of shape {shape}"
            )
