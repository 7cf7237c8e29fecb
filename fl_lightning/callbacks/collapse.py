"""Neural collapse of the classifier's input and of the classifier, in the evaluations of a run.

Papyan, Han and Donoho, PNAS 2020, https://arxiv.org/abs/2008.08186: late in training, the representations of a class
approach their mean, and the class means and the rows of the classifier approach a simplex equiangular tight frame. Fang
et al., PNAS 2021, https://arxiv.org/abs/2101.12699: the rows of classes with few or no examples approach each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callbacks.measurement import (
    EvaluationMeasurement,
    classifier_of,
    has_test_step,
    log_finite,
    require_label_counts,
    require_test_data,
)
from fl_lightning.callbacks.personalized_accuracy import nearest
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.weighted import Sums, Weighted
from fl_lightning.functional import as_rows, class_sums, cosines, neural_collapse
from fl_lightning.utilities.errors import require


class NeuralCollapse(EvaluationMeasurement):
    r"""Logs how far the classifier's input z and the classifier are from neural collapse, on all test data.

    :math:`\mu_c` is the mean of z over the test examples of class c, :math:`w_c` the class's row of the classifier's
    weight, and K the number of classes with test examples, of C. The distances are 0 for a complete collapse, where z
    is a vertex of a simplex for each class and the rows are in proportion to the vertices; their formulas are in
    :func:`~fl_lightning.functional.neural_collapse`:

    - ``nc/1`` and ``nc/1_quotient``: variability within classes, relative to the variability between them.
    - ``nc/2_norm_means`` and ``nc/2_norm_weights``: relative spread of the norms of the centred class means and rows;
      ``nc/2_angle_means`` and ``nc/2_angle_weights``: distance of the cosines of two of them from -1 / (K - 1);
      ``nc/2_etf``: distance of the rows' products from the products for a simplex equiangular tight frame.
    - ``nc/3``: squared distance of the classifier and the class means, both normalised; at most 4.
    - ``nc/4``: share of the test examples for which the class with the largest of the K logits differs from the class
      of the nearest :math:`\mu_c`.

    Besides, ``nc/classes`` is K, and ``nc/dead_units`` the share of the units of z that are 0 for all test examples.
    For the rows of classes without test examples, ``nc/absent/cosine`` is the mean cosine of two of them,
    ``nc/absent/cosine_present`` that to the rows of the other classes, and ``nc/absent/norm`` their mean norm divided
    by the mean norm of the others. Undefined values, such as all distances if K < 2, are not logged.

    In ``neural_collapse.npz``, for R measurements: ``rounds`` (R,); each value (R,), under its tag with ``_`` for
    ``/``; ``cosines_means`` and ``cosines_weights`` (R, C, C), the cosines of two centred class means or rows, nan if
    undefined; ``norms_means`` and ``norms_weights`` (R, C), their norms divided by the mean of the K classes. The
    figures are ``nc/rounds``, ``nc/cosines`` and ``nc/norms``.

    In a round with an evaluation of the global model, a measurement needs no additional forward pass; in other rounds
    it costs an evaluation. z and the logits of all test examples are kept until the evaluation ends.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.

    If entries of the state stay with the clients (FedBN, FedProto), each value is the mean over personalized models.

    Raises:
        UsageError: an argument out of its range, no test data, clients without label counts, or a tap ``logits`` other
            than a layer that reads ``representation`` and has a row of weights for each class.
    """

    file = "neural_collapse.npz"
    requires = ("representation", "logits")

    def __init__(self, every_n_rounds: int = 1) -> None:
        super().__init__(every_n_rounds)

    def setup(self, trainer: RunContext) -> None:
        require_test_data(trainer, self)
        hint = "no test_step and no validation_step; define one, or remove the callback"
        require(has_test_step(trainer), "NeuralCollapse with the model", type(trainer.client.module).__name__, hint)
        self._classifier = classifier_of(trainer, self, classes=require_label_counts(trainer, self))
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def on_fit_start(self, trainer: RunContext) -> None:
        super().on_fit_start(trainer)
        shape = trainer.client.tap_shape("representation")
        if shape is not None:
            self._check_width(shape.numel())

    def _check_width(self, width: int) -> None:
        """Refuse a representation that is not the input of the classifier."""
        hint = f"the classifier reads {self._classifier.weight.shape[1]} numbers; bind the tap to its input"
        fits = width == self._classifier.weight.shape[1]
        require(fits, "NeuralCollapse: width of the representation", width, hint)

    def see(self, targets: Tensor | None, taps: dict[str, Tensor]) -> None:
        require(targets is not None, "NeuralCollapse: labels of the test data", None, "add integer labels (B,)")
        z = as_rows(taps["representation"].detach())
        self._check_width(z.shape[1])
        # the next batch may overwrite the outputs of a compiled model
        self._seen.append((z.clone(), taps["logits"].detach().clone(), targets))  # type: ignore[arg-type]

    def of_model(self, trainer: RunContext) -> dict[str, Tensor]:
        batches, self._seen = self._seen, []
        weight = self._classifier.weight.detach().double().cpu()
        first_sums = Sums()
        for z, _, targets in batches:
            sums, numbers = class_sums(z, targets, len(weight))
            active = (z != 0).sum(0).double()
            first_sums.add({"z": Weighted(sums, numbers), "active": Weighted.summed(active, len(z))})
        trainer.all_reduce(first_sums)
        if not first_sums.totals:
            return {}
        means, numbers = first_sums.totals["z"].mean(), first_sums.totals["z"].weight
        occurs, second_sums = numbers[:, 0] > 0, Sums()
        for z, logits, targets in batches:
            gaps = z.double() - means.to(z.device)[targets]
            choices = logits.masked_fill(~occurs.to(z.device), -torch.inf).argmax(1)
            differ = (choices != nearest(z, means, occurs)).sum()
            second_sums.add({"within": Weighted.summed(gaps.T @ gaps, 1), "differ": Weighted.summed(differ, len(z))})
        trainer.all_reduce(second_sums)
        within = second_sums.totals["within"].total / numbers.sum()
        centred = torch.where(occurs[:, None], means - means[occurs].mean(0), torch.nan)
        measures = {
            **neural_collapse(means[occurs], within, weight[occurs]),
            **{"4": second_sums.means()["differ"], "classes": occurs.sum().double()},
            "dead_units": (first_sums.totals["active"].total == 0).double().mean(),
        }
        measures |= of_absent(weight, occurs)
        values = {f"nc/{name}": value for name, value in measures.items()}
        for name, vectors in {"means": centred, "weights": weight}.items():
            norms = vectors.norm(dim=1)
            values |= {f"cosines_{name}": cosines(vectors), f"norms_{name}": norms / norms[occurs].mean()}
        return values

    def measure(self, trainer: RunContext) -> None:
        measured = self.measured(trainer)
        scalars = {name: float(value) for name, value in measured.items() if not value.ndim}
        log_finite(trainer, scalars)
        arrays = {name.replace("/", "_"): value.cpu().numpy() for name, value in measured.items()}
        self.keep(trainer, arrays)


def of_absent(rows: Tensor, occurs: Tensor) -> dict[str, Tensor]:
    """Return the values of the rows ``(C, d)`` of classes outside the mask ``occurs (C,)``; nan without such rows."""
    between, absent, norms = cosines(rows), ~occurs, rows.norm(dim=1)
    pairs = absent[:, None] & absent & ~torch.eye(len(rows), dtype=torch.bool)
    return {
        "absent/cosine": between[pairs].mean(),
        "absent/cosine_present": between[absent][:, occurs].mean(),
        "absent/norm": norms[absent].mean() / norms[occurs].mean(),
    }
