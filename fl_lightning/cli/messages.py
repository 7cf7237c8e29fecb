"""Shortens the error messages of a config parser, which can fill pages, to one line."""

from __future__ import annotations

import inspect
import os
import re
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule

from fl_lightning.callbacks import Callback
from fl_lightning.callbacks.refused import replacement
from fl_lightning.cli.packaged import names_near
from fl_lightning.data import Augmentation, FederatedDataModule, Partitioner
from fl_lightning.errors import clipped
from fl_lightning.method import Method
from fl_lightning.models import Encoder
from fl_lightning.models.projector import BaseProjector
from fl_lightning.namespaces import classes
from fl_lightning.sampling import Sampler

BASES: dict[str, type] = {
    "method": Method,
    "callbacks": Callback,
    "data": FederatedDataModule,
    "model": LightningModule,
    "partitioner": Partitioner,
    "augment": Augmentation,
    "encoder": Encoder,
    "projector": BaseProjector,
    "sampler": Sampler,
    "server_optimizer": torch.optim.Optimizer,
}
# folders of this package whose classes a config names
NAMED = tuple(f"fl_lightning.{part}" for part in ("callbacks", "data", "methods", "models", "optim", "sampling"))
# What a parser says at the innermost place of an error. In its text, the first error of several is that of the type
# which fits the value best, and what is within comes after what it is in: the first such sentence is the cause.
CAUSES = {
    "option": re.compile(r"Option '(?P<name>[^']+)' is not accepted"),
    "required": re.compile(r"the following arguments are required: (?P<name>[\w.]+)"),
    "import": re.compile(r"Expected a (?P<why>dot import path) string: (?P<value>[^\s-]+)"),
    "module": re.compile(r"(?P<why>No module named '[\w.]+')"),
    "attribute": re.compile(r"(?P<why>module '(?P<module>[\w.]+)' has no attribute '\w+')"),
    "base": re.compile(r"Import path (?:(?P<value>[\w.]+) )?does not correspond to (?P<why>a subclass of \w+)"),
    "abstract": re.compile(r"Expected an instantiatable class, but (?P<value>[\w.]+) is (?P<why>abstract)"),
    "entries": re.compile(r"'(?P<kind>\w+)' object has no attribute 'keys'"),
    "key": re.compile(r"(?:Key must be a string, got|Spaces not allowed in keys): (?P<name>.*?)\.(?= |$)"),
    "spec": re.compile(
        r"(?:Not a valid subclass of \w+|Dict must include a class_path|Expected an import path or a subclass spec)"
    ),
    "value": re.compile(r"Expected an? (?P<type>(?:<class '[\w.]+'>|[\w.]+(?:\[.*?\])?))(?=\.? |\.?$)"),
    "file": re.compile(r"(?P<why>File does not exist|Path is not a file|File is not readable): '(?P<value>.*?)'"),
    "unloaded": re.compile(r"Unable to load config (?P<value>'.*?'|\".*?\"|\S+)"),
}
# the value, up to what a message says of other types
GIVEN = re.compile(
    r"Got value:(.*?)(?:\. Got value:| Subclass types expect| - |$)|Given value:(.*?)(?:\. Got value:| - |$)"
)
# what a message ends with where it is about a class in the place of a function
INNER = re.compile(r"(?:Got|Given) value: Namespace\(class_path='([\w.]+)'")
# a value as a command line gives it to one argument of a class
NESTED = re.compile(r"NestedArg\(key='[^']*', val=(.+)\)$")
CLASS_REPR = re.compile(r"<class '|'>")
NOT_A_PATH = re.compile(r"- Expected a path but .*? either not accessible or invalid - ")


class Place(NamedTuple):
    """Where in a parser's message the cause of the error is.

    Args:
        key: the keys around it, joined by dots.
        owner: import path of the class whose argument it is; empty where it is no argument of a class.
        before: the message up to the cause.
        after: the message after the cause.
    """

    key: str
    owner: str
    before: str
    after: str


def shorten(message: str) -> str:
    """The key, the value and the hint in a parser's message, where its form is known; else the message on one line."""
    text = NOT_A_PATH.sub("", " ".join(message.split()))
    found = [(match.start(), kind, match) for kind, one in CAUSES.items() if (match := one.search(text))]
    line = of_unknown_key(text)
    if found and line is None:
        start, kind, match = min(found, key=lambda one: one[0])
        place = place_of(text[:start], text[match.end() :])
        line = LINES[kind](place, match)
    return clipped(line or text)


