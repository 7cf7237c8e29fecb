"""Handles the signals that stop a fit: SIGINT, SIGTERM, and SIGUSR1, which SLURM sends before the end of a job."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from fl_lightning.utilities.errors import Interrupted, Stopped, Terminated

# Windows lacks SIGUSR1
HANDLED = tuple(number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGUSR1"))
# seconds within which a repeated signal counts once: a terminal and a launcher may both deliver it
ONCE = 1.0


class Signals:
    """Records a signal that stops a fit; the rounds check for it between batches and at their end.

    The current round is abandoned if all earlier rounds are saved; otherwise it is finished first. A second signal
    ends the run at once. The user's handlers are called as well.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.speaks = speaks  # announces that the end may take a while
        self.caught: signal.Signals | None = None  # by this worker, or by another known one
        self.agreed = False  # all workers know that the run stops after this round
        self.keeps_round = True  # the round is nearly done, or earlier rounds are not saved
        self.round = 0
        self.checkpoint: Path | None = None  # the run's last one
        self._time, self._process = 0.0, os.getpid()
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers; has no effect outside the main thread, which alone can have handlers."""
        self.caught, self.agreed, self._process = None, False, os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in HANDLED:
            before = signal.getsignal(number)
            # an ignored signal stays ignored (nohup); None is a handler from outside Python; the user's handler of
            # SIGUSR1 has another purpose
            is_users = number not in (signal.SIGINT, signal.SIGTERM) and before is not signal.SIG_DFL
            if before not in (signal.SIG_IGN, None) and not is_users:
                self._before[number] = before
                signal.signal(number, self._catch)

    def restore(self) -> None:
        """Restore the previous handlers, except where the user has replaced ours."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._catch:
                signal.signal(number, before)
        self._before = {}

    def begin(self, round_: int, saved: int) -> None:
        """Begin a round; ``saved`` rounds are in the last checkpoint."""
        self.round, self.keeps_round = round_, saved < round_

    def agree(self, caught: Iterable[signal.Signals | None]) -> None:
        """Record the signals of all workers."""
        number = next(filter(None, caught), None)
        if number is not None:
            self.caught, self.agreed = number, True

    def end(self) -> None:
        """End the run if a signal has arrived, after all rounds."""
        if self.caught is not None:
            raise self.stopped()

    def stopped(self) -> Stopped:
        """Return the exception that ends the run."""
        caught = self.caught or signal.SIGINT
        text = "before its first checkpoint"
        if self.checkpoint is not None:
            text = f"its last checkpoint is {self.checkpoint}"
        kind = Interrupted if caught == signal.SIGINT else Terminated
        return kind(f"{caught.name} stopped the run in round {self.round}, {text}", caught, self.checkpoint)

    def adopt(self, status: int | None) -> None:
        """Stop the run if the exit ``status`` of another worker shows that a signal stopped it."""
        if status is not None and status - 128 in HANDLED:
            self.caught = self.caught or signal.Signals(status - 128)
            raise self.stopped()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # user code or a loader has forked this process: SIGTERM ends it; its parent handles other signals
            if number == signal.SIGTERM:
                signal.signal(number, self._before[number])
                os.kill(os.getpid(), number)
            return
        now, before = time.monotonic(), self._before.get(number)
        again = self.caught is not None and now > self._time + ONCE
        if self.caught is None:
            self.caught, self._time = signal.Signals(number), now
            if self.speaks and self.keeps_round:
                text = f"{self.caught.name}: the run stops after round {self.round}; a second signal ends it at once\n"
                os.write(2, text.encode())  # the signal may have interrupted a print
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if again:
            self.restore()
            raise self.stopped()
