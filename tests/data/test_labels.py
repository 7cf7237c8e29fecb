"""Labels and domains are found where libraries keep them, without reading items where there is a column."""

from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.tiers import sample
from lightning.pytorch import LightningDataModule
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from fl_lightning import Partitioned
from fl_lightning.client import targets_of
from fl_lightning.data import Natural, Pooled

X = torch.randn(4, 2)
KEYS = ("labels", "label", "target", "targets", "y")


class Items(Dataset):
    def __init__(self, items, **attributes):
        self.items = items
        vars(self).update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Unread(Items):
    """A set whose items cannot be read."""

    def __init__(self, number=3, **attributes):
        super().__init__([None] * number, **attributes)

    def __getitem__(self, index):
        raise OSError("an item was read")


class Columns(Unread):
    """A Hugging Face set: columns by name, and a transform of the items that the columns do not need."""

    def __init__(self, transform=None, **columns):
        self.columns, self.column_names, self.transform = columns, list(columns), transform

    def __len__(self):
        return len(self.columns[self.column_names[0]])

    def with_format(self, kind):
        assert kind is None
        return Columns(**self.columns)

    def __getitem__(self, key):
        assert self.transform is None and isinstance(key, str)
        return self.columns[key]


class Graph:
    """An item of PyTorch Geometric."""

    def __init__(self, y):
        self.y = y


class Module(LightningDataModule):
    def __init__(self, dataset, **options):
        super().__init__()
        self.dataset, self.options = dataset, options

    def train_dataloader(self):
        return DataLoader(self.dataset, **self.options)


def plan_of(dataset, partitioner=None, **options):
    data = Partitioned(Module(dataset, **options), partitioner or Pooled(), num_clients=1)
    data.setup()
    return data.plan


def read(dataset):
    labels = plan_of(dataset).labels
    assert labels is None or (labels.dtype == np.int64 and labels.ndim == 1)
    return None if labels is None else labels.tolist()


COLUMNS = {
    "list": [2, 0, 1],
    "tuple": (2, 0, 1),
    "tensor": torch.tensor([2, 0, 1]),
    "bytes": np.array([2, 0, 1], np.uint8),
    "(N, 1)": torch.tensor([[2], [0], [1]]),
    "booleans": torch.tensor([True, False, True]),
    "list of tensors": [torch.tensor(2), torch.tensor(0), torch.tensor(1)],
}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_is_read_without_the_items(column):
    assert read(Unread(targets=COLUMNS[column])) == ([1, 0, 1] if column == "booleans" else [2, 0, 1])


@pytest.mark.parametrize("name", ["labels", "_labels", "target", "label", "y"])
def test_a_column_may_have_any_usual_name(name):
    assert read(Unread(**{name: [2, 0, 1]})) == [2, 0, 1]


def test_a_column_of_anything_else_is_passed_over():
    items = [(X[0], 1), (X[1], 0)]
    for other in (None, ("cat", "dog"), (0, 1, 2), ([1], [2, 3])):
        assert read(Items(items, targets=other)) == [1, 0]
    assert read(Columns(labels=[[1, 0], [0, 1]], label=[3, 4])) == [3, 4]


@pytest.mark.parametrize("name", ["samples", "_samples"])
def test_pairs_of_file_and_label_are_read_without_the_items(name):
    assert read(Unread(**{name: [("a.png", 2), ("b.png", 0), ("c.png", 1)]})) == [2, 0, 1]


def test_a_target_transform_is_applied_to_a_column():
    assert read(Unread(targets=[4, 2, 0], target_transform=lambda label: label // 2)) == [2, 1, 0]
    one_hot = torch.nn.functional.one_hot
    transformed = Unread(targets=[1, 2, 0], target_transform=lambda label: one_hot(torch.tensor(label), 3))
    assert read(transformed) == [1, 2, 0]


@pytest.mark.parametrize("key", KEYS)
def test_the_column_of_a_hugging_face_set_is_read_as_it_is_stored(key):
    assert read(Columns(transform=lambda batch: batch["text"], text=["a", "b", "c"], **{key: [2, 0, 1]})) == [2, 0, 1]


def test_the_items_of_pytorch_geometric():
    assert read(Items([Graph(torch.tensor([2])), Graph(torch.tensor([1]))])) == [2, 1]
    assert read(Items([Graph(torch.tensor([0.5]))])) is None
    assert read(Items([Graph(torch.tensor([[0, 1]]))])) is None


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", sample([dict, UserDict], dict))
def test_items_that_are_dictionaries_have_their_label_by_a_usual_name(key, kind):
    labels = (2, torch.tensor(0), [1], torch.tensor([1]))
    assert read(Items([kind({"x": row, key: label}) for row, label in zip(X, labels, strict=True)])) == [2, 0, 1, 1]
    assert targets_of({"x": X, key: torch.arange(4)}).tolist() == [0, 1, 2, 3]


def test_items_that_are_tuples_have_their_label_by_name_or_second():
    Example = namedtuple("Example", "x mask label")
    assert read(Items([Example(X[0], 5, 1), Example(X[1], 6, 0)])) == [1, 0]
    assert read(Items([(X[0], torch.tensor(1)), (X[1], torch.tensor(2))])) == [1, 2]


def test_parts_and_sums_of_sets():
    first, second = Unread(targets=[2, 0, 1]), TensorDataset(X, torch.tensor([3, 4, 5, 6]))
    both = ConcatDataset([first, second])
    assert read(both) == [2, 0, 1, 3, 4, 5, 6]
    assert read(Subset(both, torch.tensor([6, 0]))) == [6, 2]
    parts = random_split(both, [3, 4], torch.Generator().manual_seed(0))
    assert sorted(read(parts[0]) + read(parts[1])) == list(range(7))
    assert read(ConcatDataset([second, TensorDataset(X)])) is None


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(X),
        TensorDataset(X, torch.ones(4, 2, dtype=torch.long)),
        TensorDataset(X, torch.rand(4, 1)),
        Items([torch.arange(3), torch.arange(3)]),
        Items([(X[0], [1, 2])]),
        Items([{"x": 1, "label": "cat"}]),
        Items([{"x": 1, "y": 1}, {"x": 1}]),
    ],
)
def test_regression_and_several_labels_are_no_labels(dataset):
    assert read(dataset) is None


