"""DeCov, StructuredDeCov and FedDecorr decorrelate representations; FedUV spreads these and predictions."""

import pytest
import torch
from helpers.runs import assert_same_bits, descend, plain_sgd_model

from fl_lightning import Method
from fl_lightning.core.method import Step
from fl_lightning.functional import (
    correlation_frobenius,
    covariance_decorrelation,
    covariance_spectrum,
    rbf_uniformity,
    singular_value_variance,
)
from fl_lightning.functional import probability_variance_hinge as hinge
from fl_lightning.methods import DeCov, FedUV, StructuredDeCov


def mixed():
    return torch.randn(64, 6) @ torch.randn(6, 6)


@pytest.mark.parametrize(
    ("term", "lr", "of"), [(covariance_decorrelation, 0.05, torch.cov), (correlation_frobenius, 2.0, torch.corrcoef)]
)
def test_descending_decov_and_feddecorr_decorrelates(term, lr, of):
    z = mixed()
    found, before = (of(x.T) for x in (descend(term, z, steps=500, lr=lr), z))
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


def test_descending_feduv_spreads_representations_and_predictions():
    z = torch.randn(32, 2)

    def uniformity(x):
        return rbf_uniformity(x, detach_bandwidth=True)

    assert torch.pdist(descend(uniformity, z)).min() > torch.pdist(z).min()
    logits = 0.1 * torch.randn(32, 5)
    assert descend(hinge, logits, lr=20).softmax(1).std(0).mean() > 2 * logits.softmax(1).std(0).mean()


def test_feduv_lambda_none_is_a_quarter_of_the_classes(run):
    assert_same_bits(run([FedUV()], max_rounds=1)[0], run([FedUV(lambda_=2.5)], max_rounds=1)[0])


def test_feduv_with_one_coefficient_is_the_other_term_alone(run):
    """In the first round's first batch both terms see the same numbers as alone."""
    seen = []

    class Spy(Method):
        requires = ("representation", "logits")

        def penalty(self, client, step):
            z, logits = step.taps["representation"].detach(), step.taps["logits"].detach()
            methods = (FedUV(0.5, 0), FedUV(0, 2.0), FedUV(0.5, 2.0))
            seen.append([method.penalty(client, step)[0].item() for method in methods])
            assert seen[-1][0] == pytest.approx(0.5 * float(rbf_uniformity(z)))
            assert seen[-1][1] == pytest.approx(2.0 * float(hinge(logits)))
            assert FedUV(0, 0).penalty(client, step) is None

    run([Spy()], max_rounds=1)
    assert all(u + v == pytest.approx(both) for u, v, both in seen)


def test_the_spectral_term_raises_the_largest_singular_value_of_the_classifier(run):
    def largest(spectral):
        state, trainer = run([FedUV(0, 0, spectral=spectral)], model=plain_sgd_model())
        return torch.linalg.svdvals(state["classifier.weight"])[0].item(), trainer.history

    (plain, _), (raised, rows) = largest(0.0), largest(0.5)
    assert raised > plain + 0.1
    # the first round begins where the norm is that of the initial weight, and raises it from there
    initial = torch.linalg.svdvals(plain_sgd_model().classifier.weight)[0].item()
    assert -0.5 * raised < rows[0]["train/feduv"] < -0.5 * initial * 0.99
