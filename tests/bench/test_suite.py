"""What a suite makes of its configs."""

import pytest

from fl_lightning.bench.suite import scaled


def over(rounds, most):
    """A config whose clients' rates fall by a cosine over some rounds."""
    return {"trainer": {"max_rounds": most, "client_lr_scheduler": {"init_args": {"T_max": rounds}}}}


@pytest.mark.parametrize(("scale", "rounds"), [(1.0, 100), (0.125, 50), (1e-9, 1)])
def test_a_cosine_over_all_rounds_ends_with_the_fewer_ones(scale, rounds):
    trainer = scaled(over(100, 100), scale)["trainer"]
    assert trainer["max_rounds"] == trainer["client_lr_scheduler"]["init_args"]["T_max"] == rounds


def test_another_schedule_stays_as_it_is():
    assert scaled(over(60, 6), 0.125)["trainer"] == {"max_rounds": 3, "local_epochs": 1}
    assert scaled({}, 0.125)["trainer"] == {"max_rounds": 5, "local_epochs": 1}
