"""Reads the values of a config for the parser, with the checks of :mod:`fl_lightning.utilities.yaml_files`."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from fl_lightning.utilities.errors import UsageError, truncate
from fl_lightning.utilities.yaml_files import checked_yaml

# the `parser_mode` of this package's parsers; other parsers keep the mode `yaml`
CHECKED = "checked_yaml"


class ValueTextError(UsageError, TypeError):
    """Something in a value would be lost. A parser adds the value's key to a TypeError."""


def load_value(text: str) -> Any:
    """Load the text of a value, or of a file that is one; the parser takes text that is not YAML as a string.

    Raises:
        ValueTextError: something in it would be lost.
    """
    try:
        checked_yaml(text, f"'{truncate(text, 60)}'")
    except UsageError as error:
        raise ValueTextError(error) from error
    return get_loader("yaml")(text)


set_loader(CHECKED, load_value, (yaml.YAMLError,))
