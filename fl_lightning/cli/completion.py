"""``completion``: a script by which a shell completes commands, options, and the names of classes.

The script is plain words, so completion does not start Python. It has the classes of this package.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning.pytorch import LightningDataModule, LightningModule
from torch.nn import Module

from fl_lightning.cli.bench import bench_parser
from fl_lightning.cli.entry_point import COMMANDS, OneLineParser, end_with_status
from fl_lightning.cli.parser_errors import CLASSES, is_class
from fl_lightning.cli.report import report_parser
from fl_lightning.core.method import Method
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.utilities.errors import UsageError

PROGRAM = "fl-lightning"


def main(args: list[str]) -> None:
    """Print the script of the shell that a command line names."""
    end_with_status(lambda: print_script(completion_parser().parse_args(args[1:]).shell))


def print_script(shell: str) -> None:
    """Print the script of a shell; refuse it without shtab, which writes it."""
    try:
        import shtab
    except ImportError as error:
        raise UsageError("completion: shtab is not installed; pip install shtab") from error
    print(shtab.complete(parser_of_all(shtab.FILE), shell=shell))


def completion_parser() -> argparse.ArgumentParser:
    """The parser of this command."""
    parser = OneLineParser(prog=f"{PROGRAM} completion", description=COMMANDS["completion"], allow_abbrev=False)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="your shell")
    return parser


def parser_of_all(file: Any) -> argparse.ArgumentParser:
    """A parser of argparse with all commands and options; ``file`` marks a value that is a path."""
    program_parser = argparse.ArgumentParser(prog=PROGRAM)
    program_parser.add_argument("--version", action="store_true")
    program_parser.add_argument("--config").complete = file  # type: ignore[attr-defined]
    commands = program_parser.add_subparsers()
    parsers = {"report": report_parser(), "completion": completion_parser()}
    parsers |= {name: bench_parser(name) for name in ("bench", "tune")}
    for command, about in COMMANDS.items():
        parents = [parsers[command]] if command in parsers else []
        parser = commands.add_parser(command, parents=parents, add_help=not parents, help=about.replace("%", "%%"))
        if command not in parsers:
            for name in ("config", "print_config"):
                parser.add_argument(f"--{name}")
            add_option(parser, "seed_everything", int)
            for name, hint in (("model", LightningModule), ("data", LightningDataModule), ("method", list[Method])):
                add_option(parser, name, hint)
            add_arguments(parser, "trainer.", FederatedTrainer.__init__)
            add_arguments(parser, "", getattr(FederatedTrainer, command))
            add_arguments(parser, "", FederatedTrainer.fit)  # its config serves all commands
        for action in parser._actions:
            if action.type is Path or action.dest in ("config", "suite", "sources", "ckpt_path", "weights"):
                action.complete = file  # type: ignore[attr-defined]
    return program_parser


def add_arguments(parser: argparse.ArgumentParser, prefix: str, function: Any, above: tuple[type, ...] = ()) -> None:
    """Add the arguments of a function; ``above`` are the classes in whose arguments these are."""
    try:
        hints = get_type_hints(function)
    except NameError:  # a type that is imported for typing alone
        hints = {}
    for name, parameter in signature(function).parameters.items():
        named = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        if named and name not in ("self", "model", "datamodule", "params"):
            add_option(parser, prefix + name, hints.get(name), above)


def add_option(parser: argparse.ArgumentParser, key: str, hint: Any, above: tuple[type, ...] = ()) -> None:
    """Add an option unless the parser has it, and the options of the classes that its type takes."""
    parts = [*nested_types(hint)]
    # any part of a network is a Module
    kinds = [kind for kind in parts if is_class(kind) and kind not in (*above, Module, object)]
    fitting = {}
    for name, subclass in CLASSES.items():
        if any(issubclass(subclass, kind) for kind in kinds):
            fitting[name] = subclass
    values = sorted(fitting)
    if not values:
        for part in parts:
            values += map(str, get_args(part)) if get_origin(part) is Literal else ()
        if bool in parts and Any not in parts:
            values += ["true", "false"]
    is_list = any(get_origin(part) is list for part in (hint, *get_args(hint)))
    # flags of one action would be one entry to shtab, but each has its own name
    for flag in [f"--{key}", f"--{key}+"] if is_list else [f"--{key}"]:
        if flag not in parser._option_string_actions:
            parser.add_argument(flag, choices=values or None)
    for value in fitting.values():
        add_arguments(parser, f"{key}.", value.__init__, (*above, *kinds))


def nested_types(hint: Any) -> Iterator[Any]:
    """A type, and the types within it."""
    yield hint
    for part in get_args(hint):
        yield from nested_types(part)
