"""Pure functions of tensors, in float32 at least also under autocast: the mathematics of the methods."""

from fl_lightning.functional.calibration import calibrated_logits
from fl_lightning.functional.cka import cosine_similarity, frobenius_similarity, linear_cka, linear_ckas, rbf_cka
from fl_lightning.functional.contrastive import representation_contrast
from fl_lightning.functional.decorrelation import correlation_frobenius
from fl_lightning.functional.spectrum import (
    covariance_spectrum,
    effective_rank,
    eigenvalues,
    singular_values,
    stable_rank,
)
from fl_lightning.functional.uniformity import rbf_uniformity
from fl_lightning.functional.variance import probability_variance_hinge

__all__ = [
    "calibrated_logits",
    "correlation_frobenius",
    "cosine_similarity",
    "covariance_spectrum",
    "effective_rank",
    "eigenvalues",
    "frobenius_similarity",
    "linear_cka",
    "linear_ckas",
    "probability_variance_hinge",
    "rbf_cka",
    "rbf_uniformity",
    "representation_contrast",
    "singular_values",
    "stable_rank",
]
