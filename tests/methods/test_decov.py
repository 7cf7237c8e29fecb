"""DeCov, StructuredDeCov and FedDecorr decorrelate the dimensions of the representation."""

import torch
from helpers.errors import refused
from helpers.runs import descend

from fl_lightning.functional import (
    correlation_frobenius,
    covariance_decorrelation,
    covariance_spectrum,
    singular_value_variance,
)
from fl_lightning.method import Step
from fl_lightning.methods import DeCov, StructuredDeCov


def mixed():
    return torch.randn(64, 6) @ torch.randn(6, 6)


def test_descending_decov_decorrelates():
    z = mixed()
    found, before = (x.T.cov(correction=0) for x in (descend(covariance_decorrelation, z, steps=500, lr=0.05), z))
    assert found.fill_diagonal_(0).abs().mean() < 0.1 * before.fill_diagonal_(0).abs().mean()


def test_descending_feddecorr_decorrelates():
    z = mixed()
    found, before = (torch.corrcoef(x.T) for x in (descend(correlation_frobenius, z, steps=500, lr=2.0), z))
    assert found.fill_diagonal_(0).abs().mean() < 0.1 * before.fill_diagonal_(0).abs().mean()


def test_descending_the_variance_of_singular_values_evens_them_out():
    z = mixed()
    found, before = (covariance_spectrum(x) for x in (descend(singular_value_variance, z, steps=1000, lr=1.0), z))
    assert found.std() / found.mean() < 0.1 * before.std() / before.mean()


def test_a_group_for_each_dimension_is_decov_and_fewer_are_not(run):
    z = torch.randn(12, 16)
    step = Step(None, None, {"representation": z})
    whole = DeCov(0.3).penalty(None, step)
    torch.testing.assert_close(StructuredDeCov(0.3, groups=16).penalty(None, step), whole)
    assert StructuredDeCov(0.3, groups=4).penalty(None, step) < whole


def test_more_groups_than_dimensions_are_refused(run, tmp_path):
    with refused("StructuredDeCov.groups=17"):
        run([StructuredDeCov(groups=17)])
    assert not list(tmp_path.iterdir())
