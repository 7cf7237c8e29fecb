"""Refuses entries of a config that the parser accepts, and shortens errors of the classes built from it."""

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

from fl_lightning.trainer import FederatedTrainer
from fl_lightning.utilities.errors import UsageError, is_user_code, require, text_of, truncate


def check_resolved(config: Mapping[str, Any]) -> None:
    """Refuse sections that are not mappings, seeds out of range, and nulls where a type excludes them."""
    trainer, seed = config.get("trainer"), config.get("seed_everything")
    is_mapping = isinstance(trainer, (Mapping, jsonargparse.Namespace))
    require(is_mapping, "trainer", trainer, "pass a mapping of its arguments, such as {max_rounds: 10}")
    in_range = seed is None or isinstance(seed, bool) or 0 <= seed < 2**32
    require(in_range, "seed_everything", seed, f"pass a seed from 0 to {2**32 - 1}")
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
    """Refuse null for an argument whose type does not allow it: a parser treats it as one that is not given."""
    checked: set[str] = set()  # arguments of the class itself, then of its bases
    for base, parameters in constructors(kind):
        try:
            hints = typing.get_type_hints(base.__init__)
        except (NameError, TypeError):
            hints = {}  # a type that is imported for typing alone
        for p in parameters:
            kept_null = p.name in checked or p.default is None or arguments.get(p.name, 0) is not None
            annotation = hints.get(p.name, Any)
            checked.add(p.name)
            union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
            parts = typing.get_args(annotation) if union else (annotation,)
            if not kept_null and not any(map(takes_none, parts)):
                text = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace(" | ", " or ")
                raise UsageError(f"{name}.{p.name}=null: pass a value of type {text}, or leave the key out")


def takes_none(hint: Any) -> bool:
    """Whether a type, which is no union, takes None."""
    return hint in (None, type(None), Any, object) or isinstance(hint, typing.TypeVar)


def constructors(kind: Any) -> Iterator[tuple[Any, list[inspect.Parameter]]]:
    """Yield a class and the bases to which its constructor passes arguments, each with the constructor's parameters."""
    bases: tuple[Any, ...] = kind.__mro__ if isinstance(kind, type) else ()
    for base in bases:
        if "__init__" in vars(base) and base is not object:
            parameters = list(inspect.signature(base.__init__).parameters.values())
            yield base, parameters
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
                return


@contextmanager
def building() -> Iterator[None]:
    """Build the config's classes in this block: an error of a library about their arguments is one line.

    An error of the user's own code keeps its traceback.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError, MemoryError, ArithmeticError) as error:
        errors = causes_of(error)
        # without the frames of this function and of the block
        frames = [frame for frame, _ in traceback.walk_tb(errors[-1].__traceback__)][2:]
        files = [frame.f_code.co_filename for frame in frames]
        usage = any(isinstance(cause, UsageError) for cause in errors)
        if usage or any(is_user_code(file) for file in files if file[0] != "<"):
            raise
        text = truncate(text_of(errors[-1]).rstrip("."))
        missing = isinstance(errors[-1], ImportError)
        hint = "install the package, or leave the class out" if missing else "give arguments that it takes"
        raise UsageError(f"{constructor_of(frames)}: {text}; {hint}") from error


def causes_of(error: BaseException) -> list[BaseException]:
    """An error, and those that caused it, the first one last.

    Where a parser has tried several types, the cause is the first error that is not the parser's own.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        union = frames[-1:] if frames and frames[-1].f_code.co_name == "raise_union_unexpected_value" else []
        of_types = [of_type for frame in union for of_type in frame.f_locals["exceptions"]]
        not_of_parser = (of_type for of_type in of_types if not from_parser(of_type))
        # a type that fits, but whose class could not be built, as one of a list, has a cause
        with_cause = (of_type for of_type in of_types if of_type.__cause__ is not None)
        cause = next(not_of_parser, None) or next(with_cause, None) or cause.__cause__ or cause.__context__
    return causes


def from_parser(error: BaseException) -> bool:
    """Whether jsonargparse has raised an error."""
    return "jsonargparse" in traceback.extract_tb(error.__traceback__)[-1].filename


def constructor_of(frames: list[types.FrameType]) -> str:
    """The innermost constructor of this package among the frames, or else the outermost one, with its plain arguments.

    Arguments with their default value do not appear.
    """
    constructor, package = None, str(Path(__file__).parents[1])
    for frame in frames:
        is_constructor = frame.f_code.co_name == "__init__" and "self" in frame.f_locals
        if is_constructor and (constructor is None or frame.f_code.co_filename.startswith(package)):
            constructor = frame
    if constructor is None:
        return "config"
    values = constructor.f_locals
    kind, arguments = type(values["self"]), []
    for name, parameter in inspect.signature(kind).parameters.items():
        value = values.get(name)
        if isinstance(value, (int, float, str, list)) and value != parameter.default:
            arguments.append(f"{name}={truncate(repr(value), 40)}")
    return f"{kind.__name__}({', '.join(arguments)})"
