"""The errors that a user may see. Bad input gives one line: the key, its value and a hint."""

from __future__ import annotations

import linecache
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path

# characters of a text from elsewhere, of a value, and of a list on one line; names in a list
LONGEST, LONGEST_VALUE, LONGEST_LIST, MOST_LISTED = 290, 80, 100, 20
# libraries that may lie outside of the folders of installed packages
LIBRARIES_ANYWHERE = ("torch", "torchvision", "lightning", "pytorch_lightning", "torchmetrics", "numpy", "jsonargparse")
# ends the warning of a run without a model that all clients share
OF_OWN_MODELS = "metrics are means over the clients' own models"
# a frame of a traceback that is a text, as errors in the worker processes of a DataLoader have it
FRAME = re.compile(r'^ *File "(.+?)", line (\d+), in (.+)$', re.MULTILINE)
# errors of torch that a trainer's argument avoids
REMEDIES = {
    r"(\S+) does not have a deterministic .+": r"\1 is not deterministic; set trainer.deterministic=warn or false",
    r".*CUBLAS_WORKSPACE_CONFIG=.+": "set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts, "
    "or trainer.deterministic=false",
}


class UsageError(ValueError):
    """Bad input. The command line prints it as one line, without a traceback."""


class UsageErrors(UsageError):
    """Several things that are bad, each a UsageError by itself. The command line prints a line for each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class ChangedCodeError(UsageError):
    """A run does not resume, because the checkpoint is of other source code: the user's, or this package's."""


class SharedStateError(UsageError):
    """A client's hook has modified state that all clients share, so the run cannot skip the client."""


class ClientError(RuntimeError):
    """A failure inside a run. Names the client, the round and, where known, the loss term.

    Attributes:
        record: the file with which ``replay`` repeats the visit that failed; None without one.
    """

    record: Path | None = None


class LostWorkerError(ClientError):
    """A worker process has ended or is late, so the run cannot continue.

    Attributes:
        worker: its rank; None if unknown.
        status: its exit status; None if unknown.
    """

    def __init__(self, text: str, worker: int | None = None, status: int | None = None) -> None:
        super().__init__(text)
        self.worker, self.status = worker, status


class Stopped(BaseException):
    """A signal has stopped a fit.

    Attributes:
        signal: the signal.
        checkpoint: the checkpoint from which the run resumes; None if it has no checkpoint yet.
        weights: whether the run had initial weights, which a checkpoint replaces.
        status: the exit status of the program, 128 + the number of the signal.
    """

    def __init__(self, text: str, caught: signal.Signals, checkpoint: Path | None = None) -> None:
        super().__init__(text)
        self.signal, self.checkpoint, self.status = caught, checkpoint, 128 + caught
        self.weights = False


class Interrupted(Stopped, KeyboardInterrupt):
    """SIGINT has stopped a fit, as Ctrl-C and the stop button of a notebook send it."""


class Terminated(Stopped, SystemExit):
    """Another signal has stopped a fit. A program that does not catch this ends with the status."""

    def __init__(self, text: str, caught: signal.Signals, checkpoint: Path | None = None) -> None:
        super().__init__(text, caught, checkpoint)
        self.code = self.status


