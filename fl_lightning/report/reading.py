"""Reading files that may be anything: a run that was killed, a full disk or an editor may have left them."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.errors import clipped, text_of
from fl_lightning.yaml_files import parse_yaml

# bytes of a table, and of a file of YAML or JSON
LARGEST, LARGEST_TEXT = 2**29, 2**22
# binary digits of a number; Python refuses to write one with very many
MOST_DIGITS = 1000


def why(error: BaseException) -> str:
    """What is wrong with a file, on one line."""
    return clipped(getattr(error, "strerror", None) or text_of(error), 120)


def read_bounded(path: Path, largest: int = LARGEST) -> bytes:
    """The contents of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file, such as a pipe that would be waited for, or is too large.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no file")
    if status.st_size > largest:
        raise ValueError(f"it has {status.st_size} bytes, more than {largest}")
    return path.read_bytes()


def read_lines(path: Path) -> str:
    """The text of a file of lines.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or is cut: the beginning of a table or of YAML would be taken for the whole.
    """
    text = read_bounded(path, LARGEST_TEXT).decode()
    if text and not text.endswith("\n"):
        raise ValueError("its last line is cut")
    return text


def read_plain(path: Path) -> Any:
    """What a file of YAML or JSON holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or holds a number that takes too long to write.
    """
    if path.suffix == ".json":
        try:
            loaded = json.loads(read_bounded(path, LARGEST_TEXT))
        except RecursionError as error:
            raise ValueError(text_of(error)) from error
    else:
        loaded = parse_yaml(read_lines(path), path.name)
    left = [loaded]
    while left:
        value = left.pop()
        if isinstance(value, int) and value.bit_length() > MOST_DIGITS:
            raise ValueError("a number has too many digits")
        left += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return loaded


def check_config_values(config: Mapping[str, Any]) -> None:
    """Refuse a config whose parts are not what they are in a config.

    Raises:
        ValueError: a part is something else; names it.
    """
    for key in ("trainer", "model", "data"):
        check_part(config, key, Mapping)
    check_part(config, "method", (Mapping, list))
    left: list[Any] = [config]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            if "class_path" in value:
                check_part(value, "class_path", str)
                check_part(value, "init_args", Mapping)
                check_part(value, "dict_kwargs", Mapping)
            left += value.values()
        elif isinstance(value, list):
            left += value


def check_environment(environment: Mapping[str, Any]) -> None:
    """Refuse an environment whose parts are not what a run writes.

    Raises:
        ValueError: a part is something else; names it.
    """
    check_part(environment, "versions", Mapping)
    check_part(environment, "gpus", list)
    for key in ("processor", "git_revision", "plan_hash"):
        check_part(environment, key, str)
    for key in environment.get("versions") or {}:
        check_part(environment["versions"], key, str)


def check_part(values: Mapping[str, Any], key: str, kind: Any) -> None:
    """Refuse an entry that is there and not of a kind.

    Raises:
        ValueError: it is not.
    """
    value = values.get(key)
    if not (value is None or isinstance(value, kind)):
        raise ValueError(f"{key} is {clipped(repr(value), 40)}")
