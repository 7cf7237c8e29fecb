r"""One model, scored in all the ways in which papers report accuracy.

FedLC (Zhang et al., ICML 2022, https://arxiv.org/abs/2209.00189) and FedRS (Li and Zhan, KDD 2021,
https://doi.org/10.1145/3447548.3467254) change a client's logits by its label counts in training. Whether a score also
does so at test time can decide which method is ahead. The prior on the logits is the correction of Saerens et
al. (Neural Computation 14(1), 2002, Eq. 2.4, https://doi.org/10.1162/089976602753284446).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.measurement import (
    PeriodicCallback,
    finite_mean,
    honest_clients,
    labelled,
    log_finite,
    measure_clients,
    require_global_model,
    require_label_counts,
    require_test_data,
)
from fl_lightning.callbacks.per_class import accuracy, confusion
from fl_lightning.callbacks.personalized_accuracy import spread_over_clients
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.state import State
from fl_lightning.utilities.errors import count, require

ACCURACY = "test/accuracy"


class Scores(PeriodicCallback):
    r"""Logs the accuracy of the global model under every score, as ``scores/<name>``.

    On all test data:

    - ``pooled``: the module's own ``test/accuracy``, or the share of hits if it does not log one.
    - ``class_balanced``: the mean over the classes of their accuracies.
    - ``recalibrated``: ``pooled`` with BatchNorm's running statistics recomputed, layer by layer, on the training data
      of all clients; for models with such statistics.
    - ``best`` and ``mean_of_last``, at the end of the run: the greatest ``test/accuracy`` of all evaluated rounds,
      which is selected on the test data, and the mean of the last ``last_k``.

    On each client's test data, as the unweighted mean over the clients, of the global model or of the clients' models
    that a method gives them (:meth:`.Method.personal_state`). Where these are not for the next visit, the names begin
    with ``trained/`` or ``adapted/``. Clients that attack are left out.

    - ``clients``: by the raw logits, and ``worst_tenth``, the mean over the worst tenth of the clients.
    - ``training_logits``: by the logits as the loss of the client's training step sees them, after each method's
      ``transform_logits`` with the client's counts. Without such a method it equals ``clients``.
    - ``label_mask``: only classes with training examples of the client can be predicted.
    - ``label_prior``: :math:`o_c + \log(\pi_{kc} / \pi_c)` in place of the logit :math:`o_c`, with the share of class c
      in the training examples of client k and of all clients.
    - ``local_steps``: after this number of local steps with the module's own loss on the client's training data.

    ``test`` and ``validate`` with a checkpoint of a finished run log the scores of its global model, without ``best``
    and ``mean_of_last``.

    A client's test data come from ``data.test_dataloader(k)``: the test data of its domain, or the largest subset with
    the proportions of its training labels; clients without test examples of their classes are omitted, with a warning.
    If the data set does not divide its test data, all test data are used, and the examples of a class together have the
    weight of the class in the client's training data.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; None measures only after the last round.
            A measured round is also evaluated.
        local_steps: steps before ``local_steps``, at least 0; 0 omits this score.
        last_k: evaluated rounds in ``mean_of_last``, at least 1.

    Raises:
        UsageError: an argument out of its range, no test data, clients without label counts, or no global model because
            entries of the state stay with the clients.
    """

    after_evaluation, requires = True, ("logits",)

    def __init__(self, every_n_rounds: int | None = None, local_steps: int = 0, last_k: int = 5) -> None:
        super().__init__(every_n_rounds)
        require(local_steps >= 0, "Scores.local_steps", local_steps, "use 0 or more")
        require(last_k >= 1, "Scores.last_k", last_k, "use 1 or more")
        self.local_steps, self.last_k = local_steps, last_k

    def requires_evaluation(self, round_: int) -> bool:
        return self.is_multiple(round_)

    def setup(self, trainer: RunContext) -> None:
        require_test_data(trainer, self)
        require_label_counts(trainer, self)
        require_global_model(trainer, self, "use PersonalAccuracy, which measures personalized models")
        self._own = trainer.has_own_test_data
        self._clients = clients = honest_clients(trainer, self)
        if self._own:
            self._clients = [k for k in clients if trainer.has_data("test", k)]
        lacking = len(clients) - len(self._clients)
        if lacking:
            trainer.warn(f"Scores: {count(lacking, 'client')} without test data, omitted from the means over clients")

    def on_last_round_end(self, trainer: RunContext) -> None:
        self.measure(trainer)
        rows = [*trainer.history, trainer.metrics]
        evaluated = [row[ACCURACY] for row in rows if ACCURACY in row]
        if evaluated:
            latest = evaluated[-self.last_k :]
            log_finite(trainer, {"best": max(evaluated), "mean_of_last": math.fsum(latest) / len(latest)}, "scores/")

    def on_evaluation_command_end(self, trainer: RunContext, phase: str) -> None:
        self.measure(trainer)

    def measure(self, trainer: RunContext) -> None:
        scores = self._pooled(trainer, None)
        scores["pooled"] = trainer.metrics.get(ACCURACY, scores["pooled"])
        if trainer.client.batch_norms:
            statistics = trainer.recalibrated()
            accuracy = trainer.evaluate("test", statistics).get(ACCURACY)
            scores["recalibrated"] = self._pooled(trainer, statistics)["pooled"] if accuracy is None else accuracy
        clients = range(trainer.data.num_clients)
        counts = torch.stack([trainer.data.info(k).label_counts for k in clients])
        of_all = cache(lambda: self._outputs(trainer, None, None))
        point = trainer.methods.evaluation_point
        by_client = measure_clients(trainer, self._clients, lambda k: self._of_client(trainer, k, counts, of_all))
        for name in next(iter(by_client.values()), {}):
            values = np.array([of_client[name] for of_client in by_client.values()])
            scores[point + name] = finite_mean(values)
            if name == "clients":
                scores[f"{point}worst_tenth"] = spread_over_clients(values)["worst_tenth"]
        log_finite(trainer, scores, "scores/")

    def _pooled(self, trainer: RunContext, state: State | None) -> dict[str, float]:
        """Return the scores on all test data, from their confusion matrix; all workers call this."""
        batches = labelled(trainer, self, state, "logits")
        matrix = np.sum(trainer.gather(confusion(batches, len(trainer.data.info(0).label_counts))), 0)
        return {"pooled": float(np.trace(matrix) / matrix.sum()), "class_balanced": finite_mean(accuracy(matrix))}

    def _of_client(
        self, trainer: RunContext, k: int, counts: Tensor, of_all: Callable[[], tuple[Tensor, Tensor]]
    ) -> dict[str, float]:
        client = k if self._own else None
        of_its_own = trainer.personal_state(k) if trainer.client.has_own_models else None
        shared = not self._own and of_its_own is None
        logits, targets = of_all() if shared else self._outputs(trainer, of_its_own, client)
        weights = torch.ones(len(targets), dtype=torch.float64) if self._own else like(counts[k], targets)

        def score(changed: Tensor, labels: Tensor = targets) -> float:
            return float(weights @ (changed.argmax(1) == labels).double() / weights.sum())

        scores = {
            "clients": score(logits),
            "training_logits": score(trainer.training_logits(k, logits.to(trainer.client.device)).cpu()),
            "label_mask": score(masked(logits, counts[k])),
            "label_prior": score(with_prior(logits, counts[k], counts.sum(0))),
        }
        if self.local_steps:
            tuned = trainer.fine_tune(k, None, self.local_steps)
            scores["local_steps"] = score(*self._outputs(trainer, tuned, client))
        return scores

    def _outputs(self, trainer: RunContext, state: State | None, client: int | None) -> tuple[Tensor, Tensor]:
        """Return the logits ``(N, C)`` and labels ``(N,)`` of this worker's test examples, on the CPU."""
        logits, labels = zip(*labelled(trainer, self, state, "logits", client=client), strict=True)
        return torch.cat(logits).cpu(), torch.cat(labels).cpu()


def masked(logits: Tensor, counts: Tensor) -> Tensor:
    """Return logits ``(B, C)`` with minus infinity for classes without training examples, by ``counts (C,)``."""
    return logits.masked_fill(counts.to(logits.device) == 0, -math.inf)


def with_prior(logits: Tensor, counts: Tensor, of_all: Tensor) -> Tensor:
    r"""Return logits ``(B, C)`` plus :math:`\log(\pi_{kc} / \pi_c)`, in float64, from the counts ``(C,)`` of both."""
    shares, pooled = (part.double() / part.sum() for part in (counts, of_all))
    return masked(logits.double() + (shares / pooled.where(pooled > 0, 1.0)).log(), counts)


def like(counts: Tensor, targets: Tensor) -> Tensor:
    """Return weights ``(N,)`` of examples that add up to the share in ``counts (C,)`` for each class."""
    numbers = torch.bincount(targets, minlength=len(counts)).double()
    return (counts.double() / counts.sum() / numbers.clamp_min(1.0))[targets]
