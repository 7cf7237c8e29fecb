"""The progress of a visit in the fit that all visits of a client form."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class FitProgress:
    """Counts epochs and steps as if the current client trained alone and took part in every round.

    Args:
        rounds: R, rounds of the run.
        local_epochs: E, epochs of a visit.
        local_steps: optimizer steps of a visit, in place of E; epochs are then passes over the data.
        accumulate: batches of an optimizer step.
        limit: batches of a visit at most; None for no limit.
        batches: B, batches in a pass over the current client's data.
        round: r, from 0.
        epoch: current epoch of the visit, from 0.
        step: optimizer steps taken in the visit.
        work: epochs (or steps, with ``local_steps``) of an incomplete visit; None for all. Later visits start as if
            this visit were complete.
        staleness: rounds between the one whose state the client received and r.
    """

    rounds: int = 1
    local_epochs: int = 1
    local_steps: int | None = None
    accumulate: int = 1
    limit: int | None = None
    batches: int = 0
    round: int = 0
    epoch: int = 0
    step: int = 0
    work: int | None = None
    staleness: int = 0

    @property
    def passes(self) -> list[int]:
        """Number of batches of each epoch of a complete visit; the last epoch may be shorter."""
        return self._passes(self.local_epochs, self.local_steps)

    @property
    def passes_now(self) -> list[int]:
        """Number of batches of each epoch of the current visit, which may do less :attr:`work`."""
        if self.work is None:
            return self.passes
        return self._passes(self.work, None) if self.local_steps is None else self._passes(0, self.work)

    def steps_in(self, length: int) -> set[int]:
        """Indices of the batches of an epoch of ``length`` batches after which the optimizer steps."""
        return {*range(self.accumulate - 1, length, self.accumulate), length - 1}

    @property
    def steps_of_visit(self) -> int:
        """Optimizer steps of a visit."""
        return sum(map(self._steps_of, self.passes))

    @property
    def steps_now(self) -> int:
        """Optimizer steps of the current visit."""
        return sum(map(self._steps_of, self.passes_now))

    @property
    def current_epoch(self) -> int:
        """Epochs before this one: r * E and the epochs of this visit."""
        return self.round * (self.local_epochs if self.local_steps is None else len(self.passes)) + self.epoch

    def at(self, round_: int, batches: int | None = None, work: int | None = None) -> FitProgress:
        """Return the progress at the start of a client's visit in this round; None keeps the present value."""
        batches = self.batches if batches is None else batches
        return replace(self, round=round_, batches=batches, epoch=0, step=0, work=work)

    def at_end_of_round(self) -> FitProgress:
        """Return the progress in the last epoch of the round, for an evaluation."""
        epochs = self.local_epochs if self.local_steps is None else max(len(self.passes), 1)
        return replace(self, epoch=epochs - 1, step=0)

    @property
    def global_step(self) -> int:
        """Optimizer steps done so far."""
        return self.round * self.steps_of_visit + self.step

    @property
    def max_epochs(self) -> int:
        """R * E; -1 where visits are counted in steps."""
        return self.rounds * self.local_epochs if self.local_steps is None else -1

    @property
    def max_steps(self) -> int:
        """R times the local steps; -1 where visits are counted in epochs."""
        return -1 if self.local_steps is None else self.rounds * self.local_steps

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole fit."""
        return self.rounds * self.steps_of_visit

    def _steps_of(self, batches: int) -> int:
        return -(-batches // self.accumulate)

    def _passes(self, epochs: int, steps: int | None) -> list[int]:
        if self.batches == 0:
            return []
        total = self.batches * epochs
        if steps is not None:
            full, remainder = divmod(steps, self._steps_of(self.batches))
            total = full * self.batches + remainder * self.accumulate
        total = total if self.limit is None else min(total, self.limit)
        full, remainder = divmod(total, self.batches)
        passes = [self.batches] * full
        return [*passes, remainder] if remainder else passes
