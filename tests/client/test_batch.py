"""The size of a batch is Lightning's, and labels are found in batches of all usual kinds."""

from collections import UserDict

import pytest
import torch
from helpers.errors import warned
from lightning.pytorch.utilities.data import extract_batch_size, warning_cache

from fl_lightning.client import targets_of
from fl_lightning.client.lightning.metric_log import count_examples, size_of_batch

X, Y = torch.zeros(5, 2), torch.arange(5)


class Graphs:
    """What Lightning and we see of a batch of PyG: it iterates over names and tensors."""

    def __init__(self, **parts):
        self.__dict__.update(parts)

    def __iter__(self):
        return iter(vars(self).items())


BATCHES = [X, (X, Y), [X, Y], {"x": X, "y": Y}, [{"x": [X]}, Y], (["text"], X), (torch.tensor(1.0),), (X, Y[:3])]


@pytest.mark.filterwarnings("ignore:Trying to infer")
@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
def test_the_size_of_a_batch_is_lightnings(batch):
    assert size_of_batch(batch) == count_examples(batch) == extract_batch_size(batch)


@pytest.mark.parametrize("batch", [object(), "text", [], {}, ["a", 1], None])
def test_a_batch_without_tensors_has_no_size_and_counts_as_one_example(batch):
    assert size_of_batch(batch) is None
    assert count_examples(batch) == 1


def test_graphs_are_examples_where_a_batch_counts_them():
    batch = Graphs(x=torch.zeros(40, 2), y=torch.zeros(3), num_graphs=3)
    assert count_examples(batch) == 3
    warning_cache.clear()
    with warned("batch_size") as caught:
        sizes = [size_of_batch(batch) for _ in range(2)]
    assert sizes == [40, 40]
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        *(((X, Y), Y), ([X, Y], Y), (({"x": X}, Y), Y), ((X, {"a": Y}), None), ((X,), None), (X, None)),
        *(({"x": X, key: Y}, Y) for key in ("labels", "label", "target", "targets", "y")),
        *((UserDict(input_ids=X, labels=Y), Y), (Graphs(x=X, y=Y), Y), (Graphs(x=X), None)),
        ((X, Y.view(5, 1)), Y),
        ((X, Y > 2), torch.tensor([0, 0, 0, 1, 1])),
        ((X, (Y > 2).view(5, 1)), torch.tensor([0, 0, 0, 1, 1])),
        ((X, torch.ones(5, 1)), torch.ones(5, 1)),
        ((X, torch.ones(5, 3, dtype=torch.bool)), torch.ones(5, 3, dtype=torch.bool)),
    ],
)
def test_labels_are_found_and_are_integers_in_a_row(batch, expected):
    found = targets_of(batch)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