def text_of(error: BaseException) -> str:
    """The text of an error; with its type where that says too little, as for an error without text."""
    text = own_text(error)
    if text and not isinstance(error, KeyError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def own_text(error: BaseException) -> str:
    """Return the text of an error; an error of a user's class may fail even at this."""
    try:
        return str(error)
    except Exception as problem:
        return f"its __str__ raises {type(problem).__name__}"


def with_location(error: BaseException) -> str:
    """Return an error on one line: its kind, the file, line and function of the user's code, and its text.

    Frames of this package, of installed packages and of Python are skipped. Without a frame of the user's code, the
    innermost frame is shown; without a text, the line of code. A ClientError is complete by itself.
    """
    if isinstance(error, ClientError):
        return str(error)
    kind, text = type(error).__name__, own_text(error)
    walked = traceback.walk_tb(error.__traceback__)
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]
    if "Original Traceback" in text:
        frames += [(file, int(line), function) for file, line, function in FRAME.findall(text)]
        kind, _, text = text.strip().splitlines()[-1].partition(": ")
    if not frames:
        return f"{kind}: {truncate(text, 160)}" if text else kind
    user_frames = (frame for frame in reversed(frames) if is_user_code(frame[0]))
    file, line, function = next(user_frames, frames[-1])
    text = text.strip() or linecache.getline(file, line)
    for pattern, remedy in REMEDIES.items():
        text = re.sub(pattern, remedy, text, flags=re.DOTALL)
    return f"{kind} at {Path(file).name}:{line} ({function}): {truncate(text, 160)}".removesuffix(": ")


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, which its traceback ends with, though not in Python 3.10."""
    vars(error).setdefault("__notes__", []).append(text)


@cache
def is_user_code(file: str) -> bool:
    """Whether a file or folder of code is the user's own: neither of this package nor of a library nor of Python's."""
    folders = [os.path.dirname(os.__file__), str(Path(__file__).resolve().parents[1])]
    for name in LIBRARIES_ANYWHERE:
        folders += getattr(sys.modules.get(name), "__path__", ())
    real = os.path.realpath(file)
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts, *Path(real).parts}
    prefixes = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)
    within = f"{real}{os.sep}".startswith(prefixes)
    return not (installed or within or file.startswith("<frozen"))


def check_all(checks: Iterable[Callable[[], object]]) -> None:
    """Run several independent checks, and report all failures together.

    Raises:
        UsageError: one check failed.
        UsageErrors: several checks failed.
    """
    errors: dict[str, UsageError] = {}
    for check in checks:
        try:
            check()
        except UsageError as error:
            errors |= dict.fromkeys(texts_of(error), error)
    if errors:
        first_error = next(iter(errors.values()))
        raise first_error if len(errors) == 1 else UsageErrors(list(errors)) from first_error


def texts_of(error: UsageError) -> list[str]:
    """Return the texts of an error, one for each failure."""
    return error.lines if isinstance(error, UsageErrors) else [str(error)]


def require(condition: bool, key: str, value: object, hint: str) -> None:
    """Raise ``UsageError("key=value: hint")`` unless ``condition`` holds."""
    if not condition:
        raise UsageError(f"{key}={truncate(repr(value), LONGEST_VALUE)}: {hint}")


@contextmanager
def writing_into(key: str, place: Path, hint: str = "pass another one, that can be written to") -> Iterator[None]:
    """Refuse the file or folder that an argument names if the block cannot write there, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{key}={str(place)!r}: cannot be written: {error.strerror or error}; {hint}") from error


def count(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """A text on one line that any file or terminal takes: what cannot be seen is escaped, as half a surrogate pair."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    pieces = []
    for char in line:
        pieces.append(char if char.isprintable() else char.encode("unicode_escape").decode())
    return "".join(pieces)


def choices(names: Iterable[str], near: str = "") -> str:
    """Names at the end of a message, one on each line where there is little room; of many, some nearest to ``near``."""
    all_names = listed = [*names]
    number = ""
    if len(all_names) > MOST_LISTED:
        nearest = get_close_matches(near, all_names, n=MOST_LISTED // 2, cutoff=0.0)
        listed = list(dict.fromkeys([*nearest, *all_names[-3:]]))
        number = f"{len(all_names)}, such as "
    line = ", ".join(listed) or "none"
    return number + (line if len(line) <= LONGEST_LIST else "\n  " + ",\n  ".join(listed))


def few(names: Iterable[object], most: int = 5) -> str:
    """The first names, and the number of the others."""
    all_names = [*map(str, names)]
    remainder = f" and {len(all_names) - most} more" if len(all_names) > most else ""
    return ", ".join(all_names[:most]) + remainder


def near(name: str, names: Sequence[str]) -> str:
    """A hint to the nearest of some names; empty where none is near."""
    word, initials = last_part(name).lower(), "".join(part[:1] for part in name.split("_"))
    by_end = {last_part(candidate).lower(): candidate for candidate in reversed(names)}
    matches = [initials] if initials in by_end else get_close_matches(word, by_end, 1)
    return f"did you mean {by_end[matches[0]]}?" if matches and by_end[matches[0]] != name else ""


def last_part(path: str) -> str:
    """The last part of a dotted name."""
    return path.rsplit(".", 1)[-1]


def truncate(text: str, length: int = LONGEST) -> str:
    """A text as :func:`printable` gives it; of one that is too long the first sentence, or what fits, and the end."""
    line = printable(text)
    if len(line) <= length:
        return line
    sentence = re.match(r".+?\.(?= [A-Z])", line)
    head = sentence[0] if sentence and len(sentence[0]) <= length - 5 else line[: (length - 5) // 2]
    end = line[len(line) - (length - 5 - len(head)) :]
    return f"{head} ... {end[end.find(' ', 0, 40) + 1 :]}"
