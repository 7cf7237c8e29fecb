"""Shortens the error messages of a config parser, which can fill pages, to one line."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule

from fl_lightning.callbacks import Callback
from fl_lightning.callbacks.refused import replacement
from fl_lightning.cli.config import constructors
from fl_lightning.data import Augmentation, FederatedDataModule, Partitioner
from fl_lightning.errors import choices, clipped
from fl_lightning.method import Method
from fl_lightning.models import Encoder
from fl_lightning.models.projector import BaseProjector
from fl_lightning.namespaces import classes
from fl_lightning.packaged import names_near
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
FOLDERS_OF_CLASSES = tuple(
    f"fl_lightning.{part}" for part in ("callbacks", "data", "methods", "models", "optim", "sampling")
)
# What a parser says at the innermost place of an error. In its text, the first error of several is that of the type
# which fits the value best, and what is within comes after what it is in: the first such sentence is the cause.
CAUSES = {
    "option": re.compile(r"Option '(?P<name>[^']+)' is not accepted"),
    "ambiguous": re.compile(r"Multiple subclasses with name (?P<value>\w+)\. .*?: (?P<paths>[\w., ]+)\."),
    "required": re.compile(r"the following arguments are required: (?P<name>[\w.]+)"),
    "import": re.compile(r"Expected a (?P<why>dot import path) string: (?P<value>[^\s-]+)"),
    "module": re.compile(r"(?P<why>No module named '[\w.]+')"),
    "attribute": re.compile(r"(?P<why>module '(?P<module>[\w.]+)' has no attribute '\w+')"),
    "base": re.compile(r"Import path (?:(?P<value>[\w.]+) )?does not correspond to (?P<why>a subclass of \w+)"),
    "abstract": re.compile(r"Expected an instantiatable class, but (?:(?P<value>[\w.]+) )?is (?P<why>abstract)"),
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
NESTED_ARGUMENT = re.compile(r"NestedArg\(key='[^']*', val=(.+)\)$")
NOT_A_PATH = re.compile(r"- Expected a path but .*? either not accessible or invalid - ")
# what is said of a list as the one object that it may be, too, before its entries are
AS_ONE = re.compile(
    r"(?<=Subtypes: \[<class )(.*? Errors: )- Not .*? - (?=Problem|Not|Multiple|Expected)(?=.*: \[.*\]$)"
)
# the keys whose values are lists of classes
LISTS = ("method", "trainer.callbacks", "trainer.logger")
# arguments of Lightning's trainer, with those that stand for them here
OF_LIGHTNING = {"max_epochs": "max_rounds", "check_val_every_n_epoch": "eval_every_n_rounds"}


class ErrorPlace(NamedTuple):
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
    text = AS_ONE.sub(r"\1- ", NOT_A_PATH.sub("", " ".join(message.split())))
    causes = [(match.start(), kind, match) for kind, cause in CAUSES.items() if (match := cause.search(text))]
    line = line_of_unknown_key(text)
    if causes and line is None:
        start, kind, match = min(causes, key=lambda cause: cause[0])
        before, after = text[:start], text[match.end() :]
        classes_before = list(re.finditer(r"class_path '([\w.]+)'", before))
        end = classes_before[-1].end() if classes_before else 0
        # of a class in a function's place, as an optimizer's, the path comes after the message
        inner = INNER.search(after) if "callable class" in before[end:] else None
        owner = inner[1] if inner else classes_before[-1][1] if classes_before else ""
        key = key_in(before)
        line = LINE_OF_CAUSE[kind](ErrorPlace(key, owner, before, after), match)
        if key in LISTS and line is not None and line.startswith((f"{key}=", f"{key}:")):
            line = f"{key}{entry_in(text)}{line.removeprefix(key)}"
    return line or clipped(text)


def entry_in(text: str) -> str:
    """The place of the first entry of a list that does not fit, such as ``[1]``; empty where the value is no list."""
    given, found = text.rpartition("Given value: ")[2], 1
    if not given.startswith("["):
        return ""
    inner = given[1:-1]
    while found:
        inner, found = re.subn(r"\([^()]*\)|\[[^][]*\]|\{[^{}]*\}", "", inner)
    # an entry that fits is a namespace by then
    return next((f"[{place}]" for place, entry in enumerate(inner.split(", ")) if entry != "Namespace"), "")


def key_in(message: str) -> str:
    """The keys of a parser's message, joined by dots."""
    return ".".join(re.findall(r'Parser key "([^"]+)"', message))


