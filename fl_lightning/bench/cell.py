"""A cell: one run of a suite."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from fl_lightning.bench.config_fragments import Fragment, config_digest, merged_config

Labels = dict[str, str]


@dataclass(frozen=True)
class Cell:
    """One run of a suite.

    Args:
        labels: label on each axis.
        seed: ``seed_everything`` of the run.
        fragments: parts of the run's config, merged in order like the files of several ``--config``.
        scale: share of the work that is done, 1 for all of it.
        stored_digest: the digest with which its result is stored; empty for the digest of its config.
    """

    labels: Labels
    seed: int
    fragments: tuple[Fragment, ...]
    scale: float = 1.0
    stored_digest: str = ""

    @property
    def name(self) -> str:
        """Its address within the suite, such as ``alpha=0.1,method=FedAvg,seed=0``."""
        labels = [f"{axis}={file_part(label)}" for axis, label in self.labels.items()]
        return ",".join([*labels, f"seed={self.seed}"])

    @cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits of what its config says, without paths and what changes no bit of a result."""
        return self.stored_digest or config_digest(self.config)

    @property
    def folder(self) -> str:
        """Name of the folder of its run: its address and its digest."""
        return f"{self.name[:200]}-{self.digest}"  # file systems take 255 characters

    @cached_property
    def config(self) -> Fragment:
        """Its fragments as one."""
        return merged_config(self.fragments)


def file_part(label: str) -> str:
    """A label as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", label).strip("_")
