"""Every loss and transform has the values and slopes that NumPy computes from the formulas."""

import make_reference_values as reference
import pytest
import torch
from cases import CASES, converted, inputs_of

from fl_lightning import functional as F

LOSSES = reference.load("losses")
# functions without gradient or scalar value have tests of their own
ELSEWHERE = {
    *("as_rows", "class_sums", "condition_number", "cosines", "covariance_spectrum", "effective_rank", "eigenvalues"),
    *(
        "low_rank_factors",
        "neural_collapse",
        "numerical_rank",
        "similarities",
        "singular_alignment",
        "singular_values",
        "stable_rank",
    ),
    "unbiased_gram",
    *("chosen_by_score", "krum_scores", "trimmed_mean"),
}


def test_every_function_has_reference_values():
    assert CASES.keys() == LOSSES.keys()
    assert {name.split()[0] for name in CASES} | ELSEWHERE == set(F.__all__)


def evaluate(name, rows, given, autocast=False):
    """The value and the gradient; only the forward pass runs under autocast, as in training."""
    rows = rows.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = CASES[name](rows, given)
    return value.detach(), torch.autograd.grad(value, rows)[0]


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name):
    for shape, (value, *slopes) in LOSSES[name].items():
        rows, given = inputs_of(shape)
        found, gradient = evaluate(name, rows, given)
        assert found.dtype == torch.float64
        assert found.item() == pytest.approx(value, rel=1e-8, abs=1e-9), shape
        along = (gradient * given["directions"]).sum((1, 2))
        assert along.tolist() == pytest.approx(slopes, rel=1e-5, abs=2e-8), shape
        if "dead" in shape and "correlation" in name:
            assert not gradient[:, 1].any()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", ["8x3", "4x9"])
def test_bf16_autocast_converts_to_float32_and_computes_in_it(name, shape):
    rows, given = inputs_of(shape)
    wide, inputs = rows.float(), converted(given, torch.float32)
    value, gradient = evaluate(name, wide, inputs)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(LOSSES[name][shape][0], rel=1e-4, abs=1e-5)
    # the rows are exact in bfloat16, so that all bits of the results agree
    for narrow in (wide, wide.bfloat16()):
        others = inputs | {key: inputs[key].to(narrow.dtype) for key in ("other", "third")}
        narrow_value, narrowed = evaluate(name, narrow, others, autocast=True)
        assert narrow_value.dtype == torch.float32 and torch.equal(narrow_value, value)
        assert torch.equal(narrowed, gradient.to(narrow.dtype))


def test_the_file_holds_what_the_program_computes():
    for part, values in reference.compute().items():
        found = reference.load(part)
        assert found.keys() == values.keys()
        for name, wanted in values.items():
            shapes = wanted if part == "losses" else [...]
            for shape in shapes:
                one, other = (each if shape is ... else each[shape] for each in (wanted, found[name]))
                assert one == pytest.approx(other, rel=1e-6, abs=1e-8), (part, name, shape)
