"""The logits of FedLC and FedRS: margins, the log prior, and gradients of missing classes."""

import pytest
import torch
from cases import draw
from torch.nn.functional import cross_entropy

from fl_lightning.functional import calibrated_logits, restricted_logits

COUNTS = torch.tensor([3, 0, 12, 1])
LABELS = torch.tensor([0, 2, 0, 3, 2, 0])


def test_tau_0_leaves_the_logits_of_present_classes():
    logits = draw(3, 4)
    assert torch.equal(calibrated_logits(logits, COUNTS, 0.0), logits)
    masked = calibrated_logits(logits, COUNTS, 0.0, "mask")
    assert torch.equal(masked[:, COUNTS > 0], logits[:, COUNTS > 0]) and (masked[:, 1] == -torch.inf).all()
    assert torch.equal(logits, draw(3, 4))


def posterior_and_likelihood(prior, inputs=6):
    """Of some inputs x: P(x), P(y given x) and P(x given y), ``(inputs, classes)``, for a prior of the classes."""
    likelihood = draw(inputs, len(prior)).softmax(0)
    joint = likelihood * prior
    return joint.sum(1), joint / joint.sum(1, keepdim=True), likelihood


@pytest.mark.parametrize(("margin", "least"), [("log_prior", True), ("fourth_root", False)])
def test_the_log_prior_makes_the_bayes_classifier_of_equal_priors_the_optimum(margin, least):
    """Trained on any label distribution, softmax(o) becomes what it would be under equal priors."""
    counts = torch.tensor([900, 90, 9, 1])
    share, posterior, likelihood = posterior_and_likelihood(counts / counts.sum().double())
    balanced = (likelihood / likelihood.sum(1, keepdim=True)).log().requires_grad_()
    losses = cross_entropy(calibrated_logits(balanced, counts, margin=margin), posterior, reduction="none")
    (gradient,) = torch.autograd.grad((share * losses).sum(), balanced)
    assert (gradient.abs().max() < 1e-12) == least


@pytest.mark.parametrize("missing", ["floor", "mask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fedlc_gives_missing_classes_no_gradient_also_in_half_precision(missing, dtype):
    logits = (3 * torch.randn(6, 4)).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        calibrated = calibrated_logits(logits, COUNTS, 2.0, missing)
        loss = cross_entropy(calibrated, LABELS)
    loss.backward()
    assert calibrated.dtype == torch.float32
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert not logits.grad[:, 1].any() and logits.grad[:, COUNTS > 0].any()


def test_without_examples_fedrs_scales_all_logits_by_alpha_and_fedlcs_log_prior_is_finite():
    assert torch.isfinite(calibrated_logits(torch.zeros(1, 2), torch.zeros(2), margin="log_prior")).all()
    assert torch.equal(restricted_logits(draw(6, 4), torch.zeros(4), 0.0, "frequency"), torch.zeros(6, 4).double())