def line_of_unknown_key(text: str) -> str | None:
    """The line about a key that the parser does not have; None where the message is not about one."""
    word = re.match(r"unrecognized arguments: ([^\s-]\S*)", text)
    if word is not None:
        hint = f"--config {word[1]}" if word[1].endswith((".yaml", ".yml")) else "--KEY before its value"
        return f"{word[1]}: no key stands before it; give {hint}"
    match = re.search(r"(?:does not accept option|^Option) '([^']+)'|^unrecognized arguments: --([\w.+]+)", text)
    if match is None:
        return None
    from fl_lightning.trainer import FederatedTrainer

    # the keys that are not arguments of a class which the config names
    keys = ["seed_everything", "model", "data", "method", "ckpt_path", "weights", "trainer"]
    keys += [f"trainer.{name}" for name in inspect.signature(FederatedTrainer).parameters]
    key = match[1] or match[2]
    if text.startswith("unrecognized"):
        return f"no such key (--help lists them): {text.partition(': ')[2]}{near(key, keys)}"
    return f"{key}: no such key (--help lists them){near(key, keys) or '; remove it'}"


def line_of_option(place: ErrorPlace, match: re.Match[str]) -> str | None:
    """The line about an argument that a class does not have."""
    name, names = match["name"].split(".")[0], parameters(place.owner)  # without the keys below it
    if name in ("class_path", "init_args"):
        return f"{place.key}: arguments stand under init_args; give {{class_path: CLASS, init_args: {{NAME: VALUE}}}}"
    hint = near(name, [*names, "class_path"]) or f"; it takes {choices(names, name)}"
    return f"{place.key}: {last_part(place.owner)} has no {name!r}{hint}"


def line_of_required(place: ErrorPlace, match: re.Match[str]) -> str:
    """The line about an argument that is missing."""
    where, name = f"{last_part(place.owner)}." if place.owner else "", match["name"]
    if not where and last_part(name) in ("model", "data"):
        return f"{last_part(name)}: it is required; give a config by --config FILE, or a class by --{last_part(name)}"
    return f"{where}{name}: it is required; give a value"


def line_of_class(place: ErrorPlace, match: re.Match[str]) -> str:
    """The line about a class that cannot be imported, has the wrong base or is abstract."""
    groups = match.groupdict()
    value = groups.get("value")
    if not value:
        # the class around the cause, or the value itself
        quoted = re.search(r"Given value: ([\w.]+)", place.after)
        callable_ = place.before.endswith("callable class: ") and not INNER.search(place.after)
        value = quoted[1] if quoted and (callable_ or not place.owner or match["why"] == "abstract") else place.owner
    theirs = lightning_callback(value) if place.key.endswith("callbacks") else None
    if theirs:
        return f"{place.key}={value!r}: it is a callback of Lightning's own trainer; {replacement(theirs)}"
    why = match["why"].replace("a subclass", "it is no subclass").replace("dot import path", "no such class")
    why = f"it is abstract{lacking(value, place.key)}" if why == "abstract" else why
    return f"{place.key}={value!r}: {why}; give {known_for(place.key, value, members(groups.get('module')))}"


def line_of_entries(place: ErrorPlace, match: re.Match[str]) -> str:
    """The line about ``init_args`` that are no mapping."""
    kind = match["kind"].replace("NoneType", "null")
    return f"{place.key}: {last_part(place.owner)}.init_args={kind}: give a mapping of its arguments, or leave it out"


