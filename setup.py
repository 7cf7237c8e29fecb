"""Adds the configs and suites of experiments/ to the package, which setup.cfg cannot do."""

from pathlib import Path

from setuptools import find_packages, setup

CONFIGS = ("smoke", "data", "models", "methods", "protocols", "leaderboard", "papers")

source = Path(__file__).parent / "experiments"
files = [path.relative_to(source) for part in CONFIGS for path in (source / part).rglob("*.yaml")]
folders = {
    ".".join(("fl_lightning.configs", *path.parent.parts)): f"experiments/{path.parent.as_posix()}" for path in files
}
setup(
    packages=[*find_packages(include=["fl_lightning*"]), *sorted(folders)],
    package_dir=folders,
    package_data={
        "fl_lightning": ["py.typed", "report/*.j2", "report/*.css", "report/*.js"],
        **{name: ["*.yaml", "*.csv.gz"] for name in folders},
    },
)
