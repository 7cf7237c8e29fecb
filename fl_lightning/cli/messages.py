"""Shortens the error messages of a config parser, which can fill pages, to one line."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

from fl_lightning.callbacks import Callback
from fl_lightning.callbacks.refused import replacement
from fl_lightning.data import Augmentation, FederatedDataModule, Partitioner
from fl_lightning.method import Method
from fl_lightning.models import Encoder
from fl_lightning.namespaces import classes

BASES: dict[str, type] = {
    "method": Method,
    "callbacks": Callback,
    "data": FederatedDataModule,
    "partitioner": Partitioner,
    "augment": Augmentation,
    "encoder": Encoder,
}
# an argument of a class that does not fit its type, plain or one of several; a lookahead, since they nest
WRONG = re.compile(
    r"""class_path\ '([\w.]+)':\ Parser\ key\ "([^"]+)":\ (?=
        Expected\ an?\ (.+?)\.\ Got\ value:\ (.+?)(?:\ -\ |$)
        | Does\ not\ validate\ against\ any\ of\ the\ Union\ subtypes\ Subtypes:\ \[(.+?)\]\ Errors
          .*?\ Given\ value:\ (.+?)(?:\ -\ |$))""",
    re.VERBOSE,
)
CLASS_REPR = re.compile(r"<class '|'>")
# what a parser says of an argument or a class, and the line that takes its place
OPTION = re.compile(r"class_path '([\w.]+)': Option '([^']+)' is not accepted")
REQUIRED = re.compile(r"class_path '([\w.]+)': the following arguments are required: (\w+)")
NO_CLASS = (
    re.compile(r"class_path '(?P<value>[\w.]+)': (?P<why>No module named '[\w.]+')"),
    re.compile(r"class_path '(?P<value>[\w.]+)': (?P<why>module '[\w.]+' has no attribute '\w+')"),
    re.compile(r"does not correspond to (?P<why>a subclass of \w+).*Given value: (?P<value>[\w.]+)"),
    re.compile(r"Expected (?P<why>a dot import path) string: (?P<value>[^\s-]+)"),
)


def shorten(message: str) -> str:
    """The key, the value and the hint in a parser's message, where its form is known; else the message on one line."""
    text = " ".join(message.split())
    key = ".".join(re.findall(r'Parser key "([^"]+)"', text))
    line = of_value(text) or of_argument(text, key) or of_class(text, key)
    return line or text.replace("unrecognized arguments:", "no such key (--help lists them):")


def of_value(text: str) -> str | None:
    """The line about a value that does not fit its type; None where the message is not about one."""
    wrong = list(WRONG.finditer(text))
    if not wrong:
        return None
    path, name, plain, first, choice, last = wrong[-1].groups()
    return f"{short(path)}.{name}={first or last!r}: give {wanted(plain or choice)}"


def of_argument(text: str, key: str) -> str | None:
    """The line about an unknown or a missing argument of a class; None where the message is not about one."""
    option, required = OPTION.search(text), REQUIRED.search(text)
    if option:
        names = ", ".join(parameters(option[1])) or "no arguments"
        return f"{key}: {short(option[1])} has no {option[2]!r}; it takes {names}"
    return f"{short(required[1])}.{required[2]}: it is required; give a value" if required else None


def of_class(text: str, key: str) -> str | None:
    """The line about a class that cannot be imported or has the wrong base; None where the message is not about one."""
    for pattern in NO_CLASS:
        match = pattern.search(text)
        theirs = lightning_callback(match["value"]) if match and key.endswith("callbacks") else None
        if match and theirs:
            return f"{key}={match['value']!r}: it is a callback of Lightning's own trainer; {replacement(theirs)}"
        if match:
            why = match["why"].replace("a subclass", "it is no subclass").replace("a dot import path", "no such class")
            return f"{key}={match['value']!r}: {why}; give {known_for(key)}MODULE.CLASS of your own"
    return None


def lightning_callback(path: str) -> type | None:
    """The callback of Lightning's own trainer at a class path or of a short name; None where it is no such class."""
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(module or "lightning.pytorch.callbacks"), name, None)
    except ImportError:
        return None
    return kind if isinstance(kind, type) and issubclass(kind, classes("Callback")) else None


def short(path: str) -> str:
    """The name of a class without its module."""
    return path.rsplit(".", 1)[-1]


def wanted(kind: str) -> str:
    """The values that a type allows, in words: ``a or b`` for ``typing.Literal['a', 'b']``."""
    choices = re.match(r"typing.Literal\[(.+)\]$", kind)
    if choices:
        return " or ".join(re.findall(r"'([^']*)'", choices[1]))
    return f"a value of type {re.sub(CLASS_REPR, '', kind).replace(', ', ' or ')}".replace("NoneType", "null")


def parameters(path: str) -> list[str]:
    """The arguments of the constructor of the class at ``path``, with those that ``**kwargs`` passes to its bases."""
    module, name = path.rsplit(".", 1)
    names: dict[str, None] = {}
    for kind in getattr(import_module(module), name).__mro__:
        if "__init__" in vars(kind) and kind is not object:
            taken = inspect.signature(kind.__init__).parameters.values()
            names |= {p.name: None for p in taken if p.name != "self" and p.kind is not p.VAR_KEYWORD}
            if all(p.kind is not p.VAR_KEYWORD for p in taken):
                break
    return list(names)


def known_for(key: str) -> str:
    """The names of our classes for a key, as ``one of A, B, or``; empty for a key without classes of ours."""
    base = BASES.get(key.rsplit(".", 1)[-1])
    names = sorted({kind.__name__ for kind in subclasses(base)}) if base else []
    return f"one of {', '.join(names)}, or " if names else ""


def subclasses(base: type) -> list[type]:
    """The concrete subclasses that this package defines, at any depth."""
    children: list[type] = base.__subclasses__()
    kinds = [kind for child in children for kind in (child, *subclasses(child))]
    ours = [kind for kind in kinds if kind.__module__.startswith("fl_lightning")]
    return [kind for kind in ours if not inspect.isabstract(kind) and not kind.__name__.startswith("_")]