def line_of_key(place: ErrorPlace, match: re.Match[str]) -> str:
    """The line about a key that can be no name."""
    return f"{place.key or 'config'}: {match['name']} is no key; give the name of an argument"


def line_of_spec(place: ErrorPlace, match: re.Match[str]) -> str:
    """The line about a value that names no class where one belongs."""
    value = value_in(place.after)
    entries = re.findall(r"'(\w+)': ", value)[:1]
    suggestion = near(entries[0], ["class_path", "init_args"]) if entries else ""
    hint = f"give class_path and init_args{suggestion or f' of a class: {known_for(place.key)}'}"
    return f"{place.key}={brief_text(value)}: {hint}"


def line_of_value(place: ErrorPlace, match: re.Match[str]) -> str:
    """The line about a value that does not fit its type, plain or one of several."""
    # of several types, the last to be told is null; what was told of the first had another form
    last = ".*" if "NoneType" in match["type"] else ""
    several = re.search(rf"Subtypes: \[((?:(?!Subtypes: ).)*?)\] Errors: - {last}$", place.before)
    value = brief_text(value_in(place.after))
    owner = f"{last_part(place.owner)}." if place.owner else ""
    key = re.findall(r'Parser key "([^"]+)"(?: element \d+)?', place.before)
    where = owner + (key[-1] if key else "")
    if re.fullmatch(r"'[A-Za-z_]\w*'", value) and known_classes(place.key):
        return f"{place.key}={value}: no such class; give {known_for(place.key, value.strip(chr(39)))}"
    kind = several[1] if several else match["type"]
    other = re.fullmatch(r"'(True|False|[-+.\d]+)'|null", value) and re.search(r"\bstr\b", kind) and "float" not in kind
    hint = "; quote each text that YAML reads otherwise, such as no, 1 and null" if other else ""
    return f"{where}={value}: give {wanted(kind)}{hint}"


def line_of_unloaded(place: ErrorPlace, match: re.Match[str]) -> str:
    """The line about a section of the config that is no mapping."""
    hint = "give a mapping of its arguments, or the path of a file that holds one"
    return f"{place.key or 'config'}={brief_text(match['value'].strip(chr(39) + chr(34)))}: {hint}"


def line_of_file(place: ErrorPlace, match: re.Match[str]) -> str:
    """The line about a file of a config that cannot be read."""
    hint = f"{match['why'].lower()}; give the path of a file that can be read"
    if place.key in ("", "config"):
        hint += f", or a config of the package: {names_near(os.path.relpath(match['value']))}"
    return f"{place.key or 'config'}={os.path.relpath(match['value'])!r}: {hint}"


LINE_OF_CAUSE = {
    "option": line_of_option,
    "ambiguous": lambda place, match: (
        f"{place.key}={match['value']!r}: several have this name; give one of {match['paths']}"
    ),
    "required": line_of_required,
    "import": line_of_class,
    "module": line_of_class,
    "attribute": line_of_class,
    "base": line_of_class,
    "abstract": line_of_class,
    "entries": line_of_entries,
    "key": line_of_key,
    "spec": line_of_spec,
    "value": line_of_value,
    "file": line_of_file,
    "unloaded": line_of_unloaded,
}


def value_in(after: str) -> str:
    """The value that a message gives after the cause of the error, without the other types that it does not fit."""
    match = GIVEN.search(after)
    value = (match[1] or match[2] or "").strip() if match else ""
    nested = NESTED_ARGUMENT.search(value)
    return nested[1].strip("'") if nested else value


def brief_text(value: str) -> str:
    """A value as it is shown in a line, in quotation marks and not too long."""
    return "null" if value == "None" else repr(value if len(value) <= 60 else f"{value[:57]}...")


