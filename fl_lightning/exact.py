r"""Sums of float64 vectors that are exact, so that they are the same bits in any order and over any split.

A number is cut at fixed places into pieces of at most 40 bits, each a multiple of :math:`2^{e - 52}`, and the pieces of
one place are added in a float64 of their own, a *bin* of exponent e. 14 bits stay free in a bin, so thousands of
additions are exact. What lies below :math:`2^{-97}` is rounded off each number on its own.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

STEP = 40
LOWEST, USUAL, HIGHEST = -44, 36, 156
# what is not below this counts as infinite
LIMIT = 2.0 ** (HIGHEST - 14)
# the key of the sum of what is nan or infinite, which no order changes either
NOT_FINITE = 999
# additions between two carries; a bin is exact up to 4 times as many
MANY = 4096
# numbers worked on at a time, so that they stay in a core's cache
CHUNK = 16384


class ExactSum:
    """The sum of vectors ``(n,)`` of float64.

    Args:
        size: n.
        device: where it is kept.

    Attributes:
        bins: the parts of the sum ``(n,)`` by their exponents, largest first.

    A number that is nan or infinite makes the sum so.
    """

    def __init__(self, size: int = 0, device: torch.device | str = "cpu") -> None:
        self.size, self.device = size, torch.device(device)
        self.bins: dict[int, Tensor] = {}
        self._additions = 0
        for exponent in range(LOWEST, USUAL + 1, STEP):
            self._open(exponent)

    def add(self, values: Tensor) -> None:
        """Add ``values`` ``(n,)``, which are used up."""
        values = self._make_room(values)
        for begin in range(0, self.size, CHUNK):
            self._add_chunk(values[begin : begin + CHUNK], begin)
        self._additions += 1
        if self._additions >= MANY:
            self.carry()

    def carry(self) -> None:
        """Give every bin the one value in (-half a unit, half a unit] of the next larger that it can have.

        So equal sums have equal bins, however they came about; a larger bin is opened where it is needed.
        """
        order = sorted(self.bins.keys() - {NOT_FINITE})
        for low, high in pairwise(order):
            _carry(self.bins[low], self.bins[high], high)
        self._additions = 0
        if self.size and float(self.bins[order[-1]].abs().max()) >= 2.0 ** (order[-1] - 13):
            self._open(order[-1] + STEP)
            self.carry()

    def value(self) -> Tensor:
        """The sum ``(n,)``."""
        self.carry()
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for exponent in sorted(self.bins):
            total.add_(self.bins[exponent])
        return total

    def rearranged(self, places: Tensor, size: int) -> ExactSum:
        """The sum of ``size`` numbers in which number i of this one is at ``places[i]``, and the others are 0."""
        found = ExactSum(size, self.device)
        for exponent, held in self.bins.items():
            found._open(exponent)[places] = held
        found._additions = self._additions
        return found

    def buffer(self, exponents: list[int]) -> Tensor:
        """Its bins of ``exponents`` as one matrix, for one collective: such matrices may be added."""
        self.carry()
        return torch.stack([self._open(exponent) for exponent in exponents])

    def load(self, exponents: list[int], buffer: Tensor) -> None:
        """Take over a sum of what :meth:`buffer` gave."""
        self.bins = dict(zip(exponents, buffer, strict=True))
        self.carry()

    def _open(self, exponent: int) -> Tensor:
        """The bin of ``exponent``, with zeros where it is not there yet."""
        if exponent not in self.bins:
            self.bins[exponent] = torch.zeros(self.size, dtype=torch.float64, device=self.device)
            self.bins = dict(sorted(self.bins.items(), reverse=True))
        return self.bins[exponent]

    def _make_room(self, values: Tensor) -> Tensor:
        """Open the bins that the largest number needs; nan and infinity go where they lie in no bin's way."""
        largest = max(abs(float(end)) for end in values.aminmax()) if self.size else 0.0
        # nan fails this comparison as well
        if not largest < LIMIT:
            usual = values.abs() < LIMIT
            self._open(NOT_FINITE).add_((values * math.inf).masked_fill(usual, 0.0))
            return self._make_room(values.masked_fill(~usual, 0.0))
        # 14 bits stay free above the largest number
        while largest >= 2.0 ** (self._largest() - 14):
            self._open(self._largest() + STEP)
        return values

    def _largest(self) -> int:
        return max(exponent for exponent in self.bins if exponent != NOT_FINITE)

    def _add_chunk(self, rest: Tensor, begin: int) -> None:
        piece = torch.empty_like(rest)
        for exponent, held in self.bins.items():
            if exponent == NOT_FINITE:
                continue
            # adding and subtracting a large number leaves the multiple of its unit that is nearest
            large = 1.5 * 2.0**exponent
            torch.add(rest, large, out=piece)
            piece.sub_(large)
            held[begin : begin + CHUNK].add_(piece)
            if exponent != LOWEST:
                rest.sub_(piece)


def _carry(low: Tensor, high: Tensor, exponent: int) -> None:
    """Move the multiples of the unit of ``high`` in ``low`` up, in place."""
    large, unit = 1.5 * 2.0**exponent, 2.0 ** (exponent - 52)
    multiples = (low + large).sub_(large)
    # of a half, two forms are possible: the positive one is taken
    multiples.sub_((low - multiples).eq_(-unit / 2), alpha=unit)
    low.sub_(multiples)
    high.add_(multiples)
