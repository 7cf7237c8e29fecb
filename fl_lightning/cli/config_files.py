"""Reads the configs of a command line, and refuses unknown keys, before torch and Lightning are imported."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.utilities.bundled_configs import names_near, packaged_config
from fl_lightning.utilities.errors import UsageError, choices, near
from fl_lightning.utilities.lightning_replacements import replacement_of_key
from fl_lightning.utilities.yaml_files import parse_yaml, read_yaml

PACKAGE = Path(__file__).parents[1]
# keys of all commands beside the arguments of the command
COMMON_KEYS = ("seed_everything", "model", "data", "trainer", "config", "print_config", "help")
# modules that define no methods
LIBRARIES = {"fl_lightning", "lightning", "torch", "torchvision"}
# an argument of one class of a list by its number, which the parser does not know
ITEM_OF_LIST = re.compile(r"--(method|trainer\.(?:callbacks|logger))\.[0-9]+(\.|$)")
# commands that read a checkpoint
OF_CHECKPOINTS = ("fit", "doctor", "validate", "test", "predict", "replay")


def check_command(words: Sequence[str]) -> None:
    """Check the configs and the keys of a command line; the parser checks the rest.

    Raises:
        UsageError: a config does not exist or is not YAML, or a key of it or of the command line is unknown.
    """
    command, *options = words
    keys, values = keys_of(command), dict[str, Any]()
    for option, value in pairs_of(options):
        if option == "--config":
            entries = config_and_entries(value)[1]
            check_keys(entries, keys)
            values.update(entries)
        else:
            key = ITEM_OF_LIST.match(option)
            if key is not None:
                hint = f"an option sets the last of a list: give it before the next --{key[1]}+=CLASS, or use --config"
                raise UsageError(f"{option}={value!r}: {hint}")
            check_key(option, keys)
            values[option.removeprefix("--")] = value
    check_methods(values)
    if command in OF_CHECKPOINTS:
        check_checkpoint(values)


def pairs_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command line with their values, given as ``--key value`` or ``--key=value``."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option != "--":
            yield option, value if equals else after


def config_and_entries(value: str) -> tuple[str, Mapping[str, Any]]:
    """Return the file that the option ``--config`` names, which the package may carry, and its entries.

    The value may also be the entries themselves, as YAML. A pipe is left to the parser, as having no entries.

    Raises:
        UsageError: the file does not exist, is not YAML, or is not a config.
    """
    # a folder of data does not hide the config data/cifar10
    path = value if os.path.exists(value) and not os.path.isdir(value) else str(packaged_config(value) or value)
    if os.path.isfile(path):
        entries = read_yaml(Path(path))
        if not isinstance(entries, Mapping):
            hint = "give keys with their values, such as trainer: {max_rounds: 10}"
            raise UsageError(f"{path}: the file holds no mapping; {hint}")
        if "axes" in entries:
            raise UsageError(f"{path}: is a suite, not a config; run it with bench {path}")
        return path, entries
    if os.path.exists(path) or value == "-":
        return path, {}
    try:
        entries = parse_yaml(value, "config")
    except UsageError:
        entries = None
    if not isinstance(entries, Mapping):
        hint = f"pass another one, or a config of the package: {names_near(value)}"
        raise UsageError(f"config={value!r}: file does not exist; {hint}")
    return value, entries


def check_methods(values: Mapping[str, Any]) -> None:
    """Refuse an argument that a method of the package lacks, and a short name that is neither its nor a user's."""
    text = (PACKAGE / "methods/__init__.py").read_text("utf-8")
    exports = re.findall(r"^from fl_lightning\.methods\.(\w+) import (\w+)", text, re.MULTILINE)
    files = {name: f"methods/{file}.py" for file, name in exports}
    modules = re.findall(r"([A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)+", str([*values.values()]))
    imports_own = "torch" in sys.modules or not LIBRARIES.issuperset(modules)
    for value in (values.get("method"), values.get("method+")):
        with suppress(UsageError):  # text that is not YAML
            value = parse_yaml(value, "method") if isinstance(value, str) else value
        for method in value if isinstance(value, list) else [value]:
            entries = method if isinstance(method, Mapping) else {"class_path": method}
            for named in files.keys() & entries:
                raise UsageError(f"method={named}: give {{class_path: {named}, init_args: {{NAME: VALUE}}}}")
            # without a class, the arguments are for that of an earlier config
            name, arguments = str(entries.get("class_path") or "Method"), entries.get("init_args")
            if name.isidentifier() and name not in (*files, "Method") and not imports_own:
                raise UsageError(f"method={name!r}: no such class; give {class_hint(name, sorted(files))}")
            if name in files and isinstance(arguments, Mapping):
                names = arguments_of(files[name], "__init__")
                for argument in arguments if names else ():  # without names, the constructor is inherited
                    if argument not in names:
                        raise UsageError(no_argument("method", name, argument, names))


