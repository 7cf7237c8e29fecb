"""Durations of visits and the schedule of an asynchronous server."""

import math
from itertools import islice

import pytest
from helpers.errors import refused

from fl_lightning.core.clock import Buffered, Clock
from fl_lightning.core.sampling import Sampler, UniformSampler
from fl_lightning.core.systems import SystemOutcome

SECOND = 1_000_000


class Lowest(Sampler):
    """Draws the first of the idle clients."""

    def choose(self, rng, round_, num_clients, cohort_size):
        return range(cohort_size)


def schedule(buffered, clients, seconds, steps, sampler=None, lost=(), present=None):
    """The first steps of a schedule with durations in seconds by client, or by a function of client and visit."""
    of_visit = seconds if callable(seconds) else lambda client, visit: seconds[client]

    def plan_visit(client, visit, start):
        return round(SECOND * of_visit(client, visit)), SystemOutcome(lost="after" if client in lost else None)

    present = present or (lambda version: range(clients))
    return list(islice(buffered.schedule(0, sampler or UniformSampler(), plan_visit, present), steps))


def staleness(steps):
    return [number - visit.version for number, step in enumerate(steps) for visit in step.visits]


def by_client(steps):
    """Time in seconds, and client, version and staleness of each visit in the order of clients."""
    rows = []
    for number, step in enumerate(steps):
        visits = sorted((visit.client, visit.version, number - visit.version) for visit in step.visits)
        rows.append((step.time / SECOND, visits))
    return rows


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


# ------------------------------------------------------------------ schedules
def test_the_worked_schedules():
    """The examples of FedBuff and FedAsync of the specification: four clients of 1, 2, 3.5 and 5 seconds."""
    seconds = [1.0, 2.0, 3.5, 5.0]
    assert by_client(schedule(Buffered(3, 2), 4, seconds, 5, Lowest())) == [
        (2.0, [(0, 0, 0), (1, 0, 0)]),
        (3.5, [(0, 1, 0), (2, 0, 1)]),
        (5.0, [(0, 2, 0), (1, 1, 1)]),
        (6.0, [(0, 3, 0), (3, 0, 3)]),
        (8.0, [(0, 4, 0), (2, 2, 2)]),
    ]
    assert by_client(schedule(Buffered(3, 1), 4, seconds, 5, Lowest())) == [
        (1.0, [(0, 0, 0)]),
        (2.0, [(1, 0, 1)]),
        (2.0, [(0, 1, 1)]),
        (3.0, [(0, 3, 0)]),
        (3.5, [(2, 0, 4)]),
    ]


def test_with_all_clients_and_equal_durations_it_is_synchronous():
    steps = schedule(Buffered(6, 6), 6, [3.0] * 6, 5)
    assert [step.time for step in steps] == [3 * SECOND * r for r in range(1, 6)]
    for r, step in enumerate(steps):
        assert sorted(visit.client for visit in step.visits) == list(range(6))
        assert {visit.version for visit in step.visits} == {r} and not step.in_flight


def test_one_client_at_a_time_is_never_stale():
    steps = schedule(Buffered(1, 1), 4, [1.0, 2.0, 3.5, 5.0], 20)
    assert staleness(steps) == [0] * 20


def test_staleness_adds_up():
    """With K = 1 and no ties, each step makes the C - 1 other visits in flight older by one."""
    clock, concurrency, steps = Clock(spread=0.5, jitter=0.5), 4, 60
    plan = schedule(Buffered(concurrency, 1), 9, lambda k, v: clock.duration(0, k, v, 5, 0) / SECOND, steps)
    more = schedule(Buffered(concurrency, 1), 9, lambda k, v: clock.duration(0, k, v, 5, 0) / SECOND, 4 * steps)
    assert more[:steps] == plan
    end = plan[-1].time
    waiting = [visit for step in more[steps:] for visit in step.visits if visit.started < end]
    assert len(waiting) == concurrency - 1
    assert sorted(plan[-1].in_flight) == sorted(visit.version for visit in waiting)
    assert sum(staleness(plan)) + sum(steps - visit.version for visit in waiting) == (concurrency - 1) * steps


def test_equal_factors_scale_all_times():
    clock = Clock(spread=0.5, jitter=0.5)
    by_factor = {
        factor: schedule(Buffered(4, 2), 6, lambda k, v, f=factor: f * clock.duration(0, k, v, 5, 0) / SECOND, 30)
        for factor in (1, 3)
    }
    for single, triple in zip(by_factor[1], by_factor[3], strict=True):
        assert 3 * single.time == triple.time
        assert by_client([single])[0][1] == by_client([triple])[0][1]


def test_lost_and_stale_visits_do_not_count():
    steps = schedule(Buffered(3, 1), 3, [1, 1, 10], 12, lost=[1])
    assert {visit.client for step in steps for visit in step.visits} == {0, 2}
    assert max(staleness(steps)) >= 8 and sum(step.num_lost for step in steps) >= 10
    fresh = schedule(Buffered(3, 1, max_staleness=3), 3, [1, 1, 10], 12, lost=[1])
    assert {visit.client for step in fresh for visit in step.visits} == {0}


def test_only_available_clients_start():
    steps = schedule(Buffered(2, 1), 4, [1.0] * 4, 8, present=lambda version: [0, 1] if version < 3 else [2, 3])
    assert all(visit.client in ([0, 1] if visit.version < 3 else [2, 3]) for step in steps for visit in step.visits)


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ({"present": lambda version: [0] if version < 3 else []}, "trainer.asynchronous.size=2"),
        ({"present": lambda version: [2]}, "trainer.asynchronous.size=2"),
        ({"lost": range(4)}, "trainer.asynchronous"),
    ],
)
def test_a_schedule_without_end_is_refused(how, key):
    with refused(key):
        schedule(Buffered(2, 2), 4, [1.0] * 4, 8, **how)


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ({"concurrency": 0}, "trainer.asynchronous.concurrency=0"),
        ({"concurrency": 2, "size": 0}, "trainer.asynchronous.size=0"),
        ({"concurrency": 2, "max_staleness": -1}, "trainer.asynchronous.max_staleness=-1"),
    ],
)
def test_bad_schedules_are_refused(how, key):
    with refused(key):
        Buffered(**how)
