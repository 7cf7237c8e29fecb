"""What callbacks have measured is drawn as what it is; here by the data of each figure."""

import numpy as np
import pytest
from helpers.reports import figures_of, write_run

pytest_plugins = ["helpers.report_fixtures"]


@pytest.fixture
def drawn(tmp_path, report):
    """``drawn(file, *arrays)``: the rows of the figures of one method, whose seeds have left a file each."""

    def make(file, *files):
        for seed, arrays in enumerate(files):
            folder = write_run(tmp_path / str(seed) / "version_0", seed=seed, rounds=2, measured=False)
            np.savez(folder / file, **arrays)
        stem = file.removesuffix(".npz").replace("_", "-")
        return {name: rows[1:] for name, (_, rows) in figures_of(report()).items() if name.startswith(stem)}

    return make


def last(rows, number=1):
    """The last columns of rows, of which the very last is a number."""
    return [[*row[-number:-1], float(row[-1])] for row in rows]


def test_clients_of_two_seeds_are_sorted_before_their_mean(drawn):
    """Client 0 of one seed has nothing to do with that of another: their order does not matter."""
    first, second = np.array([[0.5, 0.25, 1.0]]), np.array([[0.0, 0.5, 0.25]])
    (rows,) = drawn("personal.npz", {"rounds": [1], "own": first}, {"rounds": [1], "own": second}).values()
    assert last(rows) == [[75.0], [37.5], [12.5]]


def test_the_last_round_that_all_seeds_have_is_drawn(drawn):
    files = {"rounds": [0, 1], "classifier": [[2, 1], [8, 4]]}, {"rounds": [0], "classifier": [[4, 3]]}
    assert last(drawn("spectra.npz", *files)["spectra-classifier"], 2) == [["0", 3.0], ["1", 2.0]]


def test_layers_have_their_names_and_missing_values_do_not_count(drawn):
    arrays = {"rounds": [0, 1], "layers": [["conv", "head"]] * 2, "between_rounds": [[np.nan, np.nan], [0.9, 0.5]]}
    (rows,) = drawn("layer_similarity.npz", arrays).values()
    assert last(rows, 2) == [["conv", 0.9], ["head", 0.5]]


def test_similarity_between_clients_is_the_mean_of_different_clients(drawn):
    between = np.array([[[[1, 0.5, np.nan], [0.25, 1, 0.75], [np.nan, 0.5, 1]]]])
    arrays = {"rounds": [0], "layers": [["conv"]], "between_clients": between}
    (rows,) = drawn("layer_similarity.npz", arrays).values()
    assert last(rows) == [[0.5]]


def test_classes_are_bars_of_the_mean_over_clients(drawn):
    after = np.array([[[0.5, 1.0, np.nan], [1.0, 0.0, np.nan]]])
    (rows,) = drawn("per_class.npz", {"rounds": [1], "after": after}).values()
    assert last(rows)[:2] == [[75.0], [50.0]]


def test_an_unknown_file_is_drawn_by_its_shapes(drawn):
    arrays = {"a": np.ones(2), "b": np.ones((2, 3)), "c": np.ones((2, 3, 3)), "d": np.ones((2, 3, 3, 3))}
    assert sorted(drawn("mine.npz", {"rounds": [0, 1], **arrays})) == ["mine-c", "mine-course", "mine-curves"]


def test_arrays_of_different_shapes_are_left_out(drawn):
    assert drawn("mine.npz", {"rounds": [0], "b": np.ones((1, 3))}, {"rounds": [0], "b": np.ones((1, 4))}) == {}
