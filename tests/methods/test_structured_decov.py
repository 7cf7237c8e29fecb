"""StructuredDeCov penalises covariance between groups: with a group for each dimension it is DeCov."""

import torch
from helpers.errors import refused

from fl_lightning.method import Step
from fl_lightning.methods import DeCov, StructuredDeCov


def test_more_groups_than_dimensions_are_refused(run, tmp_path):
    with refused("StructuredDeCov.groups=17"):
        run([StructuredDeCov(groups=17)])
    assert not list(tmp_path.iterdir())


def test_a_group_for_each_dimension_is_decov_and_fewer_are_not(run):
    z = torch.randn(12, 16)
    step = Step(None, None, {"representation": z})
    whole = DeCov(0.3).penalty(None, step)
    torch.testing.assert_close(StructuredDeCov(0.3, groups=16).penalty(None, step), whole)
    assert StructuredDeCov(0.3, groups=4).penalty(None, step) < whole
