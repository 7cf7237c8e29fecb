import pytest

from fl_lightning.client.clock import Clock


@pytest.mark.parametrize(
    ("how", "passes", "steps"),
    [
        ({"local_epochs": 2, "batches": 3}, [3, 3], 6),
        ({"local_epochs": 2, "batches": 3, "accumulate": 2}, [3, 3], 4),
        ({"local_steps": 4, "batches": 3}, [3, 1], 4),
        ({"local_steps": 2, "batches": 3}, [2], 2),
        ({"local_steps": 3, "batches": 5, "accumulate": 2}, [5], 3),
        ({"local_steps": 4, "batches": 5, "accumulate": 2}, [5, 2], 4),
        ({"local_epochs": 2, "batches": 3, "limit": 4}, [3, 1], 4),
        ({"batches": 0}, [], 0),
    ],
)
def test_a_visit_takes_its_epochs_or_its_steps(how, passes, steps):
    clock = Clock(rounds=5, **how)
    assert clock.passes == passes and clock.steps_of_visit == steps and clock.total_steps == 5 * steps
    stepped = [clock.is_step(index, length) for length in passes for index in range(length)]
    assert sum(stepped) == steps


def test_the_clock_counts_from_the_first_round():
    clock = Clock(rounds=4, local_epochs=3, batches=5, round=2, epoch=1, step=7)
    assert (clock.current_epoch, clock.global_step, clock.max_epochs, clock.max_steps) == (7, 37, 12, -1)
    clock = Clock(rounds=4, local_steps=7, batches=5, round=2, epoch=1, step=6)
    assert (clock.current_epoch, clock.global_step, clock.max_epochs, clock.max_steps) == (5, 20, -1, 28)


def test_an_evaluation_is_at_the_end_of_a_round():
    clock = Clock(rounds=4, local_epochs=3, batches=5, round=2, epoch=0, step=4)
    end = clock.at(2, 2).at_end_of_round()
    assert end.current_epoch == 8 and end.batches == 2 and clock.epoch == 0
