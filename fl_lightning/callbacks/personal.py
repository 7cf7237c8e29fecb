"""How well each client is served: accuracy on the test data of each client and of each domain.

FedBABU (Oh et al., ICLR 2022, section 4, https://arxiv.org/abs/2106.06042) evaluates the global model on each client's
own test data, as it is and after some steps of fine-tuning on the client's training data. FedBN (Li et al., ICLR 2021,
section 5, https://arxiv.org/abs/2102.07623) evaluates each client's own model on the test data of its domain. FedProto
(Tan et al., AAAI 2022, https://arxiv.org/abs/2105.00243, https://github.com/yuetan031/fedproto, lib/update.py)
classifies a representation by the nearest global prototype among those of the client's own classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.measurement import (
    Measurement,
    drawn_clients,
    finite_mean,
    labelled,
    log_finite,
    measure_clients,
    require_test_data,
)
from fl_lightning.errors import UsageError, require
from fl_lightning.functional import as_rows
from fl_lightning.plotting.values import MODELS
from fl_lightning.records.summary import aligned, told
from fl_lightning.state import State


class PersonalAccuracy(Measurement):
    """Measures the accuracy on each client's own test data and on each domain.

    The model is the global one or, where entries of the state stay with the clients, each client's own one. A client's
    test data are what ``data.test_dataloader(k)`` gives: those of its domain, or as many as there are in the
    proportions of its labels.

    In ``personal.npz``, for R measurements, m clients and V domains:

    - ``rounds`` (R,) and ``clients`` (R, m), the same in every round.
    - ``own`` (R, m): accuracy on the client's test data.
    - ``tuned`` (R, m): the same after fine-tuning; nan in rounds without it, and left out without ``fine_tune_steps``.
    - ``prototype`` (R, m): accuracy of the nearest prototype, in a run whose methods have prototypes.
    - ``domains`` (R, V), their names, and ``domain`` (R, V), where the data have domains: accuracy of the global model
      on the test data of each; where entries stay with the clients, the mean of ``own`` over its clients.

    Each of the first three is logged as mean, mean over the worst tenth of the clients and standard deviation:
    ``personal/accuracy``, ``personal/worst_tenth``, ``personal/spread``, then ``personal/tuned/accuracy``, ... and
    ``personal/prototype/accuracy``, ...; the domains as ``personal/domain/<name>``. The figure is ``personal/clients``,
    and the console shows the last measurement of each client at the end. ``test`` with a checkpoint of a finished run
    shows and logs the same, and writes no file.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        max_clients: most clients that are measured, at least 1; of more as many are drawn at random, once for the run.
        examples: about how many test examples of each client and each domain; None takes all.
        fine_tune_steps: local steps of fine-tuning by the module's own loss, all parameters included, at least 0; 0 for
            none. FedBABU takes 1 to 5 epochs.
        fine_tune: ``last`` fine-tunes in the last round only, ``always`` in every round that is measured.

    Raises:
        UsageError: an argument out of its range, no test data, or none for a client.
    """

    file, after_evaluation = "personal.npz", True
    requires = ("logits",)

    def __init__(
        self,
        every_n_rounds: int = 10,
        max_clients: int = 20,
        examples: int | None = 128,
        fine_tune_steps: int = 10,
        fine_tune: Literal["last", "always"] = "last",
    ) -> None:
        super().__init__(every_n_rounds)
        require(max_clients >= 1, "PersonalAccuracy.max_clients", max_clients, "give 1 or more")
        require(examples is None or examples >= 1, "PersonalAccuracy.examples", examples, "give 1 or more")
        require(fine_tune_steps >= 0, "PersonalAccuracy.fine_tune_steps", fine_tune_steps, "give 0 or more")
        require(fine_tune in ("last", "always"), "PersonalAccuracy.fine_tune", fine_tune, "choose last or always")
        self.max_clients, self.examples = max_clients, examples
        self.fine_tune_steps, self.fine_tune = fine_tune_steps, fine_tune

    def setup(self, trainer: RunAccess) -> None:
        require_test_data(trainer, self)
        clients = range(trainer.data.num_clients)
        self.clients = drawn_clients(clients, self.max_clients, trainer.seed, "PersonalAccuracy")
        for k in self.clients:
            try:
                has_data = trainer.has_data("test", k)
            except UsageError as error:
                message = f"PersonalAccuracy needs the test data of each client: {error}, or take the callback out"
                raise UsageError(message) from error
            hint = "the test data lack its classes; give a larger data.test_size, or take the callback out"
            require(has_data, "PersonalAccuracy: test examples of client", k, hint)
        self._lines: list[list[str]] = []
        # the class declares them as server values, which have no value before the first round
        methods: list[Any] = trainer.methods.methods
        self._with_prototypes = next((method for method in methods if hasattr(type(method), "prototypes")), None)

    def measure(self, trainer: RunAccess) -> None:
        self.keep(trainer, self._measured(trainer, self.fine_tune == "always"))

    def on_evaluation_command_end(self, trainer: RunAccess, phase: str) -> None:
        self._lines = []
        if phase == "test":  # clients have no validation data of their own
            self._measured(trainer, True)

    def on_last_round_end(self, trainer: RunAccess) -> None:
        # where a callback ends the run after a round that was measured, this measures it again, with fine-tuning
        again = trainer.server.round in self.series.get("rounds", [])[-1:]
        if not again or (self.fine_tune_steps and self.fine_tune == "last"):
            self.keep(trainer, self._measured(trainer, True))

    def summary_of_fit(self) -> str:
        return aligned(self._lines) + "\n" if self._lines else ""

    def _measured(self, trainer: RunAccess, tune: bool) -> dict[str, Any]:
        """The arrays of a measurement, which is logged; all workers call this."""
        values = measure_clients(trainer, self.clients, lambda k: self._of_client(trainer, k, tune))
        measured: dict[str, Any] = {"clients": np.array(self.clients)}
        for what in next(iter(values.values())):
            measured[what] = np.array([of_client[what] for of_client in values.values()])
            prefix = "personal/" if what == "own" else f"personal/{what}/"
            log_finite(trainer, spread_over_clients(measured[what]), prefix)
        self._lines = [["client", "domain", *(MODELS[what] for what in measured if what in MODELS)]]
        for k, of_client in values.items():
            shares = ["" if math.isnan(value) else told("accuracy", value) for value in of_client.values()]
            self._lines.append([str(k), trainer.data.info(k).domain or "", *shares])
        domains, by_domain = trainer.domains_of("test"), {}
        if domains:
            for name in domains:
                own = [of_client["own"] for k, of_client in values.items() if trainer.data.info(k).domain == name]
                if trainer.client.kept:
                    by_domain[name] = finite_mean(own)
                else:
                    parts = trainer.gather(self._hits(trainer, None, domain=name))
                    by_domain[name] = share(*map(sum, zip(*parts, strict=True)))
            measured["domains"], measured["domain"] = np.array(list(by_domain)), np.array(list(by_domain.values()))
            log_finite(trainer, by_domain, "personal/domain/")
        return measured

    def _of_client(self, trainer: RunAccess, k: int, tune: bool) -> dict[str, float]:
        values = {"own": share(*self._hits(trainer, None, client=k))}
        if self.fine_tune_steps:
            tuned = trainer.fine_tune(k, None, self.fine_tune_steps) if tune else None
            values["tuned"] = math.nan if tuned is None else share(*self._hits(trainer, tuned, client=k))
        method = self._with_prototypes
        if method is not None:
            values["prototype"], counts = math.nan, trainer.data.info(k).label_counts
            usable = None if method.prototypes is None else method.known
            if usable is not None and counts is not None:
                usable = usable & (counts > 0).to(usable.device)
            if usable is not None and usable.any():
                to_nearest = partial(nearest, prototypes=method.prototypes, usable=usable)
                values["prototype"] = share(*self._hits(trainer, None, "representation", to_nearest, client=k))
        return values

    def _hits(
        self,
        trainer: RunAccess,
        state: State | None,
        tap: str = "logits",
        classify: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(1),
        **where: Any,
    ) -> tuple[int, int]:
        """How many test examples ``classify`` puts in their class by a tap of a state, and how many there are."""
        hits = total = 0
        for values, targets in labelled(trainer, self, state, tap, examples=self.examples, **where):
            hits += int((classify(values) == targets).sum())
            total += len(targets)
        return hits, total


def share(hits: int, total: int) -> float:
    """The share of the hits; nan of nothing."""
    return hits / total if total else math.nan


def nearest(z: Tensor, prototypes: Tensor, usable: Tensor) -> Tensor:
    """The class ``(B,)`` of the nearest prototype ``(C, d)`` among the ``usable (C,)``, by Euclidean distance."""
    rows = as_rows(z).double()
    distances = torch.cdist(rows, prototypes.to(rows), compute_mode="donot_use_mm_for_euclid_dist")
    return distances.masked_fill(~usable.to(rows.device), math.inf).argmin(1)


def spread_over_clients(values: np.ndarray) -> dict[str, float]:
    """Mean (``accuracy``), mean over the ``worst_tenth`` (of at least one client) and standard deviation."""
    known = np.sort(values[np.isfinite(values)])
    worst, spread = known[: math.ceil(len(known) / 10)], float(known.std()) if len(known) else math.nan
    return {"accuracy": finite_mean(known), "worst_tenth": finite_mean(worst), "spread": spread}
