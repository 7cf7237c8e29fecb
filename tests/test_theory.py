"""The theorems hold in the simulations as far as docs/theory.md and docs/collapse.md say."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments" / "theory"))

import label_margins  # noqa: E402, found through the path above
import neural_collapse as collapse  # noqa: E402
import singular_values as theory  # noqa: E402

SKEWED = theory.client(theory.SKEWS["skewed labels"])


def error(start, step, steps=300, **kwargs):
    return theory.error(theory.rates(theory.train(start, SKEWED, steps, step), SKEWED, step, **kwargs))


def test_where_the_assumptions_hold_the_error_of_the_theorem_is_that_of_the_step():
    coarse, fine = error(theory.anywhere(), 0.1), error(theory.anywhere(), 0.05, 600)
    assert coarse < 0.05
    assert fine == pytest.approx(coarse / 2, rel=0.1)


def test_without_noise_the_classes_means_give_the_whole_gradient_and_with_noise_they_do_not():
    start, exact = theory.usual(), theory.client(2.0, noise=0.0)
    np.testing.assert_allclose(theory.signal(start, exact), theory.signal_of_means(start, exact), atol=1e-15)
    assert np.abs(theory.signal(start, SKEWED) - theory.signal_of_means(start, SKEWED)).max() > 1e-4


def test_the_signal_is_the_negative_gradient_of_the_loss():
    start, h = theory.usual(), 1e-6

    def loss(weights):
        own = theory.probabilities(weights, SKEWED)[np.arange(len(SKEWED.y)), SKEWED.y]
        return -(SKEWED.weights * np.log(own)).sum()

    moved = theory.descend(start, SKEWED, 1.0)
    for layer, place in ((0, (1, 2)), (1, (3, 0)), (2, (4, 5))):
        up, down = ([one.copy() for one in start] for _ in range(2))
        up[layer][place] += h
        down[layer][place] -= h
        step = moved[layer][place] - start[layer][place]
        assert step == pytest.approx(-(loss(up) - loss(down)) / (2 * h), rel=1e-5)


def test_the_program_draws_its_figure_and_its_numbers_are_those_of_the_document():
    figure = Figure(figsize=(13, 4))
    numbers = theory.draw(figure)
    assert [axes.get_title() for axes in figure.axes] == ["balanced labels", "skewed labels", "skewed labels: rates"]
    assert_stated(numbers, part=0)


def assert_stated(numbers, part, page="theory"):
    """The numbers are those of the table in a part of the document, by the number of the part."""
    text = (ROOT / "docs" / f"{page}.md").read_text().split("## FedLC's Theorem 2")[part]
    stated = dict(re.findall(r"^\| (.+) \| (-?[\d.]+) \|$", text, re.MULTILINE))
    assert stated.keys() == numbers.keys()
    for name, value in numbers.items():
        assert float(stated[name]) == pytest.approx(value, rel=0.05, abs=1e-12), name


@pytest.mark.parametrize("counts", [(20, 320), (10, 30, 100, 300, 1000)])
def test_the_bound_is_least_with_margins_by_the_fourth_root(counts):
    counts = np.array(counts)
    best = label_margins.best_margins(counts)
    np.testing.assert_allclose(best, counts**-0.25 / (counts**-0.25).sum(), rtol=1e-4)
    for other in (0.2, 0.3):
        margins = counts**-other / (counts**-other).sum()
        assert label_margins.bound(margins, counts) > label_margins.bound(best, counts)


def test_the_numbers_of_the_margins_are_those_of_the_document():
    assert_stated(label_margins.numbers(50), part=1)


def test_the_numbers_of_the_ranks_are_those_of_the_document():
    assert_stated(collapse.draw(Figure(figsize=(13, 4))), part=0, page="collapse")


@pytest.mark.parametrize("classes", [4, 10])
def test_no_representations_and_classifier_have_a_lower_loss_than_the_closed_form(classes):
    torch.manual_seed(0)
    shapes = [(classes, collapse.WIDTH), (collapse.CLASSES, collapse.WIDTH)]
    z, w = (torch.randn(shape, dtype=torch.float64).div(2).requires_grad_() for shape in shapes)
    steps = torch.optim.LBFGS([z, w], max_iter=1000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss(z, w):
        fits = torch.nn.functional.cross_entropy(z @ w.T, torch.arange(classes))
        return fits + collapse.DECAY / 2 * (z.square().sum() + w.square().sum())

    def closure():
        steps.zero_grad()
        value = loss(z, w)
        value.backward()
        return value

    steps.step(closure)
    closed = loss(*map(torch.from_numpy, collapse.trained(classes)))
    assert closure().item() == pytest.approx(closed.item(), rel=1e-6)
