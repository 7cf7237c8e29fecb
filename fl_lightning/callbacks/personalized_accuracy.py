"""Accuracy on the test data of each client and of each domain.

FedBABU (Oh et al., ICLR 2022, section 4, https://arxiv.org/abs/2106.06042) evaluates the global model on each client's
test data, unchanged and after some steps of fine-tuning on the client's training data. FedBN (Li et al., ICLR 2021,
section 5, https://arxiv.org/abs/2102.07623) evaluates each client's personalized model on the test data of its domain.
FedProto (Tan et al., AAAI 2022, https://arxiv.org/abs/2105.00243, https://github.com/yuetan031/fedproto, lib/update.py)
classifies a representation by the nearest global prototype of the client's classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.measurement import (
    Measurement,
    drawn_clients,
    finite_mean,
    honest_clients,
    labelled,
    log_finite,
    measure_clients,
    quotient,
    require_test_data,
)
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.state import State
from fl_lightning.functional import as_rows
from fl_lightning.plotting.values import MODELS
from fl_lightning.storage.metric_format import aligned, format_value
from fl_lightning.utilities.errors import UsageError, require

# a metric of each client is logged for up to so many clients
MOST_TAGS = 100


class PersonalAccuracy(Measurement):
    """Measures the accuracy on each client's test data and on each domain.

    The model is the one that a client would begin its next visit with: the global model or, if entries of the state
    stay with the clients, each client's personalized model. A method may define other
    personalized models (:meth:`.Method.personal_state`). If these are not the models for the next visit, the tags name
    their point in the round: ``personal/trained/accuracy`` or ``personal/adapted/accuracy`` instead of
    ``personal/accuracy``. A client's test data come from ``data.test_dataloader(k)``: the test data of its domain, or
    the largest subset with the proportions of its labels. Clients that attack are left out.

    In ``personal.npz``, for R measurements, m clients and V domains:

    - ``rounds`` (R,) and ``clients`` (R, m), the same in every round.
    - ``own`` (R, m): accuracy on the client's test data, and ``examples`` (R, m): the number of these.
    - ``tuned`` (R, m): the same after fine-tuning; nan in rounds without it, and missing without ``fine_tune_steps``.
    - ``prototype`` (R, m): accuracy of the nearest prototype, in a run with prototypes.
    - ``domains`` (R, V), their names, and ``domain`` (R, V), for data with domains: accuracy of the global model on the
      test data of each; if entries stay with the clients, the mean of ``own`` over its clients.

    Each of the accuracies ``own``, ``tuned`` and ``prototype`` is logged as mean, mean over the worst tenth of the
    clients and standard deviation: ``personal/accuracy``, ``personal/worst_tenth``, ``personal/spread``, then
    ``personal/tuned/accuracy``, ... and ``personal/prototype/accuracy``, ...; ``own`` also by client, as
    ``personal/client/<id>``, with up to 100 clients. Even equally good models differ in accuracy on small test sets:
    ``fair/noise``, the mean of :math:`a_k (1 - a_k) / t_k` over the accuracies on :math:`t_k` examples, is about what
    this adds to their variance, the square of ``personal/spread``. Domains are logged as ``personal/domain/<name>``.
    The figure is ``personal/clients``, and the console shows the last measurement of each client at the end. ``test``
    with a checkpoint of a finished run shows and logs the same, without a file.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        max_clients: number of measured clients at most, at least 1; drawn at random, once for the run, if there are
            more.
        examples: approximate number of test examples of each client and each domain; None takes all.
        fine_tune_steps: local steps of fine-tuning of all parameters with the module's own loss, at least 0; 0 for no
            fine-tuning. FedBABU uses 1 to 5 epochs.
        fine_tune: ``last`` fine-tunes in the last round only, ``always`` in every measured round.

    Raises:
        UsageError: an argument out of its range, no test data, or a client without test data.
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
        require(max_clients >= 1, "PersonalAccuracy.max_clients", max_clients, "use 1 or more")
        require(examples is None or examples >= 1, "PersonalAccuracy.examples", examples, "use 1 or more")
        require(fine_tune_steps >= 0, "PersonalAccuracy.fine_tune_steps", fine_tune_steps, "use 0 or more")
        require(fine_tune in ("last", "always"), "PersonalAccuracy.fine_tune", fine_tune, "use last or always")
        self.max_clients, self.examples = max_clients, examples
        self.fine_tune_steps, self.fine_tune = fine_tune_steps, fine_tune

    def setup(self, trainer: RunContext) -> None:
        require_test_data(trainer, self)
        clients = honest_clients(trainer, self)
        self.clients = drawn_clients(clients, self.max_clients, trainer.seed, "PersonalAccuracy")
        for k in self.clients:
            try:
                has_data = trainer.has_data("test", k)
            except UsageError as error:
                message = f"PersonalAccuracy needs the test data of each client: {error}, or remove the callback"
                raise UsageError(message) from error
            hint = "the test data lack its classes; set a larger data.test_size, or remove the callback"
            require(has_data, "PersonalAccuracy: test examples of client", k, hint)
        self._lines: list[list[str]] = []
        # server values exist on the class before they have a value
        methods: list[Any] = trainer.methods.methods
        with_prototypes = (method for method in methods if hasattr(type(method), "prototypes"))
        self._with_prototypes = next(with_prototypes, None)

    def measure(self, trainer: RunContext) -> None:
        self.keep(trainer, self._measured(trainer, self.fine_tune == "always"))

    def on_evaluation_command_end(self, trainer: RunContext, phase: str) -> None:
        self._lines = []
        if phase == "test":  # clients have no validation data
            self._measured(trainer, True)

    def on_last_round_end(self, trainer: RunContext) -> None:
        # if a callback ends the run after a measured round, this measures the round again with fine-tuning
        again = trainer.server.round in self.series.get("rounds", [])[-1:]
        if not again or (self.fine_tune_steps and self.fine_tune == "last"):
            self.keep(trainer, self._measured(trainer, True))

    def summary_of_fit(self) -> str:
        return aligned(self._lines) + "\n" if self._lines else ""

    def _measured(self, trainer: RunContext, tune: bool) -> dict[str, Any]:
        """Measure, log and return the arrays; all workers call this."""
        measured_clients = measure_clients(trainer, self.clients, lambda k: self._of_client(trainer, k, tune))
        missing = dict.fromkeys(next(iter(measured_clients.values()), {"own": 0.0, "examples": 0.0}), math.nan)
        values = {k: measured_clients.get(k, {**missing}) for k in self.clients}
        examples = np.array([of_client.pop("examples") for of_client in values.values()])
        measured: dict[str, Any] = {"clients": np.array(self.clients), "examples": examples}
        for model_name in next(iter(values.values())):
            of_model = [of_client[model_name] for of_client in values.values()]
            measured[model_name] = np.array(of_model)
            point = trainer.methods.evaluation_point
            prefix = f"personal/{point}" if model_name == "own" else f"personal/{model_name}/"
            log_finite(trainer, spread_over_clients(measured[model_name]), prefix)
            if model_name == "own":
                by_client = {str(k): of_client[model_name] for k, of_client in values.items()}
                log_finite(trainer, by_client if len(by_client) <= MOST_TAGS else {}, f"{prefix}client/")
                log_finite(trainer, {"fair/noise": finite_mean(sampling_variance(measured[model_name], examples))})
        shared = trainer.client.has_global_model and not trainer.methods.personalizes
        labels = {**MODELS, "own": "global model"} if shared else MODELS
        heads = [labels[name] for name in measured if name in labels]
        self._lines = [["client", "domain", *heads]]
        for k, of_client in values.items():
            shares = []
            for value in of_client.values():
                shares.append("" if math.isnan(value) else format_value("accuracy", value))
            self._lines.append([str(k), trainer.data.info(k).domain or "", *shares])
        domains, by_domain = trainer.domains_of("test"), {}
        if domains:
            for name in domains:
                clients = [k for k in values if trainer.data.info(k).domain == name]
                accuracies = [values[k]["own"] for k in clients]
                if not trainer.client.has_global_model:
                    by_domain[name] = finite_mean(accuracies)
                else:
                    parts = trainer.gather(self._hits(trainer, None, domain=name))
                    by_domain[name] = share(*map(sum, zip(*parts, strict=True)))
            measured["domains"], measured["domain"] = np.array(list(by_domain)), np.array(list(by_domain.values()))
            log_finite(trainer, by_domain, "personal/domain/")
        return measured

    def _of_client(self, trainer: RunContext, k: int, tune: bool) -> dict[str, float]:
        hits, examples = self._hits(trainer, None, client=k)
        values = {"own": share(hits, examples), "examples": float(examples)}
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
        trainer: RunContext,
        state: State | None,
        tap: str = "logits",
        classify: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(1),
        **where: Any,
    ) -> tuple[int, int]:
        """Return the number of test examples that ``classify`` assigns correctly from a tap, and their total."""
        hits = total = 0
        for values, targets in labelled(trainer, self, state, tap, examples=self.examples, **where):
            hits += int((classify(values) == targets).sum())
            total += len(targets)
        return hits, total


def share(hits: int, total: int) -> float:
    """Return the share of the hits; nan without examples."""
    return hits / total if total else math.nan


def sampling_variance(accuracies: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """Return the variance of each accuracy that a random test set of its size adds; nan without examples."""
    return quotient(accuracies * (1 - accuracies), examples)


def nearest(z: Tensor, prototypes: Tensor, usable: Tensor) -> Tensor:
    """Return the class ``(B,)`` of the nearest ``usable (C,)`` prototype ``(C, d)`` by Euclidean distance."""
    rows = as_rows(z).double()
    distances = torch.cdist(rows, prototypes.to(rows), compute_mode="donot_use_mm_for_euclid_dist")
    return distances.masked_fill(~usable.to(rows.device), math.inf).argmin(1)


def spread_over_clients(values: np.ndarray) -> dict[str, float]:
    """Return mean (``accuracy``), mean over the ``worst_tenth`` (at least one client) and standard deviation."""
    ordered = np.sort(values[np.isfinite(values)])
    worst, spread = ordered[: math.ceil(len(ordered) / 10)], float(ordered.std()) if len(ordered) else math.nan
    return {"accuracy": finite_mean(ordered), "worst_tenth": finite_mean(worst), "spread": spread}
