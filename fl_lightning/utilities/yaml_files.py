"""Reads YAML. Text that PyYAML would drop silently, or refuse with a traceback, is an error of one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from fl_lightning.utilities.errors import UsageError, text_of, truncate

TAG = "tag:yaml.org,2002:"
# numbers of base 8 and 60, which few know that YAML 1.1 has
OLD_NUMBER = re.compile(r"[-+]?0[0-7_]+|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


# the parser that is written in C reads a config faster
class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The safe loader, except that a date is a text and 1e-3 a number, in agreement with the parser of configs."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != f"{TAG}timestamp"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
Loader.add_implicit_resolver(f"{TAG}float", NUMBER, list("-+0123456789"))


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; None for an empty one.

    Raises:
        UsageError: the file cannot be read, is not YAML, or has a key twice or an ambiguous number.
    """
    return parse_yaml(text_of_file(path), str(path))


def text_of_file(path: Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        UsageError: the file cannot be read or has another encoding.
    """
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; pass another file") from error
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8-sig")
        byte = f"the byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise UsageError(f"{place(before, len(before), str(path))}: {byte}; save the file as UTF-8") from error


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a text; ``name`` is the name of its file, for the errors.

    Raises:
        UsageError: as :func:`read_yaml`.
    """
    try:
        return checked_yaml(text, name)
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        index = mark.index if mark else getattr(error, "position", 0)
        began: Any = getattr(error, "context_mark", None)
        since = f"(which began in line {began.line + 1}, column {began.column + 1})" if began else ""
        words = [getattr(error, "context", None), since, getattr(error, "problem", None) or str(error)]
        tab = text[index : index + 1] == "\t"
        why = "YAML does not indent with a tab" if tab else truncate(" ".join(filter(None, words)), 150)
        raise UsageError(f"{place(text, index, name)}: {why}; correct it, or quote a text") from error


def checked_yaml(text: str, name: str) -> Any:
    """Return the value of a text as :func:`parse_yaml`, but raise ``yaml.YAMLError`` where it is not YAML."""
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        waiting, visited = [] if root is None else [root], set[Any]()
        while waiting:
            node = waiting.pop()
            if node in visited:  # by an alias
                continue
            visited.add(node)
            if isinstance(node, yaml.ScalarNode):
                if node.tag in (f"{TAG}int", f"{TAG}float") and OLD_NUMBER.fullmatch(node.value):
                    why = f"{node.value} is {yaml.safe_load(node.value)} to YAML; write that number, or quote a text"
                    raise UsageError(f"{place(text, node.start_mark.index, name)}: {why}")
            elif isinstance(node, yaml.MappingNode):
                first_keys: dict[tuple[str, str], yaml.Node] = {}
                for key, value in node.value:
                    earlier = first_keys.setdefault((key.tag, str(key.value)), key)
                    if earlier is not key:
                        why = f"the key {truncate(key.value, 40)} stands in line {earlier.start_mark.line + 1} already"
                        raise UsageError(f"{place(text, key.start_mark.index, name)}: {why}; keep one of the two")
                    waiting += [key, value]
            else:
                waiting += node.value
        value = None if root is None else loader.construct_document(root)
        json.dumps(value, skipkeys=True, default=str)  # a ValueError where an alias stands within its own value
        return value
    except UsageError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:  # such as `!!int a`
        hint = "remove tags, deep nesting and aliases within their own values"
        raise UsageError(f"{name}: {truncate(text_of(error), 100)}; {hint}") from error


def place(text: str, index: int, name: str) -> str:
    """Return the line and the column at an index of a text."""
    before = text[:index]
    return f"{name}, line {before.count(chr(10)) + 1}, column {index - before.rfind(chr(10))}"
