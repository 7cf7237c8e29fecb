"""What callbacks have measured is drawn as what it is."""

import numpy as np
import pytest
from helpers.reports import write_run

from fl_lightning.pictures.declared import descending, diagonal, off_diagonal, over
from fl_lightning.report.gallery import cards_of
from fl_lightning.report.run import find_runs, read_run
from fl_lightning.report.sections import Metric, sections_of


@pytest.fixture
def cards(tmp_path):
    """``cards(file, *arrays)``: the figures of one method, whose seeds have left a file each."""

    def make(file, *files):
        for seed, arrays in enumerate(files):
            folder = write_run(tmp_path / str(seed) / "version_0", seed=seed, rounds=2, measured=False)
            np.savez(folder / file, **arrays)
        runs = [read_run(folder) for folder in find_runs(tmp_path)]
        (section,) = sections_of(runs, Metric("test/accuracy"), None)
        stem = file.removesuffix(".npz").replace("_", "-")
        return {card.name: card for *_, card in cards_of(section) if card.name.startswith(stem)}

    return make


def test_reductions_are_means_of_what_is_there():
    values = np.array([[[1, 5, np.nan], [3, 1, 4], [np.nan, 8, 1]]])
    assert off_diagonal(values).tolist() == [(5 + 3 + 4 + 8) / 4]
    assert diagonal(values).tolist() == [1]
    assert over(1)(np.array([[1, np.nan], [2, 4]])).tolist() == [1, 3]
    assert descending(np.array([1, np.nan, 3])).tolist()[:2] == [3, 1]


def test_clients_of_two_seeds_are_sorted_before_their_mean(cards):
    """Client 0 of one seed has nothing to do with that of another: the law is that their order does not matter."""
    first, second = np.array([[0.5, 0.25, 1.0]]), np.array([[0.0, 0.5, 0.25]])
    made = cards("personal.npz", {"rounds": [1], "own": first}, {"rounds": [1], "own": second})
    (card,) = made.values()
    assert [row[-1] for row in card.rows] == [75.0, 37.5, 12.5]


def test_the_last_round_that_all_seeds_have_is_drawn(cards):
    made = cards(
        "spectra.npz", {"rounds": [0, 1], "classifier": [[2, 1], [8, 4]]}, {"rounds": [0], "classifier": [[4, 3]]}
    )
    assert [row[2:] for row in made["spectra-spectrum"].rows] == [[0, "0", 3.0], [0, "1", 2.0]]


def test_layers_have_their_names(cards):
    arrays = {"rounds": [0, 1], "layers": [["conv", "head"]] * 2, "between_rounds": [[np.nan, np.nan], [0.9, 0.5]]}
    (card,) = cards("layer_similarity.npz", arrays).values()
    assert [row[3:] for row in card.rows] == [["conv", 0.9], ["head", 0.5]]


def test_classes_are_bars_of_the_mean_over_clients(cards):
    after = np.array([[[0.5, 1.0, np.nan], [1.0, 0.0, np.nan]]])
    (card,) = cards("per_class.npz", {"rounds": [1], "after": after}).values()
    assert card.drawings[0].legend == [(0, "FedAvg")]
    assert [row[-1] for row in card.rows][:2] == [75.0, 50.0]


def test_a_file_that_is_not_known_is_drawn_by_its_shapes(cards):
    arrays = {"a": np.ones(2), "b": np.ones((2, 3)), "c": np.ones((2, 3, 3)), "d": np.ones((2, 3, 3, 3))}
    made = cards("mine.npz", {"rounds": [0, 1], **arrays})
    assert sorted(made) == ["mine-by-index", "mine-c", "mine-course"]


def test_arrays_of_different_shapes_are_left_out(cards):
    made = cards("mine.npz", {"rounds": [0], "b": np.ones((1, 3))}, {"rounds": [0], "b": np.ones((1, 4))})
    assert made == {}
