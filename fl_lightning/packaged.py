"""The configs that the package carries: what is no file of the user may name one, as ``--config smoke/feduv``."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

# what an installed package has, which its setup.py takes from the folder beside the package
FOLDERS = (Path(__file__).parent / "configs", Path(__file__).parents[1] / "experiments")
PARTS = ("smoke", "data", "models", "methods", "protocols")


def packaged_config(name: str) -> Path | None:
    """The file of a config by its name, with or without ``.yaml``; None where there is no such config.

    A path that a repository's commands use, ``experiments/smoke/feduv.yaml``, is such a name, too.
    """
    return named_configs().get(name.removeprefix("experiments/").removesuffix(".yaml"))


def named_configs() -> dict[str, Path]:
    """The configs that the package carries, by name."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0])
    return {f"{part}/{path.stem}": path for part in PARTS for path in sorted((folder / part).glob("*.yaml"))}


def names_near(name: str) -> str:
    """Some configs whose names are like ``name``, or else the first ones, and the folder that holds all of them."""
    known = named_configs()
    asked = name.removeprefix("experiments/").removesuffix(".yaml")
    near = get_close_matches(asked, known, 5, cutoff=0.7) or list(known)[:5]
    return f"{', '.join(near)}, or another one of {next(iter(known.values())).parents[1] if known else FOLDERS[0]}"
