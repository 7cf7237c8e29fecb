"""The plan of a run: who holds what, saved with the run and identified by a hash."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.spatial.distance import jensenshannon

from fl_lightning.errors import UsageError, require


@dataclass
class Plan:
    """Sample indices of each client.

    Args:
        parts: K arrays that hold each of N samples exactly once.
        labels: label of each sample ``(N,)``, None where there are none.
        num_classes: C.
        moved: samples that the partitioner's repair moved.
        domains: domain of each sample ``(N,)``, from 0; None where that is not known.
        domain_names: names of the domains.

    Raises:
        UsageError: a sample is lost or given twice.
    """

    parts: list[np.ndarray]
    labels: np.ndarray | None = None
    num_classes: int = 0
    moved: int = 0
    domains: np.ndarray | None = None
    domain_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        held = np.sort(np.concatenate(self.parts))
        number = len(held) if self.labels is None else len(self.labels)
        whole = np.array_equal(held, np.arange(number))
        require(whole, "data.partitioner", len(held), f"it must give each of the {number} samples to one client")

    @cached_property
    def label_counts(self) -> np.ndarray | None:
        """Samples of each class at each client, ``(K, C)``."""
        if self.labels is None:
            return None
        return np.stack([np.bincount(self.labels[part], minlength=self.num_classes) for part in self.parts])

    def domain(self, k: int) -> str | None:
        """Name of the domain of all samples of client ``k``; None where there are several, or none is known."""
        found = np.unique(self.domains[self.parts[k]]).tolist() if self.domains is not None else []
        return (self.domain_names or tuple(map(str, range(found[0] + 1))))[found[0]] if len(found) == 1 else None

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each client ``(K,)``."""
        return np.array([len(part) for part in self.parts])

    @cached_property
    def hash(self) -> str:
        """SHA-256 over sizes and indices: equal for equal plans on every machine."""
        flat = np.concatenate([self.sizes, *self.parts]).astype("<i8")
        return hashlib.sha256(flat.tobytes()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write an npz of ``indices`` (N,), ``sizes`` (K,), ``label_counts`` (K, C) and ``hash``."""
        counts = self.label_counts if self.label_counts is not None else np.zeros((len(self.parts), 0), np.int64)
        partial = Path(path).with_suffix(".partial.npz")
        np.savez(partial, indices=np.concatenate(self.parts), sizes=self.sizes, label_counts=counts, hash=self.hash)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what :meth:`save` wrote; the labels are not in it.

        Raises:
            UsageError: no such file, not a plan, or one that was changed.
        """
        require(Path(path).is_file(), "plan", str(path), "there is no such file; give RUN/plan.npz")
        try:
            with np.load(path, allow_pickle=False) as found:
                plan = cls(np.split(found["indices"], np.cumsum(found["sizes"])[:-1]))
                whole = plan.hash == str(found["hash"])
        except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile, EOFError) as error:
            raise UsageError(f"plan={str(path)!r}: not a plan that a run has saved: {error}") from error
        require(whole, "plan", str(path), "its hash does not fit its indices: the file was changed; give another")
        return plan

    def skew(self) -> float:
        """Mean over clients of the Jensen-Shannon distance to the global label distribution: 0 for IID, at most 1."""
        if self.label_counts is None:
            return 0.0
        counts, overall = self.label_counts[self.sizes > 0], self.label_counts.sum(0)
        # for distributions that are nearly equal, rounding can leave the root of a number just below 0
        with np.errstate(invalid="ignore"):
            distances = np.nan_to_num(jensenshannon(counts, overall[None], base=2, axis=1))
        return float(distances.mean())

    def report(self) -> str:
        """What was realised: sizes, classes per client, skew, samples moved; one line."""
        sizes = self.sizes
        text = f"{len(sizes)} clients of {sizes.min()} to {sizes.max()} samples (median {int(np.median(sizes))})"
        if self.label_counts is not None:
            text += f", {(self.label_counts > 0).sum(1).mean():.1f} of {self.num_classes} classes each"
            text += f", Jensen-Shannon distance {self.skew():.2f} to the global labels"
        return text + (f", {self.moved} samples moved to reach min_size" if self.moved else "")
