"""Virtual time: how long the visits of clients take, and which of them each step of an asynchronous server uses.

Both are a pure function of the seed and the arguments, in whole microseconds, so that any number of workers and a
resumed run have the same ones.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from fl_lightning.core.sampling import Sampler
from fl_lightning.core.seeding import numpy_rng
from fl_lightning.core.systems import SystemOutcome
from fl_lightning.utilities.errors import require

MICROSECONDS = 1_000_000
# visits that an asynchronous server loses one after another, at most
MOST_LOST = 10_000


def in_microseconds(seconds: float | None) -> float:
    """Return seconds in whole microseconds, as durations have them; None, for no limit, is infinity."""
    return math.inf if seconds is None else round(MICROSECONDS * seconds, 0)


class Clock:
    r"""Simulated seconds of a client's visit.

    The v-th visit of client k takes

    .. math:: T = s \, t_\text{step} \, F_k \, J_{kv} + \text{latency} + \text{bytes} / \text{bandwidth}

    with s local steps, :math:`F_k = \exp(\text{spread} \cdot z_k)`,
    :math:`J_{kv} = \exp(\text{jitter} \cdot z_{kv})` and standard normal z. It is rounded to microseconds, and at least
    one. In a synchronous run v is the round, which takes as long as the slowest client of its cohort: the tag
    ``clock/seconds`` has the time since the start of the run.

    Args:
        step_seconds: seconds of a local step of a client of speed 1, at least 0.
        spread: standard deviation of the logarithm of the clients' seconds a step, at least 0; 0 makes them equal.
        speed: factor on the seconds of a step by client, above 0, in place of the drawn one; 2 is half as fast.
        jitter: the same as ``spread`` from visit to visit; 0 for none.
        latency: seconds that are added to each visit, at least 0.
        bandwidth: bytes a second of a client, down and up, above 0; infinity makes communication free.
        deadline: seconds after which a synchronous round ends; later clients are lost. None waits for all.

    Raises:
        UsageError: an argument is out of its range.
    """

    def __init__(
        self,
        step_seconds: float = 1.0,
        spread: float = 0.0,
        speed: dict[int, float] | None = None,
        jitter: float = 0.0,
        latency: float = 0.0,
        bandwidth: float = math.inf,
        deadline: float | None = None,
    ) -> None:
        numbers = {"step_seconds": step_seconds, "spread": spread, "jitter": jitter, "latency": latency}
        for name, value in numbers.items():
            require(0 <= value < math.inf, f"trainer.clock.{name}", value, "use a finite number from 0")
        require(bandwidth > 0, "trainer.clock.bandwidth", bandwidth, "use a number above 0, or .inf")
        above = deadline is None or deadline > 0
        require(above, "trainer.clock.deadline", deadline, "use seconds above 0, or null to wait for all clients")
        self.speed = {int(k): float(factor) for k, factor in (speed or {}).items()}
        for k, factor in self.speed.items():
            require(0 < factor < math.inf, f"trainer.clock.speed.{k}", factor, "use a finite factor above 0")
        self.step_seconds, self.spread, self.jitter, self.latency = step_seconds, spread, jitter, latency
        self.bandwidth, self.deadline = bandwidth, deadline

    def check(self, num_clients: int) -> None:
        """Refuse factors of unknown clients.

        Raises:
            UsageError: ``speed`` names a client that does not exist.
        """
        unknown = [k for k in self.speed if not 0 <= k < num_clients]
        require(not unknown, "trainer.clock.speed", unknown, f"clients are 0 to {num_clients - 1}")

    def duration(self, seed: int, client: int, visit: int, steps: int, num_bytes: int) -> int:
        """Return the microseconds of a visit.

        Args:
            seed: base seed of the run.
            client: id of the client.
            visit: number of the visit of this client, from 0.
            steps: number of its local steps.
            num_bytes: bytes that it receives and sends.
        """
        factor = self.speed.get(client)
        if factor is None:
            factor = math.exp(self.spread * numpy_rng(seed, "speed", client).standard_normal())
        varied = math.exp(self.jitter * numpy_rng(seed, "jitter", client, visit).standard_normal())
        seconds = steps * self.step_seconds * factor * varied + self.latency + num_bytes / self.bandwidth
        return max(1, round(MICROSECONDS * seconds))


@dataclass(frozen=True)
class ScheduledVisit:
    """A visit that a server step uses.

    Args:
        client: id of the client.
        version: number of server steps before its start: it trains from the state of this version.
        started: time of its start in microseconds.
        ended: time of its arrival in microseconds.
        work: local epochs, or steps with ``local_steps``, that it trains; None for all.
    """

    client: int
    version: int
    started: int
    ended: int
    work: int | None = None


@dataclass(frozen=True)
class ServerStep:
    """A step of an asynchronous server.

    Args:
        time: its time in microseconds.
        visits: the visits that it uses, in the order of their arrival.
        in_flight: versions of the visits that are in training at the time of the step.
        num_lost: number of visits since the last step that are lost, or too stale.
    """

    time: int
    visits: tuple[ScheduledVisit, ...]
    in_flight: tuple[int, ...] = ()
    num_lost: int = 0


# Returns the microseconds of a visit and its outcome, from client, visit of this client and number of the start.
PlanVisit = Callable[[int, int, int], tuple[int, SystemOutcome]]


class Buffered:
    """An asynchronous server that steps after every ``size`` updates (Nguyen et al., AISTATS 2022).

    ``concurrency`` clients train at a time. A client is busy while it trains, and while its update waits in the buffer.
    When the buffer is full, the server steps at once, and the clients of the buffer are free again. All updates that
    arrive in the same microsecond do so before new visits start, in the order of their starts.

    Args:
        concurrency: C, number of clients that train at a time, at least 1.
        size: K, number of updates of a server step, at least 1; 1 steps after each update.
        max_staleness: number of server steps during a visit up to which its update is used, at least 0; None uses all.

    Raises:
        UsageError: an argument is out of its range.
    """

    def __init__(self, concurrency: int, size: int = 1, max_staleness: int | None = None) -> None:
        require(concurrency >= 1, "trainer.asynchronous.concurrency", concurrency, "use 1 or more")
        require(size >= 1, "trainer.asynchronous.size", size, "use 1 or more")
        valid = max_staleness is None or max_staleness >= 0
        require(valid, "trainer.asynchronous.max_staleness", max_staleness, "use 0 or more, or null")
        self.concurrency, self.size, self.max_staleness = concurrency, size, max_staleness

    def schedule(
        self, seed: int, sampler: Sampler, plan_visit: PlanVisit, present: Callable[[int], Collection[int]]
    ) -> Iterator[ServerStep]:
        """Yield the server steps; a longer schedule begins with the shorter one.

        Args:
            seed: base seed of the run.
            sampler: draws the client of each start among the idle ones; its round is the number of the start.
            plan_visit: microseconds of a visit and its outcome, by client, its visit and the start.
            present: available clients at a version.

        Raises:
            UsageError: too few clients are available, or all visits are lost.
        """
        busy, counts = set[int](), Counter[int]()
        training: list[tuple[int, int, ScheduledVisit, bool]] = []
        buffer: list[ScheduledVisit] = []
        time = start = num_lost = version = 0
        while True:
            startable = sorted({*present(version)} - busy)
            while startable and len(training) < self.concurrency:
                places = sampler(seed, start, len(startable), 1)
                hint = "an asynchronous server starts one client at a time; give one id"
                require(len(places) == 1, "trainer.sampler", places, hint)
                client = startable.pop(places[0])
                duration, outcome = plan_visit(client, counts[client], start)
                visit = ScheduledVisit(client, version, time, time + duration, outcome.work)
                heapq.heappush(training, (visit.ended, start, visit, outcome.lost is not None))
                busy.add(client)
                counts[client] += 1
                start += 1
            hint = f"after {version} server steps no further client is available; use fewer, or other windows"
            require(bool(training), "trainer.asynchronous.size", self.size, hint)
            hint = f"so many visits are lost in a row after {version} server steps; let more of them arrive"
            require(num_lost <= MOST_LOST, "trainer.asynchronous", num_lost, hint)
            time = training[0][0]
            while training and training[0][0] == time:
                _, _, visit, is_lost = heapq.heappop(training)
                if is_lost or (self.max_staleness is not None and version - visit.version > self.max_staleness):
                    busy.remove(visit.client)
                    num_lost += 1
                    continue
                buffer.append(visit)
                if len(buffer) == self.size:
                    in_flight = tuple(visit.version for _, _, visit, _ in training)
                    yield ServerStep(time, tuple(buffer), in_flight, num_lost)
                    busy -= {visit.client for visit in buffer}
                    buffer, num_lost, version = [], 0, version + 1
