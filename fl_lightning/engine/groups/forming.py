"""Which clients of a cohort train side by side; it depends on the cohort alone, since the bits of a result do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

# what a program takes, in steps of one client by itself, without and with compile, and what each of its clients adds:
# round numbers near those measured, which docs/side_by_side.md has
PROGRAM, COMPILED, SHARE = 1.4, 1.1, 0.055
# a group is cut in two where the longer one takes at most this share of its time, and both together at most that
LONGER, BOTH = 0.75, 4 / 3


def form_groups(
    steps: Mapping[int, int],
    least: int,
    size: int,
    kind: Callable[[int], object],
    lean: bool = False,
    compiled: bool = False,
) -> list[list[int]]:
    """Deal a cohort out in groups of ``least`` to ``size`` clients; those of which there are fewer come one by one.

    Clients of as many steps come together, so that few of a group have to wait for the others.

    Args:
        steps: expected local steps of each client.
        least: fewest clients of a group.
        size: most clients of a group, at least 1.
        kind: only clients of which it gives the same share a group.
        lean: leave clients of far more steps than the others to themselves, where that takes less time.
        compiled: programs are compiled; with ``lean``, a group that is the only one is then cut in two, where two
            workers gain much and one loses little. Other programs take longer, so that one worker would lose more.

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
    return halves(groups[0], steps, least) if lean and compiled and len(groups) == 1 else groups


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


def halves(group: list[int], steps: Mapping[int, int], least: int) -> list[list[int]]:
    """A group of compiled programs in two of about equal cost, where that pays; else as it is."""
    whole, sums = cost(group, steps, COMPILED), [0, *accumulate(steps[k] for k in group)]
    best, number = LONGER * whole, len(group)
    for place in range(least, len(group) - least + 1):
        first = COMPILED * steps[group[0]] + SHARE * sums[place]
        second = COMPILED * steps[group[place]] + SHARE * (sums[-1] - sums[place])
        if max(first, second) <= best and first + second <= BOTH * whole:
            best, number = max(first, second), place
    return [group[:number], group[number:]] if number < len(group) else [group]


def cost(group: Sequence[int], steps: Mapping[int, int], program: float = PROGRAM) -> float:
    """What training a group takes, in steps of one client."""
    most, total = steps[group[0]], sum(steps[k] for k in group)
    return total if len(group) == 1 else program * most + SHARE * total