def near(name: str, known: list[str]) -> str:
    """A hint to the nearest of the known names; empty where none is near."""
    last, initials = last_part(name).lower(), "".join(part[:1] for part in name.split("_"))
    by_end = {last_part(candidate).lower(): candidate for candidate in reversed(known)}
    ours = OF_LIGHTNING.get(last, initials)
    matches = [ours] if ours in by_end else get_close_matches(last, by_end, 1)
    return f"; did you mean {by_end[matches[0]]}?" if matches and by_end[matches[0]] != name else ""


def members(module: str | None) -> list[str]:
    """The public classes of a module; none of one that cannot be imported."""
    try:
        names = vars(import_module(module)) if module else {}
    except ImportError:
        return []
    return [name for name, kind in names.items() if isinstance(kind, type) and name[0] != "_"]


def lacking(path: str, key: str) -> str:
    """What an abstract class leaves to its subclasses, as the end of a sentence; empty where that is not known."""
    module, _, name = path.rpartition(".")
    base = BASES.get(last_part(key))
    # without a module it is a short name, of a class that stands for the key
    kinds = [getattr(import_module(module), name)] if module else [base, *(descendants(base) if base else [])]
    kind = next((kind for kind in kinds if kind is not None and kind.__name__ == name), None)
    missing = ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))
    return f", without {missing}, which a subclass has to define" if missing else ""


def lightning_callback(path: str) -> type | None:
    """The callback of Lightning's own trainer at a class path or of a short name; None where it is no such class."""
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(module or "lightning.pytorch.callbacks"), name, None)
    except ImportError:
        return None
    return kind if isinstance(kind, type) and issubclass(kind, classes("Callback")) else None


def last_part(path: str) -> str:
    """The last part of a dotted name, such as the name of a class without its module."""
    return path.rsplit(".", 1)[-1]


def wanted(kind: str) -> str:
    """The values that a type allows, in words: ``a or b`` for ``typing.Literal['a', 'b']``."""
    choices = re.match(r"typing.Literal\[(.+?)\](, NoneType)?$", kind)
    if choices:
        return " or ".join(re.findall(r"'([^']*)'", choices[1])) + (" or null" if choices[2] else "")
    plain = re.sub(r"<class '|'>", "", kind)
    plain = re.sub(r"typing\.Callable\[\[.*?\], ([\w.]+)\]", lambda match: f"the class of {last_part(match[1])}", plain)
    return f"a value of type {plain.replace(', ', ' or ')}".replace("NoneType", "null")


def parameters(path: str) -> list[str]:
    """The arguments of the constructor of the class at ``path``, with those that ``**kwargs`` passes to its bases."""
    module, name = path.rsplit(".", 1)
    taken = [parameter for _, own in constructors(getattr(import_module(module), name)) for parameter in own]
    return list(
        dict.fromkeys(p.name for p in taken if p.name not in ("self", "params") and p.kind is not p.VAR_KEYWORD)
    )


def known_classes(key: str) -> list[str]:
    """The names of our classes for a key."""
    base = BASES.get(last_part(key))
    return sorted({kind.__name__ for kind in subclasses(base)}) if base else []


def known_for(key: str, value: str = "", others: Sequence[str] = ()) -> str:
    """A hint to a class for a key: the one whose name is nearest to a value's, or all of ours."""
    names = known_classes(key)
    suggestion = near(last_part(value), [*names, *others]) if value else ""
    ours = f", or one of {choices(names, value)}" if names and not suggestion else ""
    return f"MODULE.CLASS of your own{ours}{suggestion}"


def descendants(base: type) -> list[type]:
    """All subclasses of a class, at any depth."""
    children: list[type] = base.__subclasses__()
    return [kind for child in children for kind in (child, *descendants(child))]


def subclasses(base: type) -> list[type]:
    """The concrete subclasses that this package defines for configs, at any depth."""
    ours = [kind for kind in descendants(base) if kind.__module__.startswith(FOLDERS_OF_CLASSES)]
    return [kind for kind in ours if not inspect.isabstract(kind) and not kind.__name__.startswith("_")]
