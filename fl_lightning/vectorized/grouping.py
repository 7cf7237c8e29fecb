"""Which clients of a cohort train side by side; it depends on the cohort alone, since the bits of a result do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

# cost of a program, and of each of its clients, in steps of one client alone: round numbers close to the ones
# measured, which docs/side_by_side.md has
PROGRAM, SHARE = 1.4, 0.055


def form_groups(
    steps: Mapping[int, int],
    least: int,
    size: int,
    kind: Callable[[int], object],
    lean: bool = False,
) -> list[list[int]]:
    """Divide a cohort into groups of ``least`` to ``size`` clients; clients without a group train alone.

    Clients with similar numbers of steps share a group, so that few of them wait for others.

    Args:
        steps: expected local steps of each client.
        least: fewest clients of a group.
        size: most clients of a group, at least 1.
        kind: only clients with the same value share a group.
        lean: train clients with far more steps alone, if that takes less time.

    Returns:
        The clients of each group, clients with most steps first.
    """
    kinds: dict[object, list[int]] = {}
    for k in sorted(steps, key=lambda k: (-steps[k], k)):
        kinds.setdefault(kind(k), []).append(k)
    groups: list[list[int]] = []
    for clients in kinds.values():
        num_alone = longest_alone(clients, steps) if lean else 0
        groups += [[k] for k in clients[:num_alone]]
        clients = clients[num_alone:]
        few = len(clients) < least
        groups += [[k] for k in clients] if few else dealt_out(clients, -(-len(clients) // size))
    return groups


def dealt_out(clients: Sequence[int], number: int) -> list[list[int]]:
    """Return the clients in ``number`` groups whose sizes differ by at most one, in order."""
    least, extra = divmod(len(clients), number)
    ends = [index * least + min(index, extra) for index in range(number + 1)]
    return [list(clients[start:end]) for start, end in pairwise(ends)]


def longest_alone(clients: Sequence[int], steps: Mapping[int, int]) -> int:
    """Return the number of clients with most steps, which come first, that should train alone.

    A group runs one program for each step of its longest client, and the last ones serve few clients.
    """
    shared_steps, steps_alone, best, number = sum(steps[k] for k in clients), 0, math.inf, 0
    for place, k in enumerate(clients):
        duration = steps_alone + PROGRAM * steps[k] + SHARE * shared_steps
        if duration < best:
            best, number = duration, place
        steps_alone, shared_steps = steps_alone + steps[k], shared_steps - steps[k]
    return number


def cost(group: Sequence[int], steps: Mapping[int, int]) -> float:
    """Return the cost of training a group, in steps of one client."""
    longest, total = steps[group[0]], sum(steps[k] for k in group)
    return total if len(group) == 1 else PROGRAM * longest + SHARE * total
