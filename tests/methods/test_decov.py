"""DeCov drives the covariance of different dimensions to zero."""

import torch
from helpers.runs import descend

from fl_lightning.functional import covariance_decorrelation


def test_descending_decov_decorrelates_and_keeps_the_variances():
    mixed = torch.randn(64, 6) @ torch.randn(6, 6)
    found = descend(covariance_decorrelation, mixed, steps=500, lr=0.05).T.cov(correction=0)
    before = mixed.T.cov(correction=0)
    assert found.clone().fill_diagonal_(0).abs().mean() < 0.1 * before.clone().fill_diagonal_(0).abs().mean()
