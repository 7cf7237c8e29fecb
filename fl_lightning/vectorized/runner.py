"""Clients in groups: each step of a group is one program over stacked tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from fl_lightning.core.state import State
from fl_lightning.core.update import UpdateRows, VisitFacts
from fl_lightning.engine.run import Part, Run, VisitResult, VisitRunner, Work, update_or_failure
from fl_lightning.utilities.errors import ClientError, LostWorkerError, UsageError, with_location
from fl_lightning.vectorized.group import Group, GroupMember
from fl_lightning.vectorized.group_size import GroupSize, choice_for, group_bounds
from fl_lightning.vectorized.grouping import cost, form_groups
from fl_lightning.vectorized.op_trace import Recordings
from fl_lightning.vectorized.personalized_evaluation import groups_of_own_models, metrics_of_group


class VectorizedRunner(VisitRunner):
    """Trains clients side by side in groups; a part is a group, and a group of one trains sequentially.

    Attributes:
        choice: the size of groups, with its reason; None before the run is prepared.
    """

    def __init__(self) -> None:
        super().__init__("no round has begun")
        self.choice: GroupSize | None = None
        self._before: dict[int, dict] = {}
        self._recordings = Recordings()

    def prepare(self, run: Run) -> None:
        self.choice = choice_for(run)
        self.reason = self.choice.reason

    @property
    def chosen(self) -> GroupSize:
        """The size of groups of a run that is prepared."""
        return self.choice or GroupSize(1, self.reason)

    def settings(self) -> dict[str, Any]:
        # auto forms other groups of the same size
        return {"clients_per_step": self.chosen.size, "clients_per_step=auto": self.chosen.least > 2}

    def divide(self, run: Run, steps: Mapping[int, int]) -> dict[Part, float]:
        choice, training = self.chosen, run.local_training
        _, schedulers = training.optimizers.first
        has_own_rates = schedulers or training.optimizers.depends_on_batches

        def kind(k: int) -> tuple[int, int]:
            # clients that share a group have received the same version, and have the same schedule of rates
            return run.versions.received_by(k), training.num_batches(k) if has_own_rates else 0

        groups = form_groups(steps, choice.least, choice.size, kind, choice.least > 2)
        return {tuple(group): cost(group, steps) for group in groups}

    def run(self, run: Run, part: Part, round_: int, work: Work, observed: bool) -> Iterator[VisitResult]:
        """Train a group; the failure of a client does not touch the others."""
        if len(part) == 1:
            yield from super().run(run, part, round_, work, observed)
            return
        memories = run.client.memories()
        # a visit can be repeated in its group alone, so its record holds the memories of all
        self._before = {k: memories.get(k, {}) for k in part}
        why = ""
        with ExitStack() as stack:
            received = stack.enter_context(run.versions.receiving(part[0]))
            group = self.group(run, part, round_, received, work)
            stack.callback(self._before.clear)
            for k in part:
                stack.callback(memories.drop, k)
            try:
                stack.enter_context(group.training_all())
            except LostWorkerError:
                raise
            except (ClientError, UsageError) as error:
                why = with_location(error.__cause__ or error)  # each reason is shown once
            if why:  # training in turn shows which client failed, if one did, once the group's memory is free
                del group
                for k in part:
                    memories.drop(k)
                run.trainer.warn(f"clients that cannot train side by side are trained sequentially: {why}")
                self._before.clear()
                yield from super().run(run, part, round_, work, observed)
                return
            added_rows = set[int]()
            if group.sends_states_alone() and not observed:
                rows, updates, extremes = group.updates()
                numbers = [values[rows].tolist() for values in (group.num_steps, group.lr, group.num_skipped)]
                facts = [VisitFacts(*of_visit) for of_visit in zip(*numbers, strict=True)]
                yield UpdateRows([part[row] for row in rows], updates, extremes, facts)
                added_rows = {*rows}
            for row, k in enumerate(part):
                if row not in added_rows:
                    yield k, update_or_failure(partial(group.update, row))

    def group(self, run: Run, part: Part, round_: int, received: State, work: Work) -> Group:
        """The visits of the clients of a part."""
        members = [GroupMember(k, work[k]) for k in part]
        return Group(run.local_training, members, round_, received, self._recordings)

    def beside(self, k: int) -> dict[int, dict]:
        return self._before if k in self._before else {}

    def repeat(self, run: Run, k: int, round_: int, steps: Mapping[int, int], work: Work) -> None:
        """Repeat a visit; clients of a group affect each other's rounding, so it is repeated whole if possible."""
        part = next((part for part in self.divide(run, steps) if k in part), (k,))
        if len(part) == 1 or not self._repeated(run, part, k, round_, work):
            super().repeat(run, k, round_, steps, work)

    def _repeated(self, run: Run, part: Part, k: int, round_: int, work: Work) -> bool:
        """Repeat the visit of a client in its group; return whether the group can train side by side."""
        with ExitStack() as stack:
            received = stack.enter_context(run.versions.receiving(k))
            group = self.group(run, part, round_, received, work)
            try:
                stack.enter_context(group.training_all())
            except ClientError:
                for member in part:
                    run.client.memories().drop(member)
                return False
            group.update(part.index(k))
        return True

    def place_models(self, run: Run) -> list[list[int]]:
        return groups_of_own_models(run, self.choice or group_bounds(run))

    def evaluate_models(
        self, run: Run, phase: str, state: State, parts: Sequence[Sequence[int]], observed: bool = True
    ) -> Iterator[dict[str, float]]:
        """The metrics of each client's model; a group that cannot be mapped is evaluated sequentially."""
        for part in parts:
            metrics = metrics_of_group(run, phase, state, part) if len(part) > 1 else None
            yield from metrics or super().evaluate_models(run, phase, state, [part], observed)
