"""Shortens the errors of the config parser, which can fill pages, to one line: key, value and remedy."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, get_origin

import torch
from lightning.pytorch import LightningModule

from fl_lightning import callbacks, data, methods, models, optim
from fl_lightning.callbacks import Callback
from fl_lightning.cli.config_checks import constructors
from fl_lightning.cli.config_files import class_hint, keys_of, no_argument, unknown_key
from fl_lightning.core import clock, sampling, systems
from fl_lightning.core.method import Method
from fl_lightning.data import Augmentation, FederatedDataModule, Partitioner
from fl_lightning.models import Encoder
from fl_lightning.models.projector import BaseProjector
from fl_lightning.utilities.bundled_configs import names_near, packaged_config
from fl_lightning.utilities.errors import last_part, near, truncate
from fl_lightning.utilities.lightning_compat import classes
from fl_lightning.utilities.lightning_replacements import replacement_of_callback

BASES: dict[str, type] = {
    "method": Method,
    "callbacks": Callback,
    "data": FederatedDataModule,
    "model": LightningModule,
    "partitioner": Partitioner,
    "augment": Augmentation,
    "encoder": Encoder,
    "projector": BaseProjector,
    "sampler": sampling.Sampler,
    "server_optimizer": torch.optim.Optimizer,
    "systems": systems.SystemsHeterogeneity,
    "clock": clock.Clock,
    "asynchronous": clock.Buffered,
}
# The innermost cause of an error. Of several types, the parser reports first the one that fits the value best, and an
# inner error follows the outer ones: so the first of these sentences is the cause.
CAUSE = re.compile(
    r"^unrecognized arguments: (?P<word>\S+)"
    r"|(?:does not accept option|^Option) '(?P<unknown>[^']+)'"
    r"|Option '(?P<option>[^']+)' is not accepted"
    r"|the following arguments are required: (?P<required>[\w.]+)"
    r"|(?P<import>Expected a dot import path string|No module named '[\w.]+'|module '[\w.]+' has no attribute '\w+'"
    r"|Import path (?:[\w.]+ )?does not correspond to a subclass of \w+"
    r"|Expected '[\w.]+' to be a subclass of <class '\w+'>"
    r"|\"[\w.]+\" is not a subclass of \w+"
    r"|Expected an instantiatable class, but (?:[\w.]+ )?is abstract"
    r"|Multiple subclasses with name \w+\. .*?: [\w., ]+(?=\.))"
    r"|(?P<spec>Not a valid subclass of|Dict must include a class_path|Expected an import path or a subclass spec)"
    r"|Expected an? (?P<type>(?:<class '[\w.]+'>|[\w.]+(?:\[.*?\])?))(?=\.? |\.?$)"
    r"|(?P<file>File does not exist|Path is not a file|File is not readable): "
    r"|(?P<unloaded>Unable to load config) "
)
# rewrites the parser's sentences about an import
IN_WORDS = (
    (r"Expected a dot import path string", "no such class"),
    (r".*to (?:be )?a subclass of (?:<class ')?(\w+).*", r"not a subclass of \1"),
    (r"\".*\" is (not a subclass of \w+)", r"\1"),
    (r".*is abstract", "it is abstract"),
    (r"Multiple .*?: (.*)", r"several have this name: \1"),
    (r"(No module named .*)", r"\1 in the working folder and on PYTHONPATH"),
)
# the value, up to the next sentence; some sentences end with it
GIVEN = re.compile(r"(?:Got|Given) value: (.*?)(?:\. Got value:| Subclass types expect| - |\. *$|$)")
NOT_A_PATH = re.compile(r"- Expected a path but .*? either not accessible or invalid - ")
# the options of classes that are parts of a model or of data
PARTS = {
    "encoder": "--model=ImageClassifier --model.encoder",
    "projector": "--model=ImageClassifier --model.projector",
    "partitioner": "--data=Digits --data.partitioner",
    "augment": "--data=Digits --data.augment",
}
# the keys whose values are lists of classes
LISTS = ("method", "trainer.callbacks", "trainer.logger")


def is_class(value: Any) -> bool:
    """Whether a value is a class; ``isclass`` of Python 3.10 is true of types such as ``list[int]``, too."""
    return inspect.isclass(value) and get_origin(value) is None


# the classes of this package that a config names, without those that do nothing by themselves
CLASSES = {
    name: value
    for module in (callbacks, data, methods, models, optim, clock, sampling, systems)
    for name, value in vars(module).items()
    if is_class(value) and not inspect.isabstract(value)
    if value not in (Callback, Encoder, Method) and not name.startswith("_")
}


def shorten(message: str) -> str:
    """The key, the value and the hint in a parser's message, where its form is known; else the message on one line."""
    text = NOT_A_PATH.sub("", " ".join(message.split()))
    causes = [*CAUSE.finditer(text)]
    if not causes:
        return truncate(text)
    # a list of classes is first tried as a single one, or a single class as a list
    second = causes[1].lastgroup if len(causes) > 1 else ""
    as_list = causes[0]["type"] == "<class 'list'>" and second in ("import", "spec")
    as_one = causes[0].lastgroup == "spec" and given_value(text[causes[0].end() :])[1][:1] == "["
    match = causes[bool(second) and (as_list or as_one)]
    kind, part = str(match.lastgroup), match[str(match.lastgroup)]
    before, after = text[: match.start()], text[match.end() :]
    # the help of a class is an option of its own
    keys = re.findall(r'Parser key "([^"]+)"', before) or re.findall(r"--([\w.]+\.help): $", before)
    nested, value = given_value(after)
    key = ".".join(keys) or "config"
    owner = (["", *re.findall(r"class_path '([\w.]+)'", before)])[-1]
    if "callable class" in before[max(before.rfind("class_path '"), 0) :]:
        # of a class in the place of a function, such as an optimizer, the path comes last
        owner = (re.findall(r"class_path='([\w.]+)'", after) or [owner])[0]
    of_class = f"{last_part(owner)}." if owner else ""
    if kind == "word" and part[:2] != "--":
        is_config = part.endswith((".yaml", ".yml")) or packaged_config(part)
        hint = f"--config {part}" if is_config else "--KEY before its value"
        return f"{part}: no key stands before it; give {hint}"
    if kind in ("word", "unknown"):
        # an argument of a class that the config names has another cause
        return unknown_key(part.partition("=")[0], keys_of("fit"))
    if kind == "option":
        name, names = part.split(".")[0], parameters(owner)
        if name in ("class_path", "init_args"):
            return f"{key}: arguments stand under init_args; give {{class_path: CLASS, init_args: {{NAME: VALUE}}}}"
        return no_argument(key, last_part(owner), name, names)
    if kind == "required":
        name = last_part(part)
        if not owner and name in ("model", "data"):
            return f"{name}: it is required; pass a config by --config FILE, or a class by --{name}"
        return f"{of_class}{part}: it is required; pass a value"
    if kind == "import":
        named = re.match(r": ([\w.]+)", after) or re.search(r"^(?:Import path |Multiple.*?name |\")([\w.]+\b)", part)
        path = named[1] if named and named[1] != "does" else value if re.fullmatch(r"[\w.]+", value) else owner or value
        return about_class(key, path, part)
    if kind == "spec":
        entries = re.findall(r"'(\w+)': ", value)[:1]
        hint = near(entries[0], ["class_path", "init_args"]) if entries else ""
        hint = f"; {hint}" if hint else f" of a class: {known_for(key)}"
        return f"{key}={brief(value)}: give class_path and init_args{hint}"
    if kind == "type":
        below = "" if key.endswith(nested) else f".{nested}"
        where = key + below if below else f"{of_class}{(keys or [key])[-1]}"
        return about_type(where, key + below, value, part, before)
    if kind == "file":
        path = os.path.relpath(after.strip("'"))
        return f"{key}={path!r}: {part.lower()}; pass another one, or a config of the package: {names_near(path)}"
    value = re.split(r" - | Parser key", after)[0].strip("'\"")
    return f"{key}={brief(value)}: pass a mapping of its arguments, or a file that holds one"