def place_of(before: str, after: str) -> Place:
    """The keys and the class around the cause of an error, from the message before and after it."""
    named = list(re.finditer(r"class_path '([\w.]+)'", before))
    # of a class in a function's place, as an optimizer's, the path comes after the message
    inner = INNER.search(after) if "callable class" in before[named[-1].end() if named else 0 :] else None
    owner = inner[1] if inner else named[-1][1] if named else ""
    return Place(key_in(before), owner, before, after)


def key_in(message: str) -> str:
    """The keys of a parser's message, joined by dots."""
    return ".".join(re.findall(r'Parser key "([^"]+)"', message))


def of_unknown_key(text: str) -> str | None:
    """The line about a key that the parser does not have; None where the message is not about one."""
    match = re.search(r"(?:does not accept option|^Option) '([^']+)'|^unrecognized arguments: --([\w.+]+)", text)
    if match is None:
        return None
    key = match[1] or match[2]
    if key.partition(".")[0] == "axes":
        return "axes: no such key; a file with axes is a suite: run it with bench SUITE"
    if text.startswith("unrecognized"):
        return f"no such key (--help lists them): {text.partition(': ')[2]}{near(key, keys_of_trainer())}"
    return f"{key}: no such key (--help lists them){near(key, keys_of_trainer()) or '; remove it'}"


def keys_of_trainer() -> list[str]:
    """The keys of a config that are not arguments of a class which the config names."""
    from fl_lightning.trainer import FederatedTrainer

    names = list(inspect.signature(FederatedTrainer).parameters)
    top = ("seed_everything", "model", "data", "method", "ckpt_path", "weights", "trainer")
    return [*top, *(f"trainer.{name}" for name in names)]


def of_option(place: Place, match: re.Match[str]) -> str | None:
    """The line about an argument that a class does not have."""
    name, names = match["name"], parameters(place.owner)
    if name in ("class_path", "init_args"):
        return f"{place.key}: arguments stand under init_args; give {{class_path: CLASS, init_args: {{NAME: VALUE}}}}"
    listed = ", ".join(names) or "no arguments"
    return f"{place.key}: {short(place.owner)} has no {name!r}; it takes {listed}{near(name, [*names, 'class_path'])}"


def of_required(place: Place, match: re.Match[str]) -> str:
    """The line about an argument that is missing."""
    where = f"{short(place.owner)}." if place.owner else ""
    return f"{where}{match['name']}: it is required; give a value"


def of_class(place: Place, match: re.Match[str]) -> str:
    """The line about a class that cannot be imported, has the wrong base or is abstract."""
    given = match.groupdict()
    value = given.get("value") or class_in(place)
    theirs = lightning_callback(value) if place.key.endswith("callbacks") else None
    if theirs:
        return f"{place.key}={value!r}: it is a callback of Lightning's own trainer; {replacement(theirs)}"
    why = match["why"].replace("a subclass", "it is no subclass").replace("dot import path", "no such class")
    why = f"{short(value)} is abstract" if why == "abstract" else why
    known = known_classes(place.key)
    suggestion = near(short(value), [*known, *members(given.get("module"))])
    return f"{place.key}={value!r}: {why}; give {known_for(place.key)}MODULE.CLASS of your own{suggestion}"


def class_in(place: Place) -> str:
    """The class that a message says cannot be imported: the one around the cause, or the value itself."""
    given = re.search(r"Given value: ([\w.]+)", place.after)
    callable_ = place.before.endswith("callable class: ") and not INNER.search(place.after)
    return given[1] if given and (callable_ or not place.owner) else place.owner


def of_entries(place: Place, match: re.Match[str]) -> str:
    """The line about ``init_args`` that are no mapping."""
    kind = match["kind"].replace("NoneType", "null")
    return f"{place.key}: {short(place.owner)}.init_args={kind}: give a mapping of its arguments, or leave it out"


def of_key(place: Place, match: re.Match[str]) -> str:
    """The line about a key that can be no name."""
    return f"{place.key or 'config'}: {match['name']} is no key; give the name of an argument"


def of_spec(place: Place, match: re.Match[str]) -> str:
    """The line about a value that names no class where one belongs."""
    kind = "a list of classes" if "Subtypes: [list[" in place.before else "a class"
    value = value_in(place.after)
    entries = re.findall(r"'(\w+)': ", value)[:1]
    suggestion = near(entries[0], ["class_path", "init_args"]) if entries else ""
    hint = f"give {kind}: {known_for(place.key)}MODULE.CLASS of your own, with class_path and init_args{suggestion}"
    return f"{place.key}={brief_text(value)}: {hint}"


