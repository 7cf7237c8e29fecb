"""Reading YAML. What PyYAML passes over in silence, or ends with a traceback, is an error of one line here."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml
from yaml.reader import Reader

from fl_lightning.errors import UsageError, clipped, text_of

# bytes of a file; levels within each other; values, of which an alias stands for as many as it repeats
MOST_BYTES, MOST_LEVELS, MOST_VALUES = 10 * 2**20, 100, 200_000
TAG = "tag:yaml.org,2002:"
OCTAL = re.compile(r"[-+]?0[0-7_]")
UNCLOSED = re.compile(r"while (?:parsing a flow|scanning a quoted)")


# the parser that is written in C reads a config faster
class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The safe loader, for which a date is a text, as it is for the parser of configs."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{TAG}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; None where it is empty.

    Raises:
        UsageError: it cannot be read, is no YAML, or something in it would be lost.
    """
    return parse_yaml(text_of_file(path), str(path))


def text_of_file(path: Path) -> str:
    """The text of a file in UTF-8.

    Raises:
        UsageError: it cannot be read, is too large or in another encoding.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; give another file") from error
    if len(content) > MOST_BYTES:
        raise UsageError(f"{path}: has more than {MOST_BYTES} bytes; give a file of YAML")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError(f"{path}, line 1, column 1: the file is UTF-16 or UTF-32; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = place_after(content[: error.start].decode("utf-8-sig"), str(path))
        raise UsageError(
            f"{where}: the byte 0x{content[error.start]:02x} is no UTF-8; save the file as UTF-8"
        ) from error


def parse_yaml(text: str, name: str) -> Any:
    """What a text says; ``name`` is that of its file, for the errors.

    Raises:
        UsageError: it is no YAML, or something in it would be lost.
    """
    try:
        return checked_yaml(text, name)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise UsageError(f"{where}: {_syntax(error, text)}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: it is no YAML: {clipped(str(error), 100)}; give another file") from error


def checked_yaml(text: str, name: str) -> Any:
    """What a text says, as :func:`parse_yaml` has it; but what is no YAML raises ``yaml.YAMLError``."""
    strange = Reader.NON_PRINTABLE.search(text)
    if strange:
        where = place_after(text[: strange.start()], name)
        raise UsageError(f"{where}: YAML does not allow the character {strange[0]!r}; remove it")
    depth = 0
    # before the nodes are made, which takes stack and memory
    for number, event in enumerate(yaml.parse(text, Loader=Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_LEVELS or number > MOST_VALUES:
            refuse(event, too_much(depth), name)
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            check_nodes(root, loader, name, {})
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def check_nodes(
    node: yaml.Node, loader: Loader, name: str, checked: dict[yaml.Node, tuple[int, int] | None]
) -> tuple[int, int]:
    """Check a node and all that is in it, before anything is made of it; returns its values and levels.

    Args:
        node: the node.
        loader: makes the values of scalars.
        name: name of the file.
        checked: values and levels of the nodes that are checked; None for those around this one.
    """
    if node in checked:
        known = checked[node]
        if known is None:
            refuse(node, "an alias stands in what it repeats; write out what is meant", name)
        return known
    checked[node] = None
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.ScalarNode):
        value_of(node, loader, name)
    elif isinstance(node, yaml.MappingNode):
        refuse_twins(node, loader, name)
        inner = [value for _, value in node.value]
    else:
        inner = node.value
    parts = [check_nodes(part, loader, name, checked) for part in inner]
    values, levels = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
    if values > MOST_VALUES or levels > MOST_LEVELS:
        refuse(node, too_much(levels), name)
    checked[node] = values, levels
    return values, levels


def refuse_twins(node: yaml.MappingNode, loader: Loader, name: str) -> None:
    """Refuse a key that stands twice: the last would discard the first one, with all that is in it."""
    first: dict[Any, yaml.Node] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            refuse(key, "a list or a mapping stands as a key; give a text", name)
        # what `<<` brings along gives way to the keys beside it, but a second `<<` would replace the first
        value = key.tag if key.tag == f"{TAG}merge" else value_of(key, loader, name)
        if value in first:
            line = first[value].start_mark.line + 1
            refuse(key, f"the key {brief(key)} stands in line {line} already; keep one of the two", name)
        first[value] = key


def value_of(node: yaml.ScalarNode, loader: Loader, name: str) -> Any:
    """The value of a scalar. Numbers of base 8 and 60 are refused: few know that YAML has them."""
    try:
        value = loader.construct_object(node)
    except yaml.YAMLError:
        raise
    except Exception as error:  # such as `!!int a`: each type has errors of its own
        why = f"{brief(node)} is no {node.tag.removeprefix(TAG)}: {clipped(text_of(error), 60)}"
        refuse(node, f"{why}; quote it, without a tag", name)
    number = node.tag in (f"{TAG}int", f"{TAG}float")
    octal = node.tag == f"{TAG}int" and OCTAL.match(node.value)
    if octal or (number and ":" in node.value):
        base, meant = (8, {value, int(node.value.replace("_", ""))}) if octal else (60, {value})
        why = f"{brief(node)} is {value} in YAML, of base {base}"
        hint = f"write {' or '.join(map(str, sorted(meant)))}, or, where it is a text, quote it"
        refuse(node, f"{why}; {hint}", name)
    return value


def brief(node: yaml.ScalarNode) -> str:
    """A scalar as its file has it, clipped."""
    return clipped(node.value, 40)


def too_much(levels: int) -> str:
    """The end of the line about a text that is too deep or else too large."""
    most = f"{MOST_LEVELS} levels" if levels > MOST_LEVELS else f"{MOST_VALUES} values"
    return f"there are more than {most}, counted as often as aliases repeat them; give a smaller text"


def refuse(at: Any, why: str, name: str) -> NoReturn:
    """Raise the error about a node or an event."""
    raise UsageError(f"{name}, line {at.start_mark.line + 1}, column {at.start_mark.column + 1}: {why}")


def place_after(before: str, name: str) -> str:
    """The place in a file that comes after a text."""
    lines = before.split("\n")
    return f"{name}, line {len(lines)}, column {len(lines[-1]) + 1}"


def _syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    """What is wrong with a text, and the remedy."""
    problem, context = str(error.problem or "it is no YAML"), str(error.context or "")
    mark: Any = error.problem_mark
    if mark and text[mark.index : mark.index + 1] == "\t":
        return "there is a tab where YAML takes spaces alone; indent with spaces"
    if "maximum nesting depth" in problem:
        # PyYAML reads ahead, and from 6.0.4 on it ends at 1,000 levels by itself, before it gives events to count
        return too_much(MOST_LEVELS + 1)
    if "another document" in problem:
        return "a second document begins here; keep one in a file"
    if "tag" in problem:
        return f"{clipped(problem, 120)}; remove the tag, or quote a text"
    if UNCLOSED.match(context) and error.context_mark:
        began: Any = error.context_mark
        where = f"which began in line {began.line + 1}, column {began.column + 1}"
        return f"{problem} {context}, {where}; close it"
    return f"{problem}{f' {context}' if context else ''}; correct it, or quote a text with special characters"
