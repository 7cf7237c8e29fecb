"""Reads the configs of a command line, and refuses unknown keys, before torch and Lightning are imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.bundled_configs import names_near, packaged_config
from fl_lightning.errors import UsageError
from fl_lightning.yaml_files import parse_yaml, read_yaml

PACKAGE = Path(__file__).parents[1]
# keys of all commands beside the arguments of the command
COMMON_KEYS = ("seed_everything", "model", "data", "trainer", "config", "print_config", "help")
# commands that read a checkpoint
OF_CHECKPOINTS = ("fit", "doctor", "validate", "test", "predict", "replay")
# arguments of Lightning's trainer, with those that stand for them here
OF_LIGHTNING = {"max_epochs": "max_rounds", "check_val_every_n_epoch": "eval_every_n_rounds"}


def check_command(words: Sequence[str]) -> None:
    """Check the configs and the keys of a command line; the parser checks the rest.

    Raises:
        UsageError: a config does not exist or is not YAML, or a key of it or of the command line is unknown.
    """
    command, *options = words
    keys, given = keys_of(command), dict[str, Any]()
    for option, value in pairs_of(options):
        if option == "--config":
            entries = config_and_entries(value)[1]
            check_keys(entries, keys)
            given.update(entries)
        else:
            check_key(option, keys)
            given[option.removeprefix("--")] = value
    if command in OF_CHECKPOINTS:
        check_checkpoint(given)


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
    path = value if os.path.exists(value) else str(packaged_config(value) or value)
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


def check_checkpoint(given: Mapping[str, Any]) -> None:
    """Refuse a checkpoint, or else initial weights, without a file; a run's last checkpoint has a predecessor."""
    key = next((key for key in ("ckpt_path", "weights") if given.get(key) not in (None, "null")), "")
    path = Path(str(given.get(key, ".")))
    there = path.exists() or (key == "ckpt_path" and (path.name == "last" or path.with_name("previous.ckpt").exists()))
    if not there:
        hint = "give RUN/checkpoints/last.ckpt" + " or model.ckpt, or a file of a state dict" * (key == "weights")
        raise UsageError(f"{key}={str(path)!r}: file not found; {hint}")


def check_keys(entries: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Refuse unknown keys of a config, and of its section ``trainer``."""
    for key, value in entries.items():
        check_key(str(key), keys)
        for name in value if key == "trainer" and isinstance(value, Mapping) else ():
            check_key(f"trainer.{name}", keys)


def check_key(name: str, keys: Sequence[str]) -> None:
    """Refuse an unknown key; of the keys below ``model``, ``data`` and ``method`` only classes know."""
    first, *rest = name.removeprefix("--").split(".")
    key = f"trainer.{rest[0]}" if first == "trainer" and rest else first
    if key.removesuffix("+") not in keys and rest != ["help"]:
        raise UsageError(unknown_key(name, keys))


def unknown_key(name: str, keys: Sequence[str]) -> str:
    """The line about an unknown key, with a hint to the nearest one."""
    return f"{name}: no such key (--help lists them){near(name.removeprefix('--'), keys) or '; remove it'}"


def keys_of(command: str) -> list[str]:
    """The keys of a command, with those of ``fit``, whose configs serve all; keys of a section as ``trainer.NAME``."""
    names = dict.fromkeys([*arguments_of("trainer.py", command), *arguments_of("trainer.py", "fit")])
    return [*COMMON_KEYS, *names, *(f"trainer.{name}" for name in arguments_of("engine/run_arguments.py", "__init__"))]


@cache
def arguments_of(file: str, function: str) -> tuple[str, ...]:
    """The arguments of a function of the package, read from its source: importing it takes seconds."""
    tree = ast.parse((PACKAGE / file).read_text("utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    arguments = [argument.arg for node in nodes[:1] for argument in (*node.args.args, *node.args.kwonlyargs)]
    return tuple(name for name in arguments if name not in ("self", "model", "datamodule"))


def near(name: str, known: Sequence[str]) -> str:
    """A hint to the nearest of the known names; empty where none is near."""
    last, initials = last_part(name).lower(), "".join(part[:1] for part in name.split("_"))
    by_end = {last_part(candidate).lower(): candidate for candidate in reversed(known)}
    ours = OF_LIGHTNING.get(last, initials)
    matches = [ours] if ours in by_end else get_close_matches(last, by_end, 1)
    return f"; did you mean {by_end[matches[0]]}?" if matches and by_end[matches[0]] != name else ""


def last_part(path: str) -> str:
    """The last part of a dotted name."""
    return path.rsplit(".", 1)[-1]
