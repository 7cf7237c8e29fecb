"""FedUV spreads representations and predictions by two terms, each with its own coefficient."""

import pytest
import torch
from helpers.runs import assert_same_bits, descend

from fl_lightning import Method
from fl_lightning.functional import probability_variance_hinge as hinge
from fl_lightning.functional import rbf_uniformity
from fl_lightning.methods import FedUV


def test_descending_feduv_spreads_representations_and_predictions():
    z = torch.randn(32, 2)

    def uniformity(x):
        return rbf_uniformity(x, detach_bandwidth=True)

    assert torch.pdist(descend(uniformity, z)).min() > torch.pdist(z).min()
    logits = 0.1 * torch.randn(32, 5)
    assert descend(hinge, logits, lr=20).softmax(1).std(0).mean() > 2 * logits.softmax(1).std(0).mean()


def test_feduv_lambda_none_is_a_quarter_of_the_classes(run):
    assert_same_bits(run([FedUV()])[0], run([FedUV(lambda_=2.5)])[0])


def test_feduv_with_one_coefficient_is_the_other_term_alone(run):
    """In the first round's first batch both terms see the same numbers as alone."""
    seen = []

    class Spy(Method):
        requires = ("representation", "logits")

        def penalty(self, client, step):
            z, logits = step.taps["representation"].detach(), step.taps["logits"].detach()
            seen.append([term.penalty(client, step).item() for term in (FedUV(0.5, 0), FedUV(0, 2.0), FedUV(0.5, 2.0))])
            assert seen[-1][0] == pytest.approx(0.5 * float(rbf_uniformity(z)))
            assert seen[-1][1] == pytest.approx(2.0 * float(hinge(logits)))
            assert FedUV(0, 0).penalty(client, step) is None

    run([Spy()], max_rounds=1)
    assert all(u + v == pytest.approx(both) for u, v, both in seen)
