"""Assertions on an error: its kind, and the names in its line: key, value, key of the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fl_lightning.utilities.errors import UsageError


def missing(line: str, *words: str) -> str | None:
    """The first of the words that a line does not name after those before it; None where it names all, in this order.

    A word stands alone: ``mu=1`` is not named by ``FedProx.mu=1``, ``mu=10`` or ``tmu=1``. One that ends in ``=`` is a
    key with any value.
    """
    start = 0
    for word in words:
        named = re.compile(r"(?<![\w.])" * word[:1].isalnum() + re.escape(word) + r"(?!\w)" * word[-1:].isalnum())
        found = named.search(line, start)
        if not found:
            return word
        start = found.end()
    return None


def assert_names(line: str, *words: str) -> None:
    """Fail unless a line names these words in this order."""
    assert words, "name at least a key"
    assert (lacking := missing(line, *words)) is None, f"no {lacking!r} (of {words}) in: {line}"


@contextmanager
def refused(*words: str, kind: type[BaseException] = UsageError) -> Iterator[pytest.ExceptionInfo]:
    """The block raises an error of this kind, whose text names these words in this order."""
    with pytest.raises(kind) as caught:
        yield caught
    assert_names(str(caught.value), *words)


@contextmanager
def warned(*words: str, kind: type[Warning] = UserWarning) -> Iterator[pytest.WarningsRecorder]:
    """The block warns; one warning of this kind names these words in this order."""
    with pytest.warns(kind) as caught:
        yield caught
    lines = [str(warning.message) for warning in caught if issubclass(warning.category, kind)]
    assert words, "name at least a key"
    assert any(missing(line, *words) is None for line in lines), f"none names {words}: {lines}"
