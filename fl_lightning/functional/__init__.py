"""The mathematics of the methods as pure functions of tensors.

They compute in float32 (float64 for float64 input), also under autocast, and where a value is undefined, as for a batch
of one example, a loss is 0 with gradient 0. Representations of more than two dimensions are
flattened to ``(B, d)``, by :func:`as_rows`.
"""

from fl_lightning.functional.calibration import adjusted_logits, calibrated_logits, logit_suppression, restricted_logits
from fl_lightning.functional.cka import (
    cosine_similarity,
    frobenius_similarity,
    linear_cka,
    linear_ckas,
    rbf_cka,
    similarities,
    unbiased_gram,
)
from fl_lightning.functional.collapse import cosines, neural_collapse
from fl_lightning.functional.contrastive import model_contrastive_loss, representation_contrast
from fl_lightning.functional.decorrelation import (
    correlation_frobenius,
    covariance_decorrelation,
    singular_value_variance,
    structured_covariance_decorrelation,
)
from fl_lightning.functional.distillation import not_true_distillation, vacant_class_distillation
from fl_lightning.functional.low_rank import low_rank_factors
from fl_lightning.functional.prototypes import class_sums, prototype_distance
from fl_lightning.functional.robust import (
    chosen_by_score,
    krum_scores,
    trimmed_mean,
)
from fl_lightning.functional.rows import as_rows
from fl_lightning.functional.spectrum import (
    condition_number,
    covariance_spectrum,
    effective_rank,
    eigenvalues,
    numerical_rank,
    singular_alignment,
    singular_values,
    stable_rank,
)
from fl_lightning.functional.uniformity import probability_variance_hinge, rbf_uniformity

__all__ = [
    "adjusted_logits",
    "as_rows",
    "calibrated_logits",
    "chosen_by_score",
    "class_sums",
    "condition_number",
    "correlation_frobenius",
    "cosine_similarity",
    "cosines",
    "covariance_decorrelation",
    "covariance_spectrum",
    "effective_rank",
    "eigenvalues",
    "frobenius_similarity",
    "krum_scores",
    "linear_cka",
    "linear_ckas",
    "logit_suppression",
    "low_rank_factors",
    "model_contrastive_loss",
    "neural_collapse",
    "not_true_distillation",
    "numerical_rank",
    "probability_variance_hinge",
    "prototype_distance",
    "rbf_cka",
    "rbf_uniformity",
    "representation_contrast",
    "restricted_logits",
    "similarities",
    "singular_alignment",
    "singular_value_variance",
    "singular_values",
    "stable_rank",
    "structured_covariance_decorrelation",
    "trimmed_mean",
    "unbiased_gram",
    "vacant_class_distillation",
]
