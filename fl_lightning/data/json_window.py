"""JSON files that are larger than memory, decoded a value at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

BLOCK = 2**21  # characters
WHITESPACE = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()


class Window:
    """The part of a JSON file that is being decoded; what lies before and after it is not held.

    Args:
        file: the file, opened as text.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at, self._passed = file, "", 0, 0

    def members(self) -> Iterator[str]:
        """The keys of the object that comes next; the caller takes the value of each, before the next key.

        Raises:
            ValueError: no object comes next, it is empty, or the file ends within it.
        """
        self._mark("{")
        while True:
            key = self.value()
            self._mark(":")
            yield key
            if self._mark(",}") == "}":
                return

    def value(self) -> Any:
        """The value that comes next, decoded.

        Raises:
            ValueError: what comes next is no JSON, or the file ends within it.
        """
        self._skip()
        while True:
            try:
                found, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._cut_off(error) or not self._more():
                    raise ValueError(f"{error.msg} at character {self._passed + error.pos}") from error
                continue
            # a number that ends with the text may go on
            if end < len(self._text) or not self._more():
                self._at = end
                return found

    def _cut_off(self, error: json.JSONDecodeError) -> bool:
        # but for a string, what is cut off fails within the last word; what fails before that is wrong
        return error.msg.startswith("Unterminated string") or len(self._text) - error.pos <= len("-Infinity")

    def _mark(self, among: str) -> str:
        self._skip()
        found = self._text[self._at : self._at + 1]
        if not found or found not in among:
            raise ValueError(f"{' or '.join(among)} is to stand at character {self._passed + self._at}")
        self._at += 1
        return found

    def _skip(self) -> None:
        self._at = WHITESPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text) and self._more():
            self._skip()

    def _more(self) -> bool:
        # what is held at most doubles: a long value is begun a few times, not once a block
        new = self._file.read(max(BLOCK, len(self._text) - self._at))
        if new:
            self._passed += self._at
            self._text, self._at = self._text[self._at :] + new, 0
        return bool(new)
