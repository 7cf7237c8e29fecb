"""Every loss and transform as a scalar of rows x, given the inputs i that the NumPy reference takes too."""

from types import SimpleNamespace

import make_reference_values as reference
import torch
from helpers.runs import draw
from torch.nn.functional import cross_entropy

from fl_lightning import functional as F
from fl_lightning.core.method import Step
from fl_lightning.methods import FedLC

HINGES = ["linear", "none", "square", "clamped_square"]
MISSING = ["floor", "mask", "clamp"]
MARGINS = ["fourth_root", "log_prior"]

CASES = {
    "linear_cka": lambda x, i: F.linear_cka(x, i["other"]),
    "linear_cka debiased": lambda x, i: F.linear_cka(x, i["other"], debiased=True),
    "linear_ckas": lambda x, i: (F.linear_ckas(x, i["other"], i["third"]) * torch.tensor([1, 3])).sum(),
    "rbf_cka": lambda x, i: F.rbf_cka(x, i["other"], 0.7),
    "frobenius_similarity": lambda x, i: F.frobenius_similarity(x, i["other"]),
    "cosine_similarity": lambda x, i: F.cosine_similarity(x, i["other"]),
    "representation_contrast": lambda x, i: F.representation_contrast(x.flatten(1)[0, 0], x.flatten(1)[0, -1]),
    "model_contrastive_loss": lambda x, i: F.model_contrastive_loss(x, i["other"], [i["third"]], 0.3),
    "model_contrastive_loss of two": lambda x, i: F.model_contrastive_loss(x, i["other"], (i["third"], i["other"])),
    "rbf_uniformity": lambda x, i: F.rbf_uniformity(x),
    "rbf_uniformity 2": lambda x, i: F.rbf_uniformity(x, 2.0),
    "rbf_uniformity detached": lambda x, i: F.rbf_uniformity(x, detach_bandwidth=True),
    "correlation_frobenius": lambda x, i: F.correlation_frobenius(x),
    "correlation_frobenius paper": lambda x, i: F.correlation_frobenius(x, "paper"),
    "correlation_frobenius faint": lambda x, i: F.correlation_frobenius(2**-13 * x),
    "singular_value_variance": lambda x, i: F.singular_value_variance(x),
    "covariance_decorrelation": lambda x, i: F.covariance_decorrelation(x),
    "structured_covariance_decorrelation": lambda x, i: F.structured_covariance_decorrelation(x, 2, 0.3),
    **{
        f"not_true_distillation {t}": lambda x, i, t=t: F.not_true_distillation(x, i["other"], i["labels"], t)
        for t in (1, 3)
    },
    "logit_suppression": lambda x, i: F.logit_suppression(x, i["labels"], i["counts"]),
    "vacant_class_distillation": lambda x, i: F.vacant_class_distillation(x, i["other"], i["counts"]),
    "prototype_distance": lambda x, i: F.prototype_distance(x, i["labels"], i["prototypes"], i["known"]),
    **{
        f"probability_variance_hinge {hinge}": lambda x, i, hinge=hinge: F.probability_variance_hinge(x, hinge)
        for hinge in HINGES
    },
    **{
        f"calibrated_logits {missing} {margin}": lambda x, i, how=(missing, margin): cross_entropy(
            F.calibrated_logits(x, i["counts"], 0.4, *how), i["labels"]
        )
        for missing in MISSING
        for margin in MARGINS
    },
    **{
        f"adjusted_logits {floor}": lambda x, i, floor=floor: cross_entropy(
            F.adjusted_logits(x, i["counts"], 0.4, floor), i["labels"]
        )
        for floor in (0, 1e-3)
    },
    **{
        f"restricted_logits {mode}": lambda x, i, mode=mode: cross_entropy(
            F.restricted_logits(x, i["counts"], 0.3, mode), i["labels"]
        )
        for mode in ("binary", "frequency")
    },
}
# of logits (B, C) rather than of representations of any shape
OF_LOGITS = (
    "probability_variance_hinge",
    "not_true_distillation",
    "logit_suppression",
    "vacant_class_distillation",
    "calibrated_logits",
    "adjusted_logits",
    "restricted_logits",
)


def without_true_class(x, i):
    """FedLC's penalty, the part of its loss that is no transform of the logits."""
    client = SimpleNamespace(info=SimpleNamespace(label_counts=i["counts"]))
    return FedLC(tau=0.5, denominator="exclude_true").penalty(client, Step(None, i["labels"], {"logits": x}))


def inputs_of(shape):
    """The inputs of the reference as tensors, and the rows."""
    given = {name: torch.from_numpy(value) for name, value in reference.inputs(shape).items()}
    return given.pop("x"), given


def beside(z, seed=1):
    """Inputs for any rows z."""
    d = z[0].numel()
    return {
        "other": draw(*z.shape, seed=seed).to(z),
        "third": draw(*z.shape, seed=seed + 1).to(z),
        "labels": torch.arange(len(z)) % 2 * (d - 1),
        "counts": torch.arange(d).roll(-1) + 2 * (torch.arange(d) == d - 1),
        "prototypes": draw(d, d, seed=seed + 2).to(z),
        "known": torch.arange(d) % 3 != 1,
    }


def converted(given, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}
