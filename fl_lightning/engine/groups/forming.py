"""Which clients of a cohort train side by side; it depends on the cohort alone, since the bits of a result do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

# what a program takes, in steps of one client by itself, and what each of its clients adds: round numbers near those
# measured, which docs/side_by_side.md has
PROGRAM, SHARE = 1.4, 0.055


def form_groups(
    steps: Mapping[int, int],
    least: int,
    size: int,
    kind: Callable[[int], object],
    lean: bool = False,
) -> list[list[int]]:
    """Deal a cohort out in groups of ``least`` to ``size`` clients; those of which there are fewer come one by one.

    Clients of as many steps come together, so that few of a group have to wait for the others.

    Args:
        steps: expected local steps of each client.
        least: fewest clients of a group.
        size: most clients of a group, at least 1.
        kind: only clients of which it gives the same share a group.
        lean: leave clients of far more steps than the others to themselves, where that takes less time.

    Returns:
        The clients of each group, those with the most steps first.
    """
    kinds: dict[object, list[int]] = {}
    for k in sorted(steps, key=lambda k: (-steps[k], k)):
        kinds.setdefault(kind(k), []).append(k)
    groups: list[list[int]] = []
    for clients in kinds.values():
        alone = longest_alone(clients, steps) if lean else 0
        groups += [[k] for k in clients[:alone]]
        clients = clients[alone:]
        few = len(clients) < least
        groups += [[k] for k in clients] if few else dealt_out(clients, -(-len(clients) // size))
    return groups


def dealt_out(clients: Sequence[int], number: int) -> list[list[int]]:
    """The clients in so many groups, whose sizes differ by at most one, in their order."""
    least, more = divmod(len(clients), number)
    ends = [index * least + min(index, more) for index in range(number + 1)]
    return [list(clients[begin:end]) for begin, end in pairwise(ends)]


def longest_alone(clients: Sequence[int], steps: Mapping[int, int]) -> int:
    """How many of the clients with the most steps, which come first, had better train by themselves.

    A group takes as many programs as its longest client has steps, of which the last ones would be for few clients.
    """
    rest, alone, best, number = sum(steps[k] for k in clients), 0, math.inf, 0
    for place, k in enumerate(clients):
        taken = alone + PROGRAM * steps[k] + SHARE * rest
        if taken < best:
            best, number = taken, place
        alone, rest = alone + steps[k], rest - steps[k]
    return number


def cost(group: Sequence[int], steps: Mapping[int, int]) -> float:
    """What training a group takes, in steps of one client."""
    most, total = steps[group[0]], sum(steps[k] for k in group)
    return total if len(group) == 1 else PROGRAM * most + SHARE * total
