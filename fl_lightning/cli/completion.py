"""``completion``: a script by which a shell completes commands, options, and the names of classes.

The script is plain words: at a tab no Python starts. It has the classes of this package; those of others can be typed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from inspect import Parameter, isabstract, isclass, signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning.pytorch import LightningDataModule, LightningModule
from torch.nn import Module

from fl_lightning import callbacks, data, methods, models, optim, sampling, systems
from fl_lightning.cli.arguments import COMMANDS, OneLineParser, end_with_status
from fl_lightning.cli.bench import bench_parser
from fl_lightning.cli.report import report_parser
from fl_lightning.errors import UsageError
from fl_lightning.method import Method
from fl_lightning.trainer import FederatedTrainer

PROGRAM = "fl-lightning"
SHELLS = ("bash", "zsh", "tcsh")
PARTS = (callbacks, data, methods, models, optim, sampling, systems)
CLASSES = {
    name: value
    for part in PARTS
    for name, value in vars(part).items()
    if isclass(value) and not isabstract(value) and not name.startswith("_")
}


def main(args: list[str]) -> None:
    """Print the script of a shell."""
    end_with_status(lambda: print_script(args))


def print_script(args: list[str]) -> None:
    """Print the script of the shell that a command line names.

    Raises:
        UsageError: shtab is not installed, or the shell is none of :data:`SHELLS`.
    """
    parser = completion_parser()
    shell = parser.parse_args(args[1:]).shell
    try:
        import shtab
    except ImportError as error:
        raise UsageError("completion: shtab is not installed; pip install shtab") from error
    print(shtab.complete(parser_of_all(shtab.FILE), shell=shell))


def completion_parser() -> argparse.ArgumentParser:
    """The parser of this command."""
    parser = OneLineParser(prog=f"{PROGRAM} completion", description=COMMANDS["completion"], allow_abbrev=False)
    parser.add_argument("shell", choices=SHELLS, help="your shell")
    return parser


def parser_of_all(file: Any) -> argparse.ArgumentParser:
    """A parser of argparse with all commands and options, and their values where these are known.

    Args:
        file: what marks a value that is a path.
    """
    whole = argparse.ArgumentParser(prog=PROGRAM)
    whole.add_argument("--version", action="store_true")
    whole.add_argument("--config").complete = file  # type: ignore[attr-defined]
    parsers = whole.add_subparsers()
    own = {"report": report_parser(), "completion": completion_parser()}
    own |= {name: bench_parser(name) for name in ("bench", "tune")}
    for command, about in COMMANDS.items():
        about = about.replace("%", "%%")
        if command in own:
            parser = parsers.add_parser(command, parents=[own[command]], add_help=False, help=about)
        else:
            parser = parsers.add_parser(command, help=about)
            for name in ("config", "print_config"):
                parser.add_argument(f"--{name}")
            options = Options(parser)
            options.add("seed_everything", int)
            for name, hint in (("model", LightningModule), ("data", LightningDataModule), ("method", list[Method])):
                options.add(name, hint)
            options.add_arguments("trainer.", FederatedTrainer.__init__)
            options.add_arguments("", getattr(FederatedTrainer, command))
            options.add_arguments("", FederatedTrainer.fit)  # its config serves all commands
        for action in parser._actions:
            if action.type is Path or action.dest in ("config", "suite", "sources", "ckpt_path", "weights"):
                action.complete = file  # type: ignore[attr-defined]
    return whole


class Options:
    """Adds an option for each argument of a config, and for those of the classes that may be its value.

    Args:
        parser: to which they are added.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser

    def add_arguments(self, prefix: str, function: Any, above: tuple[type, ...] = ()) -> None:
        """Add the arguments of a function; ``above`` are the classes in whose arguments these are."""
        hints = hints_of(function)
        for name, parameter in signature(function).parameters.items():
            named = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
            if named and name not in ("self", "model", "datamodule"):
                self.add(prefix + name, hints.get(name), above)

    def add(self, key: str, hint: Any, above: tuple[type, ...] = ()) -> None:
        """Add an option unless it is there, and those of the classes that its type takes."""
        known = {option for action in self.parser._actions for option in action.option_strings}
        # any part of a network is a Module
        kinds = [kind for kind in parts_of(hint) if isclass(kind) and kind not in (*above, Module)]
        fitting = {
            name: value
            for name, value in CLASSES.items()
            if any(issubclass(value, kind) and kind is not value for kind in kinds if kind is not object)
        }
        is_list = any(get_origin(part) is list for part in (hint, *get_args(hint)))
        flags = [f"--{key}", *([f"--{key}+"] if is_list else [])]
        if not known & set(flags):
            # flags of one action would be one entry to shtab, but each has its own name
            for flag in flags:
                self.parser.add_argument(flag, choices=sorted(fitting) or values_of(hint) or None)
        for value in fitting.values():
            self.add_arguments(f"{key}.", value.__init__, (*above, *kinds))


def hints_of(function: Any) -> dict[str, Any]:
    """The types of the arguments of a function; empty where they name something that is not imported."""
    try:
        return get_type_hints(function)
    except NameError:
        return {}


def parts_of(hint: Any) -> Iterator[Any]:
    """A type, and the types within it."""
    yield hint
    for part in get_args(hint):
        yield from parts_of(part)


def values_of(hint: Any) -> list[str]:
    """The values that a type names."""
    parts = list(parts_of(hint))
    named = [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]
    return [*named, *(["true", "false"] if bool in parts and Any not in parts else [])]
