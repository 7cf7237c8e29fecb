"""FedLC's calibrated logits: margins, missing classes, half precision."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.nn.functional import cross_entropy

from fl_lightning.errors import UsageError
from fl_lightning.functional import calibrated_logits

MISSING = ["floor", "mask", "clamp"]


@pytest.mark.parametrize(("missing", "margin"), [("floor", 100.0), ("mask", np.inf), ("clamp", 1.0)])
def test_margins(missing, margin):
    logits = torch.zeros(1, 4, dtype=torch.float64)
    found = calibrated_logits(logits, torch.tensor([1, 16, 0, 10_000]), 0.5, missing)
    np.testing.assert_allclose(found[0].numpy(), -0.5 * np.array([1, 0.5, margin, 0.1]), rtol=1e-9)


@pytest.mark.parametrize("missing", MISSING)
def test_equal_counts_and_tau_0_leave_cross_entropy_as_it_is(missing):
    logits, labels = torch.randn(8, 4).double(), torch.randint(4, (8,))
    plain = cross_entropy(logits, labels)
    torch.testing.assert_close(
        cross_entropy(calibrated_logits(logits, torch.full((4,), 7), 1.0, missing), labels), plain
    )
    torch.testing.assert_close(calibrated_logits(logits, torch.arange(1, 5), 0.0, missing), logits)


def test_gradient():
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    counts, labels = torch.tensor([5, 0, 1, 30]), torch.tensor([0, 2, 3, 0, 3, 2])
    for missing in MISSING:

        def loss(o, missing=missing):
            return cross_entropy(calibrated_logits(o, counts, 1.0, missing), labels)

        assert gradcheck(loss, logits)


@pytest.mark.parametrize("missing", ["floor", "mask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_missing_classes_get_no_gradient_and_half_precision_logits_are_widened(missing, dtype):
    logits = (3 * torch.randn(8, 4)).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        calibrated = calibrated_logits(logits, torch.tensor([4, 0, 4, 0]), 2.0, missing)
        loss = cross_entropy(calibrated, torch.tensor([0, 2] * 4))
    loss.backward()
    assert calibrated.dtype == torch.float32
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert not logits.grad[:, [1, 3]].any() and logits.grad[:, [0, 2]].any()


def test_the_input_is_not_changed():
    logits = torch.randn(3, 2)
    before = logits.clone()
    calibrated_logits(logits, torch.tensor([3, 0]), missing="mask")
    assert torch.equal(logits, before)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=12).filter(any),
    tau=st.floats(0, 10),
    missing=st.sampled_from(MISSING),
)
def test_rarer_classes_are_lowered_more(counts, tau, missing):
    counts = torch.tensor(sorted(counts))
    found = calibrated_logits(torch.zeros(1, len(counts)), counts, tau, missing)[0]
    assert (found.diff() >= 0).all() or len(counts) == 1 or not torch.isfinite(found).all()
    assert torch.isfinite(found[counts > 0]).all()
    assert (found <= 0).all()


def test_another_treatment_is_refused_by_name():
    with pytest.raises(UsageError, match=r"missing='drop'.*floor, mask or clamp"):
        calibrated_logits(torch.zeros(2, 2), torch.ones(2), missing="drop")