def given_value(text: str) -> tuple[str, str]:
    """The first value in a text, after the argument of a class to which a command line gives it, or else nothing."""
    match = GIVEN.search(text)
    value = match[1].strip() if match else ""
    nested = re.search(r"NestedArg\(key='([^']*)', val=(.+)\)$", value)
    return (nested[1], nested[2].strip("'")) if nested else ("", value)


def about_class(key: str, path: str, why: str) -> str:
    """The line about a class that cannot be imported or does not suit its key."""
    module, _, name = path.rpartition(".")
    callback = getattr(sys.modules.get(module or "lightning.pytorch.callbacks"), name, None)
    if "callbacks" in key and isinstance(callback, type) and issubclass(callback, classes("Callback")):
        return f"{key}={path!r}: it is a callback of Lightning's Trainer; {replacement_of_callback(callback)}"
    for pattern, words in IN_WORDS:
        why = re.sub(pattern, words, why)
    builder = getattr(sys.modules.get(module), name, None)
    if inspect.isfunction(builder) and "return" not in builder.__annotations__:
        kind = why.rpartition(" ")[2]
        return f"{key}={path!r}: the function does not say what it returns; write def {name}(...) -> {kind}"
    base = BASES.get(last_part(key), object)
    members = inspect.getmembers(sys.modules[module], inspect.isclass) if module in sys.modules else []
    of_module = [member for member, kind in members if issubclass(kind, base) and kind is not base]
    return f"{key}={path!r}: {why}; give {known_for(key, path, of_module)}"


