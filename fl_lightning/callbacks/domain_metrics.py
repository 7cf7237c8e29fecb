"""The module's own metrics on the test data of each domain, such as each hospital, at the end of a run."""

from __future__ import annotations

import csv
import io
import re
from itertools import chain
from typing import Any

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_info

from fl_lightning.callbacks.measurement import PeriodicCallback, finite_mean, measure_clients
from fl_lightning.client.run_context import RunContext
from fl_lightning.storage.atomic_io import write_atomically
from fl_lightning.storage.metric_format import aligned, format_value
from fl_lightning.utilities.errors import require

# metrics that come first in the table
USUAL = ("accuracy", "loss")


class DomainMetrics(PeriodicCallback):
    """Evaluates the model on the test data of each domain, such as each site, with the module's own test step.

    Every run has this callback by default. With at least two domains it acts after the last round and, with
    ``every_n_rounds``, after other rounds. The module's metrics on a domain, such as ``test/accuracy`` or ``test/f1``,
    are logged as ``domain/<name>/accuracy`` and ``domain/<name>/f1``. The console and ``domains.csv`` in the run's
    folder show the last round: a row for each domain, with its number of clients, training examples and test examples,
    if known. ``test`` and ``validate`` with a checkpoint of a finished run show and log the same for its model on the
    test and the validation data, without a file.

    The model is the global model or, if entries of the state stay with the clients, each client's personalized model;
    then the value of a domain is the mean over its clients, and domains without clients are omitted. In a federation,
    each site is a domain, with the values of its last evaluation.

    Args:
        every_n_rounds: rounds from one evaluation to the next, at least 1; None evaluates only after the last round.
        max_domains: number of domains at most, at least 2; with more, which would need a pass for each, none is
            evaluated.
    """

    after_evaluation = True

    def __init__(self, every_n_rounds: int | None = None, max_domains: int = 50) -> None:
        super().__init__(every_n_rounds)
        require(max_domains >= 2, "DomainMetrics.max_domains", max_domains, "use 2 or more")
        self.max_domains = max_domains
        self._lines: list[list[str]] = []

    def on_fit_start(self, trainer: RunContext) -> None:
        super().on_fit_start(trainer)
        self._lines, number = [], len(domain_names(trainer, "test"))
        if number > self.max_domains:
            rank_zero_info(
                f"DomainMetrics: {number} domains, more than max_domains={self.max_domains}; none is evaluated"
            )

    def on_last_round_end(self, trainer: RunContext) -> None:
        self.measure(trainer)
        if trainer.run_dir is not None and self._lines:
            text = io.StringIO()
            # without the row for all data
            header = [name.replace(" ", "_") for name in self._lines[0]]
            csv.writer(text).writerows([header, *self._rows[:-1]])
            content = text.getvalue().encode()
            write_atomically(trainer.run_dir / "domains.csv", lambda path: path.write_bytes(content))

    def on_evaluation_command_end(self, trainer: RunContext, phase: str) -> None:
        self.measure(trainer, phase)

    def measure(self, trainer: RunContext, phase: str = "test") -> None:
        names = domain_names(trainer, phase)
        names = names if 2 <= len(names) <= self.max_domains else []
        every = {name: self._of_domain(trainer, name, phase) for name in names}
        values = {name: of_domain for name, of_domain in every.items() if of_domain}
        for name, of_domain in values.items():
            for metric, value in of_domain.items():
                trainer.log(f"domain/{name}/{metric}", value)
        metric_names = dict.fromkeys(chain.from_iterable(values.values()))
        metrics = sorted(metric_names, key=lambda name: USUAL.index(name) if name in USUAL else len(USUAL))
        counted = ("clients", "training examples", f"{'test' if phase == 'test' else 'validation'} examples")
        self._lines = [["domain", *counted, *metrics]] if metrics else []
        self._rows: list[list[Any]] = []
        tags = [tag for tag in trainer.metrics if re.match(f"{phase}[/_]", tag)]
        of_all = {plain(tag): trainer.metrics[tag] for tag in tags}
        for name, of_domain in [*values.items(), ("all", of_all)] if metrics else ():
            counts = counts_of(trainer, name, phase) if name in values else ("", "", "")
            self._rows.append([name, *counts, *map(of_domain.get, metrics)])
            texts = []
            for metric in metrics:
                texts.append(format_value(metric, of_domain[metric]) if metric in of_domain else "")
            self._lines.append([name, *(str(n or "") for n in counts), *texts])

    def summary_of_fit(self) -> str:
        return aligned(self._lines) + "\n" if self._lines else ""

    def _of_domain(self, trainer: RunContext, name: str, phase: str) -> dict[str, float]:
        if at_sites(trainer):
            prefix = f"sites/{name}/"
            tags = [tag for tag in trainer.metrics if tag.startswith(prefix + phase)]
            return {plain(tag.removeprefix(prefix)): trainer.metrics[tag] for tag in tags}
        if trainer.client.has_global_model:
            evaluated = trainer.evaluate(phase, domain=name)
            return {plain(tag): value for tag, value in evaluated.items()}
        if phase == "val":  # clients have no validation data
            return {}
        clients = clients_in_domain(trainer, name)
        of_clients = measure_clients(trainer, clients, lambda k: trainer.evaluate("test", client=k)).values()
        means = {}
        for tag in dict.fromkeys(tag for of_client in of_clients for tag in of_client):
            numbers = [of_client.get(tag, np.nan) for of_client in of_clients]
            means[plain(tag)] = finite_mean(numbers)
        return means


def domain_names(trainer: RunContext, phase: str) -> list[str]:
    """Return the names of the domains with data of a phase; the sites of a federation."""
    return trainer.data.names if at_sites(trainer) else trainer.domains_of(phase)


def at_sites(trainer: RunContext) -> bool:
    """Return whether the clients are real sites, which evaluate on their own data."""
    return bool(getattr(trainer.data, "is_remote", False))


def clients_in_domain(trainer: RunContext, domain: str) -> list[int]:
    """Return the clients that hold only this domain."""
    return [k for k in range(trainer.data.num_clients) if trainer.data.info(k).domain == domain]


def counts_of(trainer: RunContext, domain: str, phase: str) -> tuple[int, int, int]:
    """Return a domain's numbers of clients, training examples and examples of a phase; 0 if unknown."""
    if at_sites(trainer):
        fact = trainer.data.facts[trainer.data.names.index(domain)]
        return 1, fact.num_examples, dict(fact.evaluation).get(phase, 0)
    plan = trainer.data.plan
    has_domain = plan.domains is not None and domain in plan.domain_names
    examples = int((plan.domains == plan.domain_names.index(domain)).sum()) if has_domain else 0
    return len(clients_in_domain(trainer, domain)), examples, trainer.num_examples(domain, phase)


def plain(tag: str) -> str:
    """Return a metric's name without the phase."""
    return re.sub("^(test|val)[/_]", "", tag)
