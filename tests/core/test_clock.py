"""Durations of visits."""

import math

import pytest
from helpers.errors import refused

from fl_lightning.core.clock import Clock

SECOND = 1_000_000


# ------------------------------------------------------------------ durations
def test_a_duration_has_its_parts():
    plain = Clock(step_seconds=0.5, latency=2.0, bandwidth=100.0)
    assert plain.duration(0, 3, 0, steps=4, num_bytes=50) == round(SECOND * (4 * 0.5 + 2.0 + 0.5))
    assert Clock(step_seconds=0.0).duration(0, 0, 0, steps=4, num_bytes=50) == 1


def test_speeds_belong_to_clients_and_jitter_to_visits():
    spread, jitter = Clock(spread=0.7), Clock(jitter=0.7)
    assert spread.duration(0, 1, 0, 5, 0) == spread.duration(0, 1, 9, 5, 0) != spread.duration(0, 2, 0, 5, 0)
    assert jitter.duration(0, 1, 0, 5, 0) == jitter.duration(0, 1, 0, 5, 0) != jitter.duration(0, 1, 1, 5, 0)
    assert spread.duration(1, 1, 0, 5, 0) != spread.duration(0, 1, 0, 5, 0)
    logs = [math.log(spread.duration(0, k, 0, 1, 0) / SECOND) / 0.7 for k in range(400)]
    assert abs(sum(logs) / 400) < 0.15 and abs(sum(x * x for x in logs) / 400 - 1) < 0.2


def test_a_stated_speed_replaces_the_drawn_one():
    clock = Clock(spread=0.7, speed={1: 4.0})
    assert clock.duration(0, 1, 0, steps=3, num_bytes=0) == 12 * SECOND
    assert clock.duration(0, 2, 0, 3, 0) == Clock(spread=0.7).duration(0, 2, 0, 3, 0)


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ({"step_seconds": -1.0}, "trainer.clock.step_seconds=-1.0"),
        ({"spread": math.nan}, "trainer.clock.spread=nan"),
        ({"jitter": math.inf}, "trainer.clock.jitter=inf"),
        ({"bandwidth": 0.0}, "trainer.clock.bandwidth=0.0"),
        ({"deadline": 0.0}, "trainer.clock.deadline=0.0"),
        ({"speed": {2: 0.0}}, "trainer.clock.speed.2=0.0"),
    ],
)
def test_bad_clocks_are_refused(how, key):
    with refused(key):
        Clock(**how)
