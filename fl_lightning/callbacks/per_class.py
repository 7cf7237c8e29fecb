r"""Accuracy of each class before and after aggregation, for a client's majority, minority and missing classes.

FedLC (Zhang et al., ICML 2022, Definition 2, Figures 2 and 6, https://arxiv.org/abs/2209.00189): after local training
the accuracy of a client's minority classes falls, and its missing classes have accuracy 0. Aggregation recovers a part
of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from fl_lightning.callbacks.measurement import (
    ClientMeasurement,
    class_groups,
    finite_mean,
    labelled,
    log_finite,
    measure_clients,
    quotient,
    require_label_counts,
    require_test_data,
)
from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext
from fl_lightning.plotting.values import CLASS_GROUPS
from fl_lightning.utilities.errors import require


class PerClassAccuracy(ClientMeasurement):
    r"""Measures the accuracy of each class for the local models before, and the model after aggregation.

    Both use the same test examples and the raw logits. The accuracy of class c is the share of its test examples
    that are classified as c. A client's *majority* classes are those with :math:`n_c \ge a \, n / C` training examples,
    with a = ``majority``; *missing* classes have no examples, and all others are *minority* classes.

    In ``per_class.npz``, for R measurements, m clients and C classes:

    - ``rounds`` (R,), ``clients`` (R, m) and ``label_counts`` (R, m, C).
    - ``before`` and ``after`` (R, m, C): accuracy of each class for a client's local model, and after aggregation: for
      the global model or, if entries of the state stay with the clients, the client's personalized model; nan for
      classes without test examples.
    - ``groups_before`` and ``groups_after`` (R, m, 3): means over the client's majority, minority and missing
      classes; nan for a group without classes.
    - ``confusion_before`` and ``confusion_after`` (R, C, C): numbers of test examples of a class (row) classified as a
      class (column), summed over the local models, and for the global model.

    Logged are the means over the clients: ``per_class/before/majority``, ``.../minority``, ``.../missing`` and
    ``.../all`` (the mean over the classes), and the same with ``after``. Figures: ``per_class/clients`` (FedLC, Figure
    2), ``per_class/aggregation`` (Figure 6) and ``per_class/confusion``.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        max_clients: number of clients measured in a round at most, at least 1; drawn at random from a larger cohort.
        examples: approximate number of random test examples, the same in every round; None takes all. With many
            classes, a few hundred examples are few for each class.
        majority: threshold a > 0; 1 compares with an even division over all classes. The paper states no threshold.

    Raises:
        UsageError: an argument out of its range, clients without label counts, or no test data.
    """

    file = "per_class.npz"
    requires = ("logits",)

    def __init__(
        self, every_n_rounds: int = 10, max_clients: int = 20, examples: int | None = 512, majority: float = 1.0
    ) -> None:
        super().__init__(every_n_rounds, max_clients)
        require(examples is None or examples >= 1, "PerClassAccuracy.examples", examples, "use 1 or more")
        require(majority > 0, "PerClassAccuracy.majority", majority, "use a number above 0")
        self.examples, self.majority = examples, majority

    def setup(self, trainer: RunContext) -> None:
        require_label_counts(trainer, self)
        require_test_data(trainer, self)

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        if self.measures(trainer, client):
            counts: Any = client.info.label_counts
            self.mine[client.info.id] = {
                "label_counts": counts.numpy(),
                "before": self._confusion(trainer, client.state()),
            }

    def _confusion(self, trainer: RunContext, state: Any) -> np.ndarray:
        """Return the confusion matrix (C, C) of a state on this worker's share of the test examples."""
        batches = labelled(trainer, self, state, "logits", examples=self.examples)
        return confusion(batches, len(trainer.data.info(0).label_counts))

    def record(self, trainer: RunContext, clients: dict[int, dict[str, Any]]) -> None:
        confusions = {"before": {k: values["before"] for k, values in clients.items()}}
        if not trainer.client.has_global_model:
            own_entries = trainer.client.memories().own_entries
            after = measure_clients(trainer, list(clients), lambda k: self._confusion(trainer, own_entries(k)))
        else:  # one model for all clients
            after = dict.fromkeys(clients, np.sum(trainer.gather(self._confusion(trainer, None)), 0))
        confusions["after"] = after
        counts = {k: values["label_counts"] for k, values in clients.items()}
        rows = {k: numbers.astype(float) for k, numbers in counts.items()}
        self.append_table(trainer, "label_counts", rows)
        for when, matrices in confusions.items():
            accuracies = {k: accuracy(matrices[k]) for k in clients}
            groups = {k: by_group(accuracies[k], counts[k], self.majority) for k in clients}
            self.append_table(trainer, when, accuracies)
            self.append_table(trainer, f"groups_{when}", groups)
            means = dict(zip(CLASS_GROUPS, map(finite_mean, np.stack(list(groups.values())).T), strict=True))
            means["all"] = finite_mean(list(map(finite_mean, accuracies.values())))
            log_finite(trainer, means, f"per_class/{when}/")
            models = len(clients) if when == "before" or not trainer.client.has_global_model else 1
            self.append(f"confusion_{when}", sum(list(matrices.values())[:models]))


def confusion(batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> np.ndarray:
    """Return the confusion matrix ``(C, C)`` of logits ``(B, C)`` and labels ``(B,)``, which are its rows."""
    total = torch.zeros(classes, classes, dtype=torch.int64)
    for logits, labels in batches:
        shape = tuple(logits.shape)
        require(logits.ndim == 2 and shape[1] == classes, "the tap logits", shape, f"the labels have {classes} classes")
        total += multiclass_confusion_matrix(logits.argmax(1), labels, classes).cpu()
    return total.numpy()


def accuracy(matrix: np.ndarray) -> np.ndarray:
    """Return the accuracy of each class ``(C,)`` from a confusion matrix; nan for a class without examples."""
    return quotient(np.diag(matrix), matrix.sum(1))


def by_group(accuracies: np.ndarray, counts: np.ndarray, threshold: float) -> np.ndarray:
    """Return a client's mean accuracy on majority, minority and missing classes ``(3,)``; nan for an empty group."""
    groups = class_groups(counts, threshold)
    return np.array([finite_mean(accuracies[groups[name]]) for name in CLASS_GROUPS])