def of_value(place: Place, match: re.Match[str]) -> str:
    """The line about a value that does not fit its type, plain or one of several."""
    # of several types, the last to be told is null; what was told of the first had another form
    last = ".*" if "NoneType" in match["type"] else ""
    several = re.search(rf"Subtypes: \[((?:(?!Subtypes: ).)*?)\] Errors: - {last}$", place.before)
    value = brief_text(value_in(place.after))
    owner = f"{short(place.owner)}." if place.owner else ""
    key = re.findall(r'Parser key "([^"]+)"(?: element \d+)?', place.before)
    where = owner + (key[-1] if key else "")
    return f"{where}={value}: give {wanted(several[1] if several else match['type'])}"


def of_unloaded(place: Place, match: re.Match[str]) -> str:
    """The line about a section of the config that is no mapping."""
    hint = "give a mapping of its arguments, or the path of a file that holds one"
    return f"{place.key or 'config'}={brief_text(match['value'].strip(chr(39) + chr(34)))}: {hint}"


def of_file(place: Place, match: re.Match[str]) -> str:
    """The line about a file of a config that cannot be read."""
    hint = f"{match['why'].lower()}; give the path of a file that can be read"
    if place.key in ("", "config"):
        hint += f", or a config of the package: {names_near(os.path.relpath(match['value']))}"
    return f"{place.key or 'config'}={os.path.relpath(match['value'])!r}: {hint}"


LINES = {
    "option": of_option,
    "required": of_required,
    "import": of_class,
    "module": of_class,
    "attribute": of_class,
    "base": of_class,
    "abstract": of_class,
    "entries": of_entries,
    "key": of_key,
    "spec": of_spec,
    "value": of_value,
    "file": of_file,
    "unloaded": of_unloaded,
}


def value_in(after: str) -> str:
    """The value that a message gives after the cause of the error, without the other types that it does not fit."""
    match = GIVEN.search(after)
    value = (match[1] or match[2] or "").strip() if match else ""
    nested = NESTED.search(value)
    return nested[1].strip("'") if nested else value


def brief_text(value: str) -> str:
    """A value as it is shown in a line, in quotation marks and not too long."""
    return "null" if value == "None" else repr(value if len(value) <= 60 else f"{value[:57]}...")


def near(name: str, known: list[str]) -> str:
    """A hint to the nearest of the known names; empty where none is near."""
    last, initials = name.rsplit(".", 1)[-1].lower(), "".join(part[:1] for part in name.split("_"))
    by_end = {one.rsplit(".", 1)[-1].lower(): one for one in reversed(known)}
    matches = [initials] if initials in by_end else get_close_matches(last, by_end, 1)
    return f"; did you mean {by_end[matches[0]]}?" if matches and by_end[matches[0]] != name else ""


def members(module: str | None) -> list[str]:
    """The public classes of a module; none of one that cannot be imported."""
    try:
        names = vars(import_module(module)) if module else {}
    except ImportError:
        return []
    return [name for name, one in names.items() if isinstance(one, type) and name[0] != "_"]


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
    plain = re.sub(CLASS_REPR, "", kind)
    plain = re.sub(r"typing\.Callable\[\[.*?\], ([\w.]+)\]", lambda match: f"the class of {short(match[1])}", plain)
    return f"a value of type {plain.replace(', ', ' or ')}".replace("NoneType", "null")


def parameters(path: str) -> list[str]:
    """The arguments of the constructor of the class at ``path``, with those that ``**kwargs`` passes to its bases."""
    module, name = path.rsplit(".", 1)
    kind = getattr(import_module(module), name)
    names: dict[str, None] = {}
    bases: tuple[Any, ...] = kind.__mro__ if isinstance(kind, type) else ()
    for base in bases:
        if "__init__" in vars(base) and base is not object:
            taken = inspect.signature(base.__init__).parameters.values()
            names |= {p.name: None for p in taken if p.name not in ("self", "params") and p.kind is not p.VAR_KEYWORD}
            if all(p.kind is not p.VAR_KEYWORD for p in taken):
                break
    return list(names)


def known_classes(key: str) -> list[str]:
    """The names of our classes for a key."""
    base = BASES.get(key.rsplit(".", 1)[-1])
    return sorted({kind.__name__ for kind in subclasses(base)}) if base else []


def known_for(key: str) -> str:
    """The names of our classes for a key, as ``one of A, B, or``; empty for a key without classes of ours."""
    names = known_classes(key)
    return f"one of {', '.join(names)}, or " if names else ""


def subclasses(base: type) -> list[type]:
    """The concrete subclasses that this package defines for configs, at any depth."""
    children: list[type] = base.__subclasses__()
    kinds = [kind for child in children for kind in (child, *subclasses(child))]
    ours = [kind for kind in kinds if kind.__module__.startswith(NAMED)]
    return [kind for kind in ours if not inspect.isabstract(kind) and not kind.__name__.startswith("_")]