def about_type(where: str, key: str, value: str, kind: str, before: str) -> str:
    """The line about a value that does not fit its type, which may be one of several."""
    if re.fullmatch(r"[A-Za-z_]\w*", value) and value != "None" and known_classes(key):
        return about_class(key, value, "no such class")
    # the types stand before the error of the first, or of null, which comes last
    errors = r".*$" if "NoneType" in kind else r"$"
    several = re.search(r"Subtypes: \[((?:(?!Subtypes: ).)*?)\] Errors: - " + errors, before)
    kind = re.sub(r"<class '|'>", "", several[1] if several else kind).replace("NoneType", "null")
    quote = re.fullmatch(r"True|False|None|[-+.\d]+", value) and re.search(r"\bstr\b", kind) and "float" not in kind
    hint = "; quote each text that YAML reads otherwise, such as no, 1 and null" if quote else ""
    hint = hint or ("; write a list as [A, B]" if "list[" in kind else "")
    kind = re.sub(r"typing\.Callable\[\[.*?\], ([\w.]+)\]", lambda match: f"the class of {last_part(match[1])}", kind)
    literal = re.fullmatch(r"typing.Literal\[(.+?)\](, null)?", kind)
    words = literal[1].replace("'", "") + (literal[2] or "") if literal else f"a value of type {kind}"
    return f"{where}={brief(value)}: give {words.replace(', ', ' or ')}{hint}"


def brief(value: str) -> str:
    """A value as a line shows it, in quotation marks and not too long."""
    return "null" if value == "None" else repr(value if len(value) <= 60 else f"{value[:57]}...")


def parameters(path: str) -> list[str]:
    """The arguments of the constructor of the class at ``path``, with those that ``**kwargs`` passes to its bases."""
    module, name = path.rsplit(".", 1)
    names: dict[str, None] = {}
    for _, of_constructor in constructors(getattr(import_module(module), name)):
        for parameter in of_constructor:
            if parameter.name not in ("self", "params") and parameter.kind is not parameter.VAR_KEYWORD:
                names[parameter.name] = None
    return list(names)


def known_for(key: str, value: str = "", of_module: Sequence[str] = ()) -> str:
    """A hint to a class for a key: the one whose name is nearest to a value's, or all of this package.

    A class of another key, such as an encoder as the model, has the option of that key.
    """
    name, names = last_part(value), known_classes(key)
    for part, option in PARTS.items() if name not in names else ():
        if name in known_classes(part):
            ending = ".help" if key.endswith(".help") else ""
            return f"{option}{ending}={name}, since it is of the key {option.split('--')[-1]}"
    return class_hint(value, names, of_module)


def known_classes(key: str) -> list[str]:
    """The names of the classes of this package, or of Fabric's loggers, that a key takes."""
    if last_part(key) == "logger":
        return ["CometLogger", "CSVLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]
    base = BASES.get(last_part(key.removesuffix(".help")), ())
    return sorted(name for name, kind in CLASSES.items() if issubclass(kind, base))
