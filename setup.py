"""What setup.cfg cannot say: the package carries the configs of experiments/, so that an installed one runs."""

from pathlib import Path

from setuptools import find_packages, setup

CONFIGS = ("smoke", "data", "models", "methods", "protocols")

carried = [f"fl_lightning.configs.{one}" for one in CONFIGS if (Path(__file__).parent / "experiments" / one).is_dir()]
setup(
    packages=[*find_packages(include=["fl_lightning*"]), *carried],
    package_dir={name: f"experiments/{name.rpartition('.')[2]}" for name in carried},
    package_data={
        "fl_lightning": ["py.typed", "report/*.j2", "report/*.css", "report/*.js"],
        **{name: ["*.yaml"] for name in carried},
    },
)