def class_hint(value: str, names: Sequence[str], more_names: Sequence[str] = ()) -> str:
    """A hint to a class of a user's own, and to the nearest of all of them, or else to all names."""
    suggestion = near(value, [*names, *more_names]) if value else ""
    hint = "MODULE.CLASS of your own"
    if suggestion:
        return f"{hint}; {suggestion}"
    return f"{hint}, or one of {choices(names, value)}" if names else hint


def no_argument(key: str, kind: str, name: str, names: Sequence[str]) -> str:
    """The line about an argument that a class lacks."""
    hint = near(name, [*names, "class_path", "init_args"]) or f"it takes {choices(names, name)}"
    return f"{key}: {kind} has no {name!r}; {hint}"


def check_checkpoint(values: Mapping[str, Any]) -> None:
    """Refuse a checkpoint, or else initial weights, without a file; a run's last checkpoint has a predecessor."""
    for key in ("ckpt_path", "weights"):
        if values.get(key) not in (None, "null"):
            path, hint = Path(str(values[key])), "give RUN/checkpoints/last.ckpt"
            has_predecessor = path.name == "last" or path.with_name("previous.ckpt").exists()
            if key == "weights":
                hint, has_predecessor = f"{hint} or model.ckpt, or a file of a state dict", False
            if not (path.exists() or has_predecessor):
                raise UsageError(f"{key}={str(path)!r}: file not found; {hint}")
            return


def check_keys(entries: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Refuse unknown keys of a config, and of its section ``trainer``."""
    for key, value in entries.items():
        check_key(str(key), keys)
        for name in value if key == "trainer" and isinstance(value, Mapping) else ():
            check_key(f"trainer.{name}", keys)


def check_key(name: str, keys: Sequence[str]) -> None:
    """Refuse an unknown key; of the keys below ``model``, ``data`` and ``method`` only classes know."""
    section, *inner = name.removeprefix("--").split(".")
    key = f"trainer.{inner[0]}" if section == "trainer" and inner else section
    if key.removesuffix("+") not in keys and inner != ["help"]:
        raise UsageError(unknown_key(name, keys))


def unknown_key(name: str, keys: Sequence[str]) -> str:
    """The line about an unknown key."""
    return f"{name}: no such key (--help lists them); {replacement_of_key(name.removeprefix('--'), keys)}"


def keys_of(command: str) -> list[str]:
    """The keys of a command, with those of ``fit``, whose configs serve all; keys of a section as ``trainer.NAME``."""
    names = dict.fromkeys([*arguments_of("trainer.py", command), *arguments_of("trainer.py", "fit")])
    of_trainer = arguments_of("engine/run_arguments.py", "__init__")
    return [*COMMON_KEYS, *names, *(f"trainer.{name}" for name in of_trainer)]


@cache
def arguments_of(file: str, function: str) -> tuple[str, ...]:
    """The arguments of a function of the package, read from its source: importing it takes seconds."""
    tree = ast.parse((PACKAGE / file).read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
            return tuple(name for name in names if name not in ("self", "model", "datamodule"))
    return ()