def test_reading_items_moves_no_generator_and_gives_the_same_labels_each_time():
    class Drawn(Items):
        def __getitem__(self, index):
            return X[0], int(torch.randint(9, ()))

    before = torch.random.get_rng_state()
    first = read(Drawn([0] * 20))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert read(Drawn([0] * 20)) == first and len(set(first)) > 3


# ---------------------------------------------------------------- columns that differ from the items
class Halved(Dataset):
    """Wraps a set, with other labels, and passes its attributes on."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        x, label = self.inner[index]
        return x, label // 2

    def __getattr__(self, name):
        return getattr(self.inner, name)


class HalvedSubset(Subset):
    def __getitem__(self, index):
        x, label = super().__getitem__(index)
        return x, label // 2

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def stored(number=100, **attributes):
    """A set whose column has the labels of its items: 0 for the first item, 1 for all others."""
    labels = [int(index > 0) for index in range(number)]
    return Items([(X[0], torch.tensor(label)) for label in labels], targets=labels, **attributes)


@pytest.mark.parametrize(
    "dataset",
    [
        Halved(stored()),
        HalvedSubset(stored(), range(100)),
        ConcatDataset([stored(), Halved(stored())]),
        Subset(Halved(stored()), range(100)),
        Items([{"x": X[0], "label": 0}] * 100, samples=[("a.png", 1)] * 100),
    ],
    ids=["wrapper", "subset", "sum", "subset of a wrapper", "dictionary"],
)
def test_a_column_that_differs_from_the_items_is_refused_with_index_and_both_labels(dataset):
    with refused("data: labels=1", "item", "0", "targets"):
        plan_of(dataset)
    dataset.targets = [
        int(dataset[index][1]) if isinstance(dataset[index], tuple) else 0 for index in range(len(dataset))
    ]
    assert read(dataset) == dataset.targets


def test_items_are_compared_as_the_loader_reads_them():
    """``__getitems__`` of a Subset passes a wrapper with ``__getattr__`` by, in PyTorch's loader, too."""
    dataset = Halved(Subset(stored(), range(100)))
    assert read(dataset) == [0] + [1] * 99 == next(iter(DataLoader(dataset, 100)))[1].tolist()


def test_items_are_compared_in_a_worker_where_the_loader_has_some():
    """A file that the first item opens, such as one of h5py, must not be open before the workers start."""

    class Opening(Items):
        opened = False

        def __getitem__(self, index):
            self.opened = True
            return X[0], self.items[index]

    dataset = Opening([1, 2, 0], targets=[1, 2, 0])
    assert plan_of(dataset, num_workers=2).labels.tolist() == [1, 2, 0] and not dataset.opened
    dataset.targets = [1, 1, 0]
    with refused("data: labels=1", "item", "1", "2"):
        plan_of(dataset, num_workers=2)
    assert not dataset.opened


def test_few_items_are_compared_with_a_column_and_no_generator_moves():
    class Counted(Items):
        def __getitem__(self, index):
            seen.append(index)
            return X[0], torch.randint(9, ()) * 0 + self.items[index]

    before, labels = torch.random.get_rng_state(), np.arange(1000) % 3
    seen = []
    assert read(Counted(labels.tolist(), targets=labels)) == labels.tolist()
    assert len(seen) == 20 and (min(seen), max(seen)) == (0, 999) and all(type(index) is int for index in seen)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_classes_have_the_names_of_the_set():
    assert plan_of(Unread(targets=[0, 2, 1], classes=["a", "b", "c"])).class_names == ("a", "b", "c")
    assert plan_of(Unread(targets=[0, 2, 1], classes=["a", "b"])).class_names == ()


# ---------------------------------------------------------------- domains
class Labelled(Unread):
    def __init__(self, number=3, **attributes):
        super().__init__(number, targets=[0] * number, **attributes)


def domains(dataset, partitioner=None):
    plan = plan_of(dataset, partitioner)
    return None if plan.domains is None else [plan.domain_names[domain] for domain in plan.domains]


def test_domains_are_a_column_of_numbers_or_names():
    assert domains(Labelled(domains=["art", "photo", "art"])) == ["art", "photo", "art"]
    assert domains(Labelled(domain=torch.tensor([1, 0, 1]))) == ["1", "0", "1"]
    assert domains(Columns(label=[0, 1], domain=["a", "b"])) == ["a", "b"]
    assert domains(Subset(Labelled(domains=[3, 4, 5]), [2, 0])) == ["5", "3"]
    assert domains(Labelled(domain="art")) == ["art", "art", "art"]
    for none in (Labelled(), Labelled(domains=["art"]), Labelled(domains=[0.5, 1.5, 2.5])):
        assert domains(none) is None


def test_the_parts_of_a_sum_of_sets_have_domains_of_their_own():
    assert domains(ConcatDataset([Labelled(2), Labelled(3)])) is None
    named = ConcatDataset([Labelled(1, domains=["art"]), Labelled(2, domain="photo")])
    assert domains(named, Natural()) == ["art", "photo", "photo"]
    assert domains(Subset(named, [2, 0]), Natural()) == ["photo", "art"]
