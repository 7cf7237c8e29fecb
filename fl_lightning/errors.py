"""The errors that a user may see. Bad input gives one line: the key, its value and a hint."""

from __future__ import annotations

from pathlib import Path

# characters of a line, and of a value in it
LONGEST, LONGEST_VALUE = 290, 80


class UsageError(ValueError):
    """Bad input. The command line prints it as one line, without a traceback."""


class ClientError(RuntimeError):
    """A failure inside a run. Names the client, the round and, where known, the loss term.

    Attributes:
        record: the file with which ``replay`` repeats the visit that failed; None without one.
    """

    record: Path | None = None


class LostWorkerError(ClientError):
    """A worker process has ended, so the run cannot go on."""


def text_of(error: BaseException) -> str:
    """The text of an error; with its type where that says too little, as for an error without text."""
    text = str(error)
    if text and not isinstance(error, KeyError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def require(condition: bool, key: str, value: object, hint: str) -> None:
    """Raise ``UsageError("key=value: hint")`` unless ``condition`` holds."""
    if not condition:
        raise UsageError(f"{key}={clipped(repr(value), LONGEST_VALUE)}: {hint}")


def clipped(text: str, length: int = LONGEST) -> str:
    """A text on one line, of which the middle is left out where it is too long: the ends tell most."""
    line = " ".join(text.split())
    half = (length - 5) // 2
    return line if len(line) <= length else f"{line[:half]} ... {line[-half:]}"
