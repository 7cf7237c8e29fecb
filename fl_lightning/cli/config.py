"""What a parser lets pass of a config, and errors of the classes that are built from it."""

from __future__ import annotations

import inspect
import traceback
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonargparse

from fl_lightning.errors import UsageError, clipped, is_users, require, text_of
from fl_lightning.trainer import FederatedTrainer

LARGEST_SEED = 2**32 - 1


def check_resolved(config: Mapping[str, Any]) -> None:
    """Refuse sections that are no mappings, seeds out of range, and nulls where a type has none.

    Raises:
        UsageError: there is such an entry; the error names it.
    """
    trainer, seed = config.get("trainer"), config.get("seed_everything")
    is_mapping = isinstance(trainer, (Mapping, jsonargparse.Namespace))
    require(is_mapping, "trainer", trainer, "give a mapping of its arguments, such as {max_rounds: 10}")
    in_range = seed is None or isinstance(seed, bool) or 0 <= seed <= LARGEST_SEED
    require(in_range, "seed_everything", seed, f"give a seed from 0 to {LARGEST_SEED}")
    check_nulls(FederatedTrainer, entries(trainer), "trainer")
    check_nulls_of_classes(config)


def check_nulls_of_classes(value: Any) -> None:
    """Check the arguments of all classes in a value, at any depth."""
    for part in value if isinstance(value, (list, tuple)) else entries(value).values():
        check_nulls_of_classes(part)
    path = entries(value).get("class_path")
    if isinstance(path, str):
        module, _, name = path.rpartition(".")
        kind = getattr(import_module(module), name, None) if module else None
        check_nulls(kind, entries(entries(value).get("init_args")), name)


def entries(value: Any) -> Mapping[str, Any]:
    """The entries of a part of a config; none of a plain value."""
    return vars(value) if isinstance(value, jsonargparse.Namespace) else value if isinstance(value, Mapping) else {}


def check_nulls(kind: Any, arguments: Mapping[str, Any], name: str) -> None:
    """Refuse null for an argument whose type does not allow it: a parser takes it for one that is not given."""
    annotations: dict[str, Any] = {}
    nulls: set[str] = set()  # of the class itself, then of its bases
    for base, parameters in constructors(kind):
        try:
            hints = typing.get_type_hints(base.__init__)
        except (NameError, TypeError):
            hints = {}  # a type that is imported for typing alone
        nulls |= {parameter.name for parameter in parameters if parameter.default is None} - set(annotations)
        annotations = {n: h for n, h in hints.items() if n != "return" and n not in nulls} | annotations
    for argument, annotation in annotations.items():
        if argument in arguments and arguments[argument] is None and not takes_none(annotation):
            wanted = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace(" | ", " or ")
            raise UsageError(f"{name}.{argument}=null: give a value of type {wanted}, or leave the key out")


def constructors(kind: Any) -> Iterator[tuple[Any, list[inspect.Parameter]]]:
    """The constructor of a class and those of the bases to which it passes arguments on: the class, its parameters."""
    bases: tuple[Any, ...] = kind.__mro__ if isinstance(kind, type) else ()
    for base in bases:
        if "__init__" in vars(base) and base is not object:
            parameters = list(inspect.signature(base.__init__).parameters.values())
            yield base, parameters
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
                return


def takes_none(annotation: Any) -> bool:
    """Whether a type allows None."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(takes_none(part) for part in typing.get_args(annotation))
    return annotation in (None, type(None), Any, object) or isinstance(annotation, typing.TypeVar)


@contextmanager
def building() -> Iterator[None]:
    """In this block the config's classes are built; what a library says of their arguments is one line.

    An error of the user's own code keeps its traceback.

    Raises:
        UsageError: an argument does not fit.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError, MemoryError, ArithmeticError) as error:
        errors = causes_of(error)
        # without the frames of this function and of the block
        frames = [frame for frame, _ in traceback.walk_tb(errors[-1].__traceback__)][2:]
        files = [frame.f_code.co_filename for frame in frames]
        usage = any(isinstance(cause, UsageError) for cause in errors)
        if usage or any(is_users(file) for file in files if file[0] != "<"):
            raise
        kind, arguments = constructor_of(frames)
        text = clipped(text_of(errors[-1]), 110)
        raise UsageError(f"{kind}({clipped(arguments, 90)}): {text}; give arguments that it takes") from error


def causes_of(error: BaseException) -> list[BaseException]:
    """An error, and those that caused it, the first one last."""
    causes, cause = [error], error.__cause__ or error.__context__
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def constructor_of(frames: list[types.FrameType]) -> tuple[str, str]:
    """The class of this package in whose constructor an error happened, and its arguments that are plain."""
    for frame in reversed(frames):
        inside = frame.f_code.co_name == "__init__" and frame.f_code.co_filename.startswith(
            str(Path(__file__).parents[1])
        )
        if inside and "self" in frame.f_locals:
            names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            plain = {n: v for n in names if isinstance(v := frame.f_locals.get(n), (int, float, str, list))}
            return type(frame.f_locals["self"]).__name__, ", ".join(f"{n}={v!r}" for n, v in plain.items())
    return "config", ""
