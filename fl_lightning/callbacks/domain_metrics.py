"""The module's own metrics on the test data of each domain, such as each hospital, at the end of a run."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_info

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.by_client import finite_mean
from fl_lightning.errors import require
from fl_lightning.records.summary import aligned, told
from fl_lightning.storage.atomic_io import write_atomically

# the metrics that come first in the table
USUAL = ("accuracy", "loss")


class DomainMetrics(Callback):
    """Evaluates the model on the test data of each domain, such as each site, by the module's own test step.

    Every run has one, without being told, and it acts where the data have two or more domains: after the last round,
    and with ``every_n_rounds`` after others, too. What the module logs of a domain, such as ``test/accuracy`` or
    ``test/f1``, is logged as ``domain/<name>/accuracy``, ``domain/<name>/f1``. The console shows the table of the last
    round, and ``domains.csv`` in the run's folder has it: a row for each domain, with its number of clients, training
    examples and test examples, where they are known. ``test`` and ``validate`` with a checkpoint of a finished run show
    and log the same of its model on the test and the validation data, and write no file.

    The model is the global one. Where entries of the state stay with the clients, it is each client's own model, and
    the value of a domain is the mean over its clients; a domain without clients is then left out. In a federation each
    site is a domain, with the values that it has sent in the last evaluation.

    Args:
        every_n_rounds: rounds from one evaluation to the next, at least 1; None evaluates after the last round alone.
        max_domains: of more domains than this nothing is evaluated, which takes a pass for each; at least 2.
    """

    def __init__(self, every_n_rounds: int | None = None, max_domains: int = 50) -> None:
        often = every_n_rounds is None or every_n_rounds >= 1
        require(often, "DomainMetrics.every_n_rounds", every_n_rounds, "give 1 or more, or null")
        require(max_domains >= 2, "DomainMetrics.max_domains", max_domains, "give 2 or more")
        self.every_n_rounds, self.max_domains = every_n_rounds, max_domains
        self._lines: list[list[str]] = []

    def on_fit_start(self, trainer: RunAccess) -> None:
        names = trainer.data.names if at_sites(trainer) else trainer.domains
        self._names, self._lines = names if 2 <= len(names) <= self.max_domains else [], []
        if len(names) > self.max_domains:
            rank_zero_info(
                f"DomainMetrics: {len(names)} domains, more than max_domains={self.max_domains}: none is told"
            )

    def on_round_end(self, trainer: RunAccess) -> None:
        round_ = trainer.server.round
        if self.every_n_rounds is not None and round_ % self.every_n_rounds == 0 and round_ + 1 < trainer.max_rounds:
            self._measure(trainer)

    def on_last_round_end(self, trainer: RunAccess) -> None:
        values = self._measure(trainer)
        counts, metrics = self._tabulate(trainer, values)
        if trainer.run_dir is not None and metrics:
            lines: list[list[object]] = [["domain", *(count.replace(" ", "_") for count in counted("test")), *metrics]]
            lines += [[name, *counts[name], *map(of_domain.get, metrics)] for name, of_domain in values.items()]
            write_atomically(trainer.run_dir / "domains.csv", lambda path: write_rows(path, lines))

    def on_evaluation_command_end(self, trainer: RunAccess, phase: str) -> None:
        names, self._lines = trainer.domains_of(phase), []
        self._names = names if 2 <= len(names) <= self.max_domains else []
        self._tabulate(trainer, self._measure(trainer, phase), phase)

    def summary_of_fit(self) -> str:
        return aligned(self._lines) + "\n" if self._lines else ""

    def _tabulate(
        self, trainer: RunAccess, values: Mapping[str, Mapping[str, float]], phase: str = "test"
    ) -> tuple[dict[str, tuple[int, int, int]], list[str]]:
        """Keep the table of the console; returns the counts of each domain, and the metrics in their order."""
        found = dict.fromkeys(name for of_domain in values.values() for name in of_domain)
        metrics = sorted(found, key=lambda name: USUAL.index(name) if name in USUAL else len(USUAL))
        counts = {name: counts_of(trainer, name, phase) for name in values}
        if not metrics:
            return counts, metrics
        own = (f"{phase}/", f"{phase}_")
        of_all = {plain(tag): value for tag, value in trainer.metrics.items() if tag.startswith(own)}
        self._lines = [["domain", *counted(phase), *metrics]]
        for name, of_domain in [*values.items(), ("all", of_all)]:
            shown = [told(metric, of_domain[metric]) if metric in of_domain else "" for metric in metrics]
            self._lines.append([name, *(str(n or "") for n in counts.get(name, ("", "", ""))), *shown])
        return counts, metrics

    def _measure(self, trainer: RunAccess, phase: str = "test") -> dict[str, dict[str, float]]:
        """Log and return the metrics of each domain, by its name; all workers call this."""
        values = {name: self._of_domain(trainer, name, phase) for name in self._names}
        for name, of_domain in values.items():
            for metric, value in of_domain.items():
                trainer.log(f"domain/{name}/{metric}", value)
        return {name: of_domain for name, of_domain in values.items() if of_domain}

    def _of_domain(self, trainer: RunAccess, name: str, phase: str) -> dict[str, float]:
        if at_sites(trainer):
            own = f"sites/{name}/"
            sent = [(tag, value) for tag, value in trainer.metrics.items() if tag.startswith(own + phase)]
            return {plain(tag.removeprefix(own)): value for tag, value in sent}
        if not trainer.client.kept:
            return {plain(tag): value for tag, value in trainer.evaluate(phase, domain=name).items()}
        if phase == "val":  # of which clients have none of their own
            return {}
        evaluated = [trainer.evaluate("test", client=k) for k in clients_of(trainer, name)]
        tags = dict.fromkeys(tag for of_client in evaluated for tag in of_client)
        return {plain(tag): finite_mean([of_client.get(tag, np.nan) for of_client in evaluated]) for tag in tags}


def at_sites(trainer: RunAccess) -> bool:
    """Whether the clients are real sites, which evaluate on their own data."""
    return bool(getattr(trainer.data, "elsewhere", False))


def clients_of(trainer: RunAccess, domain: str) -> list[int]:
    """The clients that hold this domain alone."""
    return [k for k in range(trainer.data.num_clients) if trainer.data.info(k).domain == domain]


def counted(phase: str) -> tuple[str, str, str]:
    """The names of :func:`counts_of`."""
    return "clients", "training examples", f"{'test' if phase == 'test' else 'validation'} examples"


def counts_of(trainer: RunAccess, domain: str, phase: str) -> tuple[int, int, int]:
    """A domain's clients, training examples and those of a phase; examples are 0 where they are not known."""
    if at_sites(trainer):
        fact = trainer.data.fact(trainer.data.names.index(domain))
        return 1, fact.num_examples, dict(fact.evaluation).get(phase, 0)
    plan = trainer.data.plan
    known = plan.domains is not None and domain in plan.domain_names
    examples = int((plan.domains == plan.domain_names.index(domain)).sum()) if known else 0
    return len(clients_of(trainer, domain)), examples, trainer.num_examples(domain, phase)


def plain(tag: str) -> str:
    """A metric's name without the phase."""
    return re.sub("^(test|val)[/_]", "", tag)


def write_rows(path: Path, rows: list[list[object]]) -> None:
    """Write a CSV file."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
