"""Temporary values of attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(target: Any, **values: Any) -> Iterator[None]:
    """Within this context, set attributes of an object to other values."""
    before = {name: getattr(target, name) for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(before)
