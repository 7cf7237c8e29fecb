"""Addressed randomness: every draw comes from a stream named by (base seed, purpose, round, client).

Nothing depends on what was drawn before, so resuming, the number of workers and the list of methods
cannot change a partition, a cohort, an order of batches or an initial weight.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fl_lightning.errors import require


def base_seed() -> int:
    """The seed given to ``seed_everything`` (the top-level key of a config), 0 when there was none."""
    seed = os.environ.get("PL_GLOBAL_SEED", "0")
    require(seed.isdecimal(), "PL_GLOBAL_SEED", seed, "give a whole number from 0, or unset the variable")
    return int(seed)


def address(seed: int, purpose: str, *where: int) -> int:
    """A 63-bit seed for the stream at this address: equal addresses give equal seeds on every machine."""
    text = "/".join([str(seed), purpose, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_rng(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """NumPy's generator for the stream at this address."""
    return np.random.default_rng(address(seed, purpose, *where))


def torch_rng(seed: int, purpose: str, *where: int) -> torch.Generator:
    """Torch's CPU generator for the stream at this address."""
    return torch.Generator().manual_seed(address(seed, purpose, *where))


@contextmanager
def ambient(seed: int, purpose: str, *where: int) -> Iterator[None]:
    """Seed the global generators for code that can draw from nothing else (dropout, a user's transform).

    They are set to the address on entry and put back on exit: Python's, NumPy's and torch's, on CPU and GPU.
    """
    # other people's code draws from NumPy's legacy generator
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    drawn = address(seed, purpose, *where)
    # torch.manual_seed would queue a call for every kind of device that is not in use, with its traceback
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        random.seed(drawn)
        np.random.seed(drawn % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(drawn)
        for _ in devices:
            torch.cuda.manual_seed(drawn)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
