"""Attributes that have another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """In this block these attributes of an object have other values."""
    before = {name: getattr(target, name) for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(before)
