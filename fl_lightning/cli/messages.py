"""Shortens the error messages of a config parser, which can fill pages, to one line."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

from fl_lightning.callbacks import Callback
from fl_lightning.data import Augmentation, FederatedDataModule, Partitioner
from fl_lightning.method import Method
from fl_lightning.models import Encoder

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


def shorten(message: str) -> str:
    """The key, the value and the hint in a parser's message, where its form is known; else the message on one line."""
    text = " ".join(message.split())
    wrong = list(WRONG.finditer(text))
    if wrong:
        path, name, plain, first, choice, last = wrong[-1].groups()
        return f"{path.rsplit('.', 1)[1]}.{name}={first or last!r}: give {wanted(plain or choice)}"
    key = ".".join(re.findall(r'Parser key "([^"]+)"', text))
    option = re.search(r"class_path '([\w.]+)': Option '([^']+)' is not accepted", text)
    if option:
        path, name = option.groups()
        return (
            f"{key}: {path.rsplit('.', 1)[1]} has no {name!r}; it takes {', '.join(parameters(path)) or 'no arguments'}"
        )
    unknown = re.search(r"Expected a dot import path string: ([^\s-]+)", text)
    if unknown:
        return f"{key}={unknown[1]!r}: no such class; give {known_for(key)}MODULE.CLASS of your own"
    return text.replace("unrecognized arguments:", "no such key (--help lists them):")


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
