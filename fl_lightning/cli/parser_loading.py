"""Reads files and values for the config parser, with the checks of :mod:`fl_lightning.yaml_files`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader
from jsonargparse.typing import Path

from fl_lightning.errors import UsageError, clipped
from fl_lightning.yaml_files import checked_yaml, parse_yaml, text_of_file

# the `parser_mode` of this package's parsers; other parsers keep the mode `yaml`
CHECKED = "checked_yaml"


class ValueTextError(UsageError, TypeError):
    """Something in a value would be lost. A parser adds the value's key to a TypeError."""


def load_value(text: str) -> Any:
    """Load the text of a value or a file; the parser takes text that is not YAML as a string.

    Raises:
        ValueTextError: something in it would be lost.
    """
    try:
        checked_yaml(text, f"'{clipped(text, 60)}'")
    except UsageError as error:
        raise ValueTextError(error) from error
    return get_loader("yaml")(text)


set_loader(CHECKED, load_value, (yaml.YAMLError,))


@contextmanager
def checked_files() -> Iterator[None]:
    """In this block, each file of a config that a parser reads is checked, also one that is the value of a key.

    Raises:
        UsageError: a file is damaged. A parser would try it as another type, and report that.
    """
    errors: list[UsageError] = []
    read_text = Path.read_text

    def checked_text(self: Path) -> str:
        if not os.path.isfile(self.absolute):
            return read_text(self)
        try:
            text = text_of_file(pathlib.Path(os.path.relpath(self.absolute)))
            parse_yaml(text, os.path.relpath(self.absolute))
        except UsageError as error:
            errors.append(error)
            raise
        return text

    # the method by which jsonargparse reads all files of configs
    Path.read_text = checked_text  # type: ignore[method-assign]
    try:
        yield
    except Exception as error:
        raise (errors[0] if errors else error) from None
    finally:
        Path.read_text = read_text  # type: ignore[method-assign]
