"""Functions refuse bad arguments before they compute anything, and have an example in their docstring."""

import doctest
import math
import sys

import pytest
import torch
from helpers.errors import refused

from fl_lightning import functional as F

# one row, from which most functions return early
Z, N = torch.zeros(1, 4), torch.ones(4)
X, Y = torch.zeros(1, 3), torch.zeros(6, 3)

REFUSED = [
    (lambda: F.calibrated_logits(Z, N, missing="drop"), "missing='drop'"),
    (lambda: F.calibrated_logits(Z, N, margin="none"), "margin='none'"),
    (lambda: F.restricted_logits(Z, N, alpha=1.5), "alpha=1.5"),
    (lambda: F.restricted_logits(Z, N, alpha=-0.1), "alpha=-0.1"),
    (lambda: F.restricted_logits(Z, N, alpha=math.nan), "alpha=nan"),
    (lambda: F.restricted_logits(Z, N, mode="rare"), "mode='rare'"),
    (lambda: F.correlation_frobenius(Z, form="other"), "form='other'"),
    (lambda: F.structured_covariance_decorrelation(Z, groups=0), "groups=0"),
    (lambda: F.structured_covariance_decorrelation(Z, groups=5), "groups=5"),
    (lambda: F.structured_covariance_decorrelation(Z), "groups=8"),
    (lambda: F.structured_covariance_decorrelation(Z, 2, gamma=-1.0), "gamma=-1.0"),
    (lambda: F.rbf_uniformity(Z, 0), "bandwidth_factor=0"),
    (lambda: F.probability_variance_hinge(Z, hinge="cubic"), "hinge='cubic'"),
    (lambda: F.model_contrastive_loss(Z, Z, temperature=0), "temperature=0"),
    (lambda: F.rbf_cka(Z, Z, bandwidth=0), "bandwidth=0"),
    (lambda: F.rbf_cka(X, Y), "rows=(1, 6)"),
    (lambda: F.linear_cka(Y, X, debiased=True), "rows=(6, 1)"),
    (lambda: F.linear_ckas(Y, Y, X), "rows=(6, 1)"),
    (lambda: F.minibatch_cka([X], []), "batches=(1, 0)"),
    (lambda: F.minibatch_cka([X], [Y]), "rows=(1, 6)"),
    (lambda: F.numerical_rank(N, -1), "tolerance=-1"),
]


@pytest.mark.parametrize(("call", "given"), REFUSED, ids=[given for _, given in REFUSED])
def test_the_error_names_key_and_value(call, given):
    with refused(given):
        call()


def test_the_ends_of_a_range_belong_to_it():
    F.restricted_logits(Z, N, alpha=0), F.restricted_logits(Z, N, alpha=1)
    F.structured_covariance_decorrelation(Z, 1, 0.0), F.structured_covariance_decorrelation(Z, 4)


def test_every_function_has_an_example_its_arguments_and_a_source():
    for name in F.__all__:
        function = getattr(F, name)
        module = sys.modules[function.__module__]
        (test,) = doctest.DocTestFinder(recurse=False).find(function, name, module)
        assert test.examples, name  # which --doctest-modules runs
        assert "Args:" in function.__doc__ and "Returns:" in function.__doc__, name
        assert "https://" in module.__doc__, name
