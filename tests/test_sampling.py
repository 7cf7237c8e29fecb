"""A cohort is a pure function of seed and round."""

import numpy as np
import pytest

from fl_lightning.sampling import Sampler, UniformSampler, size_of_cohort


def test_equal_seeds_and_rounds_give_equal_cohorts_and_others_do_not():
    draw = UniformSampler()
    assert draw(0, 3, 50, 10) == draw(0, 3, 50, 10)
    cohorts = {tuple(draw(seed, round_, 50, 10)) for seed in range(3) for round_ in range(3)}
    assert len(cohorts) == 9


def test_cohorts_are_ascending_without_repeats_and_every_client_is_as_likely():
    draw = UniformSampler()
    counts = np.zeros(20)
    for round_ in range(2000):
        cohort = draw(1, round_, 20, 5)
        assert cohort == sorted(set(cohort))
        assert len(cohort) == 5
        counts[cohort] += 1
    # 500 each, with a deviation of 19
    assert abs(counts - 500).max() < 80


def test_a_subclass_states_the_draw_alone():
    class Newest(Sampler):
        def choose(self, rng, round_, num_clients, cohort_size):
            return np.arange(num_clients)[::-1][:cohort_size]

    assert Newest()(0, 0, 6, 2) == [4, 5]


@pytest.mark.parametrize(
    ("clients", "share", "given", "size"),
    [(100, 0.29, None, 29), (10, 1.0, None, 10), (10, 0.05, None, 1), (7, 0.5, None, 3), (7, 0.5, 6, 6)],
)
def test_the_size_is_the_whole_part_of_the_share_and_at_least_1(clients, share, given, size):
    assert size_of_cohort(clients, share, given) == size
