"""Virtual time: how long the visits of clients take.

Durations are a pure function of the seed and the arguments, in whole microseconds, so that any number of workers and a
resumed run have the same ones.
"""

from __future__ import annotations

import math

from fl_lightning.core.seeding import numpy_rng
from fl_lightning.utilities.errors import require

MICROSECONDS = 1_000_000


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
