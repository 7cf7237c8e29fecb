r"""Exact sums of float64 vectors, which have the same bits in any order and over any split.

A number is split at fixed positions into pieces of at most 40 bits, each a multiple of :math:`2^{e - 52}`. The pieces
at one position are added in a separate float64, the *bin* of exponent e. 14 bits of a bin remain free, so thousands of
additions are exact. Each number is rounded to a multiple of :math:`2^{-97}` before it is added.

Splitting a number by adding and subtracting a large constant is the error-free extraction of Rump, Ogita and Oishi
(Accurate Floating-Point Summation, Part I, SIAM J. Sci. Comput. 31(1), 2008, Algorithm 3.2,
https://doi.org/10.1137/050645671), after Ogita, Rump and Oishi (Accurate Sum and Dot Product, SIAM J. Sci. Comput.
26(6), 2005, https://doi.org/10.1137/030601818). Bins at fixed exponents, which make the result independent of the
order of the additions, are due to Demmel and Nguyen (Parallel Reproducible Summation, IEEE Trans. Comput. 64(7),
2015, https://doi.org/10.1109/TC.2014.2345391).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from fl_lightning.core.collectives import Collectives

STEP = 40
LOWEST, USUAL, HIGHEST = -44, 36, 156
# numbers of at least this size count as infinite
LIMIT = 2.0 ** (HIGHEST - 14)
# the bin of nan and infinity, whose sum is also independent of the order
NOT_FINITE = 999
# additions after which the bins are normalised; a bin is exact for up to 4 times this number
ADDITIONS = 4096
# numbers processed at a time, so that they stay in a core's cache
CHUNK = 16384
# a GPU takes longer to start an operation than to process so many numbers
CHUNK_OF_DEVICE = 2**26


class ExactSum:
    """An exact sum of float64 vectors ``(n,)``; nan and infinity propagate as in a plain sum.

    The bins are opened from the usual exponent downwards once a number needs them. On a CPU, numbers without low bits,
    such as differences of float32 parameters, thus take two bins of three; another device would have to wait for the
    answer, and opens all of them.

    Args:
        size: n.
        device: device of the sum.
    """

    def __init__(self, size: int = 0, device: torch.device | str = "cpu") -> None:
        self.size, self.device = size, torch.device(device)
        self._bins: dict[int, Tensor] = {}
        self._additions = 0
        # a number that no magnitude in the sum exceeds
        self._bound = 0.0
        self._looks = self.device.type == "cpu"
        self._chunk = CHUNK if self._looks else CHUNK_OF_DEVICE

    @property
    def exponents(self) -> list[int]:
        """The exponents of the bins, largest first."""
        return list(self._bins)

    def add(self, values: Tensor, bound: float = math.inf) -> None:
        """Add ``values`` ``(n,)``, or each row of ``(m, n)`` with m at most :data:`ADDITIONS`; overwrites them.

        ``bound`` is a number that no magnitude exceeds. If it is small enough, the values are not searched for their
        largest, for which a GPU would have to wait.
        """
        self._open(USUAL)
        # 14 bits stay free above the largest number
        if not bound < 2.0 ** (USUAL - 14):
            values, bound = self._make_room(values)
        rows = len(values) if values.ndim > 1 else 1
        self._bound += rows * bound
        # exact additions are independent of the order, also among the rows
        self._additions += rows
        if self._additions > ADDITIONS:
            self._normalise()
            self._additions = rows
        columns = self._chunk // rows + 1
        for start in range(0, self.size, columns):
            self._add_chunk(values[..., start : start + columns], start)

    def value(self, free: bool = False) -> Tensor:
        """Return the sum ``(n,)``; where ``free`` is set, the memory of the bins is freed on the way."""
        self._normalise()
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for exponent in sorted(self._bins):
            total.add_(self._bins.pop(exponent) if free else self._bins[exponent])
        return total

    def spread(self, places: Tensor, size: int) -> None:
        """Resize the sum to ``size`` numbers: number i moves to ``places[i]``, and new numbers are 0."""
        narrow, self.size, self._bins = self._bins, size, {}
        for exponent, values in narrow.items():
            self._open(exponent)[places] = values

    def all_reduce(self, workers: Collectives, exponents: Iterable[int]) -> None:
        """Add up the sums of all workers, in one collective a bin.

        Args:
            workers: the workers; all of them must call this.
            exponents: the exponents of all workers' bins.
        """
        self._normalise()
        for exponent in sorted(exponents, reverse=True):
            total = self._open(exponent).cpu()
            workers.all_reduce(total)
            self._open(exponent).copy_(total)
        self._bound = math.inf
        self._normalise()

    def _normalise(self) -> None:
        """Carry from each bin to the next larger one, so that equal sums have equal bins.

        Each bin then holds at most half a unit of the next. A larger bin is opened where the largest is nearly full.
        """
        order = sorted(self._bins.keys() - {NOT_FINITE})
        for low, high in pairwise(order):
            # adding and subtracting a large number leaves the multiples of the unit of the larger bin
            large, unit = 1.5 * 2.0**high, 2.0 ** (high - 52)
            for small, total in zip(
                self._bins[low].split(self._chunk), self._bins[high].split(self._chunk), strict=True
            ):
                multiples = (small + large).sub_(large)
                # half a unit can be rounded either way: keep the positive half
                multiples.sub_((small - multiples).eq_(-unit / 2), alpha=unit)
                small.sub_(multiples)
                total.add_(multiples)
        self._additions = 0
        if not order or self._bound < 2.0 ** (order[-1] - 14):
            return
        if _largest_magnitude(self._bins[order[-1]]) >= 2.0 ** (order[-1] - 13):
            self._open(order[-1] + STEP)
            self._normalise()

    def _open(self, exponent: int) -> Tensor:
        """Return the bin of ``exponent``, with zeros if it is new."""
        if exponent not in self._bins:
            self._bins[exponent] = torch.zeros(self.size, dtype=torch.float64, device=self.device)
            self._bins = dict(sorted(self._bins.items(), reverse=True))
        return self._bins[exponent]

    def _make_room(self, values: Tensor) -> tuple[Tensor, float]:
        """Open the bins that the largest number needs, and add nan and infinity to a separate bin.

        Returns:
            The finite values, and their largest magnitude.
        """
        largest = _largest_magnitude(values)
        # nan fails this comparison as well
        if not largest < LIMIT:
            usual = values.abs() < LIMIT
            self._open(NOT_FINITE).add_((values * math.inf).masked_fill(usual, 0.0).view(-1, self.size).sum(0))
            return self._make_room(values.masked_fill(~usual, 0.0))
        for exponent in range(USUAL, HIGHEST, STEP):
            if largest >= 2.0 ** (exponent - 14):
                self._open(exponent + STEP)
        return values, largest

    def _add_chunk(self, remainder: Tensor, start: int) -> None:
        piece = torch.empty_like(remainder)
        exponent = max(exponent for exponent in self._bins if exponent != NOT_FINITE)
        while True:
            total = self._open(exponent)[start : start + remainder.shape[-1]]
            # adding and subtracting a large number rounds to a multiple of its unit
            large = 1.5 * 2.0**exponent
            torch.add(remainder, large, out=piece)
            piece.sub_(large)
            total.add_(piece if piece.ndim == 1 else piece.sum(0))
            if exponent == LOWEST:
                return
            remainder.sub_(piece)
            exponent -= STEP
            if self._looks and exponent not in self._bins and not remainder.count_nonzero():
                return


def _largest_magnitude(values: Tensor) -> float:
    """The largest magnitude, or nan if there is one; 0 of no values."""
    if not values.numel():
        return 0.0
    smallest, largest = values.aminmax()
    return float(torch.maximum(-smallest, largest))
