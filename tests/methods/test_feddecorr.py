"""FedDecorr decorrelates the dimensions of the representation."""

import torch
from helpers.runs import descend

from fl_lightning.functional import correlation_frobenius, covariance_spectrum, singular_value_variance


def test_descending_feddecorr_decorrelates():
    mixed = torch.randn(64, 6) @ torch.randn(6, 6)

    def off(z):
        return torch.corrcoef(z.T).fill_diagonal_(0).abs().mean()

    assert off(descend(correlation_frobenius, mixed, steps=500, lr=2.0)) < 0.1 * off(mixed)


def test_descending_the_variance_of_singular_values_evens_them_out():
    mixed = torch.randn(64, 6) @ torch.randn(6, 6)

    def spread(z):
        values = covariance_spectrum(z)
        return values.std() / values.mean()

    assert spread(descend(singular_value_variance, mixed, steps=1000, lr=1.0)) < 0.1 * spread(mixed)
