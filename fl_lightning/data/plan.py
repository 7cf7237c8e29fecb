"""The plan of a run: which client holds which samples. It is saved with the run and identified by a hash."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.utilities.errors import UsageError, count, require


@dataclass
class Plan:
    """The partition of N training samples over K clients.

    Args:
        parts: sample indices of each client: K arrays that together contain every sample exactly once.
        labels: label of each sample ``(N,)``; None without labels.
        num_classes: C.
        moved: number of samples that the partitioner moved to reach its ``min_size``.
        domains: domain of each sample ``(N,)``, from 0; None if unknown.
        domain_names: names of the domains.
        class_names: names of the classes.

    Raises:
        UsageError: a sample belongs to no client, or to several, or a label is not the number of a class.
    """

    parts: list[np.ndarray]
    labels: np.ndarray | None = None
    num_classes: int = 0
    moved: int = 0
    domains: np.ndarray | None = None
    domain_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.parts = [np.asarray(part, np.int64) for part in self.parts]
        assigned, times = np.unique(np.concatenate(self.parts), return_counts=True)
        number = times.sum() if self.labels is None else len(self.labels)
        hint = f"it must assign each of the {number} samples to exactly one client"
        everything = np.arange(number)
        wrong = {
            " at several clients": assigned[times > 1],
            ", which is not there": np.setdiff1d(assigned, everything),
            " at no client": np.setdiff1d(everything, assigned),
        }
        for fault, samples in wrong.items():
            require(not len(samples), "data.partitioner", f"sample {next(iter(samples), None)}{fault}", hint)
        labels = np.asarray([] if self.labels is None else self.labels)
        strange = labels[~np.isin(labels, np.arange(self.num_classes))]
        hint = f"there are {self.num_classes} classes; give integers from 0 to {self.num_classes - 1}, or more classes"
        integers = not labels.size or labels.dtype.kind in "iub"
        require(integers and not len(strange), "data: labels", next(iter(strange.tolist()), str(labels.dtype)), hint)

    @cached_property
    def label_counts(self) -> np.ndarray | None:
        """Number of samples of each class at each client ``(K, C)``; None without labels."""
        if self.labels is None:
            return None
        counts = []
        for part in self.parts:
            counts.append(np.bincount(self.labels[part], minlength=self.num_classes))
        return np.stack(counts)

    def domain(self, k: int) -> str | None:
        """Name of the domain of all samples of client ``k``; None if there are several, or none is known."""
        domains = np.unique(self.domains[self.parts[k]]).tolist() if self.domains is not None else []
        if len(domains) != 1:
            return None
        return self.domain_names[domains[0]] if self.domain_names else str(domains[0])

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client ``(K,)``."""
        return np.array([len(part) for part in self.parts])

    @cached_property
    def hash(self) -> str:
        """SHA-256 of sizes and indices: equal for equal plans, on every machine."""
        flat = np.concatenate([self.sizes, *self.parts]).astype("<i8")
        return hashlib.sha256(flat.tobytes()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write an npz file, atomically.

        It holds ``indices`` (N,), ``sizes`` (K,), ``label_counts`` (K, C), ``hash``, the name of each client's one
        domain as ``domains`` (K,), empty where it has none or several, and ``class_names`` (C,), or (0,) without names.
        """
        names: dict[str, Any] = {
            "domains": np.array([self.domain(k) or "" for k in range(len(self.parts))], str),
            "class_names": np.array(self.class_names, str),
        }
        counts = self.label_counts if self.label_counts is not None else np.zeros((len(self.parts), 0), np.int64)
        partial = Path(path).with_suffix(".partial.npz")
        indices = np.concatenate(self.parts)
        np.savez(partial, indices=indices, sizes=self.sizes, label_counts=counts, hash=self.hash, **names)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that :meth:`save` wrote; it has no labels.

        Raises:
            UsageError: the file does not exist, is not a plan, or has been changed.
        """
        require(Path(path).is_file(), "plan", str(path), "no such file; use RUN/plan.npz")
        try:
            with np.load(path, allow_pickle=False) as saved:
                plan = cls(np.split(saved["indices"], np.cumsum(saved["sizes"])[:-1]))
                intact = plan.hash == str(saved["hash"])
        except Exception as error:  # a damaged zip file raises errors of many kinds
            raise UsageError(f"plan={str(path)!r}: not the plan of a run: {error}; give RUN/plan.npz") from error
        require(
            intact, "plan", str(path), "its hash does not match its indices, since the file has changed; use another"
        )
        return plan

    def skew(self) -> float:
        """Mean over clients of the Jensen-Shannon distance to the global label distribution: 0 if equal, at most 1."""
        if self.label_counts is None:
            return 0.0
        from scipy.spatial.distance import jensenshannon  # slow to import

        counts, overall = self.label_counts[self.sizes > 0], self.label_counts.sum(0)
        # for distributions that are nearly equal, rounding can leave the root of a number just below 0
        with np.errstate(invalid="ignore"):
            distances = np.nan_to_num(jensenshannon(counts, overall[None], base=2, axis=1))
        return float(distances.mean())

    def report(self) -> str:
        """One line on the partition: sizes, classes per client, skew, samples moved."""
        sizes = self.sizes
        clients, middle = count(len(sizes), "client"), int(np.median(sizes))
        text = f"{clients} of {sizes.min()} to {sizes.max()} samples (median {middle})"
        if self.label_counts is not None:
            text += f", {(self.label_counts > 0).sum(1).mean():.1f} of {self.num_classes} classes each"
            text += f", Jensen-Shannon distance {self.skew():.2f} to the global labels"
        return text + (f", {self.moved} samples moved to reach min_size" if self.moved else "")
