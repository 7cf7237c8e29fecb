"""The configs and suites that the package carries, by names such as ``smoke/feduv`` and ``feduv/table1``."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

# files of an installed package, which setup.py copies from the folder next to the package
FOLDERS = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "experiments")
PARTS = ("smoke", "data", "models", "methods", "protocols", "leaderboard", "papers")


def packaged_config(name: str | Path) -> Path | None:
    """The file of a config or suite by its name, with or without ``.yaml``; None if the package has none of that name.

    Paths in a copy of the repository, such as ``experiments/smoke/feduv.yaml``, are names as well, and the name of a
    folder is that of its ``suite.yaml``.
    """
    configs, target = named_configs(), short_name(name)
    return configs.get(target) or configs.get(f"{target}/suite")


def short_name(path: str | Path) -> str:
    """The name of a config, given its path; the suites of papers begin with the name of the paper."""
    return Path(path).as_posix().removeprefix("experiments/").removeprefix("papers/").removesuffix(".yaml")


def named_configs() -> dict[str, Path]:
    """The configs and suites that the package carries, by name."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0])
    paths = [path for part in PARTS for path in sorted((folder / part).rglob("*.yaml"))]
    return {short_name(path.relative_to(folder)): path for path in paths}


def names_near(name: str) -> str:
    """Some names similar to ``name`` as a whole or in the last part, or else the first ones, and the folder of all."""
    paths_by_name, target = named_configs(), short_name(name)

    def similarity(candidate: str) -> float:
        pairs = ((target, candidate), (target.rpartition("/")[2], candidate.rpartition("/")[2]))
        return max(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    similar = [name for name in paths_by_name if similarity(name) >= 0.7]
    near = sorted(similar, key=similarity, reverse=True) or [*paths_by_name]
    folders = [path.parents[1] for path in paths_by_name.values()] or [FOLDERS[0]]
    return f"{', '.join(near[:5])}, or another one of {folders[0]}"
