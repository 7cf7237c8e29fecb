"""Bad arguments are refused before anything is computed, by a message of one line: the key, its value and the hint."""

import math

import pytest
import torch

from fl_lightning import functional as F
from fl_lightning.errors import UsageError

# one row, from which most functions return early
Z, N = torch.zeros(1, 4), torch.ones(4)
X, Y = torch.zeros(1, 3), torch.zeros(6, 3)

REFUSED = [
    (lambda: F.calibrated_logits(Z, N, missing="drop"), "missing='drop'", "floor, mask or clamp"),
    (lambda: F.calibrated_logits(Z, N, margin="none"), "margin='none'", "fourth_root or log_prior"),
    (lambda: F.restricted_logits(Z, N, alpha=1.5), "alpha=1.5", "[0, 1]"),
    (lambda: F.restricted_logits(Z, N, alpha=-0.1), "alpha=-0.1", "[0, 1]"),
    (lambda: F.restricted_logits(Z, N, alpha=math.nan), "alpha=nan", "[0, 1]"),
    (lambda: F.restricted_logits(Z, N, mode="rare"), "mode='rare'", "binary or frequency"),
    (lambda: F.correlation_frobenius(Z, form="other"), "form='other'", "official or paper"),
    (lambda: F.structured_covariance_decorrelation(Z, groups=0), "groups=0", "1 to 4"),
    (lambda: F.structured_covariance_decorrelation(Z, groups=5), "groups=5", "1 to 4"),
    (lambda: F.structured_covariance_decorrelation(Z), "groups=8", "has 4 dimensions"),
    (lambda: F.structured_covariance_decorrelation(Z, 2, gamma=-1.0), "gamma=-1.0", "0 or more"),
    (lambda: F.rbf_uniformity(Z, 0), "bandwidth_factor=0", "above 0"),
    (lambda: F.rbf_uniformity(Z, -2.0), "bandwidth_factor=-2.0", "above 0"),
    (lambda: F.probability_variance_hinge(Z, hinge="cubic"), "hinge='cubic'", "clamped_square"),
    (lambda: F.model_contrastive_loss(Z, Z, temperature=0), "temperature=0", "above 0"),
    (lambda: F.model_contrastive_loss(Z, Z, [Z], temperature=-0.5), "temperature=-0.5", "above 0"),
    (lambda: F.rbf_cka(Z, Z, bandwidth=0), "bandwidth=0", "above 0"),
    (lambda: F.rbf_cka(Z, Z, bandwidth=-1.0), "bandwidth=-1.0", "above 0"),
    (lambda: F.rbf_cka(X, Y), "rows=(1, 6)", "same examples"),
    (lambda: F.linear_cka(X, Y), "rows=(1, 6)", "same examples"),
    (lambda: F.linear_cka(Y, X, debiased=True), "rows=(6, 1)", "same examples"),
    (lambda: F.linear_ckas(Y, Y, X), "rows=(6, 1)", "same examples"),
]


@pytest.mark.parametrize(("call", "given", "hint"), REFUSED, ids=[given for _, given, _ in REFUSED])
def test_the_message_names_key_value_and_hint(call, given, hint):
    with pytest.raises(UsageError) as refusal:
        call()
    message = str(refusal.value)
    assert message.startswith(f"{given}: ")
    assert hint in message and "\n" not in message


def test_the_ends_of_a_range_belong_to_it():
    F.restricted_logits(Z, N, alpha=0), F.restricted_logits(Z, N, alpha=1)
    F.structured_covariance_decorrelation(Z, 1, 0.0), F.structured_covariance_decorrelation(Z, 4)
