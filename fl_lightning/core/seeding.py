"""Derived randomness: every draw comes from a stream identified by (base seed, purpose, round, client).

No draw depends on earlier draws, so resuming, the number of workers and the list of methods cannot change a partition,
a cohort, an order of batches or an initial weight.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from fl_lightning.utilities.errors import require


def base_seed() -> int:
    """Return the seed of ``seed_everything`` (the top-level key of a config), or 0."""
    seed = os.environ.get("PL_GLOBAL_SEED", "0")
    require(seed.isdecimal(), "PL_GLOBAL_SEED", seed, "use a whole number from 0, or unset the variable")
    return int(seed)


def derive_seed(seed: int, purpose: str, *where: int) -> int:
    """A 63-bit seed for the stream at this address: equal addresses give equal seeds on every machine."""
    text = "/".join([str(seed), purpose, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_rng(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """NumPy's generator for the stream at this address."""
    return np.random.default_rng(derive_seed(seed, purpose, *where))


def torch_rng(seed: int, purpose: str, *where: int) -> torch.Generator:
    """Torch's CPU generator for the stream at this address."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *where))


def torch_generators() -> list[torch.Generator]:
    """Torch's global generators, of the CPU and of the GPU that this process uses."""
    # torch.manual_seed would queue a call for every kind of device that is not in use, with its traceback
    on_gpu = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []
    return [torch.default_generator, *on_gpu]


@contextmanager
def rng_scope(seed: int, purpose: str, *where: int) -> Iterator[None]:
    """Seed the global generators for code that can draw from nothing else (dropout, a user's transform).

    They are set to the address on entry and put back on exit: Python's, NumPy's and torch's, on CPU and GPU. Of these,
    NumPy's loses the second of a pair of normal numbers, if the first was drawn before.
    """
    python_state = random.getstate()
    drawn = derive_seed(seed, purpose, *where)
    generators = torch_generators()
    states = [generator.get_state() for generator in generators]
    with numpy_seeded(drawn % 2**32):
        random.seed(drawn)
        for generator in generators:
            generator.manual_seed(drawn)
        try:
            yield
        finally:
            random.setstate(python_state)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def generator_states() -> tuple[Any, Any, list[torch.Tensor]]:
    """The states of the global generators of Python, NumPy and torch, for :func:`replayed`."""
    torch_states = [generator.get_state() for generator in torch_generators()]
    return random.getstate(), np.random.get_state(), torch_states  # noqa: NPY002


def set_generators(states: tuple[Any, Any, list[torch.Tensor]]) -> None:
    """Put the global generators into these states."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    for generator, state in zip(torch_generators(), states[2], strict=True):
        generator.set_state(state)


@contextmanager
def replayed(states: tuple[Any, Any, list[torch.Tensor]]) -> Iterator[None]:
    """In this block the global generators repeat their draws from these states; after it, they continue."""
    now = generator_states()
    set_generators(states)
    try:
        yield
    finally:
        set_generators(now)


# generators that take the place of NumPy's global one, by the number of blocks within each other
_numpy_streams: list[np.random.MT19937] = []
_level = 0


@contextmanager
def numpy_seeded(seed: int) -> Iterator[None]:
    """In this block NumPy's global functions draw from a stream of this seed, as after ``numpy.random.seed``.

    Another generator takes the place of the global one, whose state need not be read and written back.
    """
    global _level
    if len(_numpy_streams) == _level:
        _numpy_streams.append(np.random.MT19937())
    before = mtrand.get_bit_generator()
    mtrand.set_bit_generator(_numpy_streams[_level])
    np.random.seed(seed)  # noqa: NPY002 - other people's code draws from the legacy functions
    _level += 1
    try:
        yield
    finally:
        _level -= 1
        mtrand.set_bit_generator(before)
