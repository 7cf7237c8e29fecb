"""The clients that are placed on a worker train one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fl_lightning.aggregation import Update
from fl_lightning.engine.run import Run, VisitResult, Work
from fl_lightning.errors import ClientError, LostWorkerError, UsageError
from fl_lightning.state import State
from fl_lightning.training.patching import patched


class SequentialRunner:
    """Trains clients, and evaluates their own models, one after another: each client is a part of a cohort."""

    def prepare(self, run: Run) -> None:
        pass

    def settings(self) -> dict[str, Any]:
        return {"clients_per_step": 1, "clients_per_step=auto": False}

    def reason(self) -> str:
        return "trainer.clients_per_step is 1"

    def divide(self, run: Run, steps: Mapping[int, int]) -> list[list[int]]:
        return [[k] for k in steps]

    def cost(self, part: Sequence[int], steps: Mapping[int, int]) -> float:
        return sum(steps[k] for k in part)

    def run(self, run: Run, part: Sequence[int], round_: int, work: Work, observed: bool) -> Iterator[VisitResult]:
        for k in part:
            try:
                yield k, self.trained(run, k, round_, work)
            finally:
                run.client.memories().drop(k)

    def trained(self, run: Run, k: int, round_: int, work: Work) -> Update | Exception:
        """The update of client ``k``, which trains alone, or its failure."""
        try:
            return run.local_training.visit(k, round_, run.server.state, work[k])
        except LostWorkerError:
            raise
        except (ClientError, UsageError) as error:
            return error

    def beside(self, k: int) -> dict[int, dict]:
        return {}

    def repeat(self, run: Run, k: int, round_: int, steps: Mapping[int, int], work: Work) -> None:
        step = run.client.training_step

        def checked(*args: Any) -> Tensor | None:
            # a run checks at the end of the visit instead, since each check waits for the device
            loss = step(*args)
            run.client.lifecycle.check_terms()
            return loss

        with patched(run.client, training_step=checked):
            run.local_training.visit(k, round_, run.server.state, work[k])

    def example(self, clients: Sequence[int], cohort: int) -> list[int]:
        return [clients[len(clients) // 2]]

    def place_models(self, run: Run) -> list[list[int]]:
        return [[k] for k in run.client.memories()]

    def evaluate_models(
        self, run: Run, phase: str, state: State, parts: Sequence[Sequence[int]], observed: bool = True
    ) -> Iterator[dict[str, float]]:
        for part in parts:  # those on disk need not fit into memory together
            for k in part:
                entries = run.client.lifecycle.personal_entries(run.data.info(k), state)
                yield run.evaluator.evaluate_local_model(phase, state, k, entries, observed)
