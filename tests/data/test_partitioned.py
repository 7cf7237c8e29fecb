"""A user's own data module, federated unchanged."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fl_lightning import Partitioned
from fl_lightning.data import Dirichlet
from fl_lightning.data.labels import labels_of
from fl_lightning.errors import UsageError

X, Y = torch.randn(90, 3), torch.arange(90) % 3


class Theirs(LightningDataModule):
    def __init__(self, dataset=None):
        super().__init__()
        self.dataset = dataset or TensorDataset(X, Y)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=8, shuffle=True, drop_last=True)

    def test_dataloader(self):
        return DataLoader(TensorDataset(X[:10], Y[:10]), batch_size=4)


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def ready(data):
    data.prepare_data()
    data.setup()
    return data


def test_every_sample_goes_to_one_client_in_the_users_own_batches():
    data = ready(Partitioned(Theirs(), Dirichlet(0.5, 9), num_clients=4))
    loaders = [data.train_dataloader(k) for k in range(4)]
    assert sum(len(loader.dataset) for loader in loaders) == 90
    thirds = ready(Partitioned(Theirs(), num_clients=3))
    assert [[len(y) for _, y in thirds.train_dataloader(k)] for k in range(3)] == [[8] * 3] * 3
    assert data.info(2).label_counts.tolist() == torch.bincount(Y[data.plan.parts[2]], minlength=3).tolist()
    assert len(data.test_dataloader().dataset) == 10
    assert data.val_dataloader() == []


def test_the_order_is_that_of_the_loaders_generator():
    loader = ready(Partitioned(Theirs(), num_clients=2)).train_dataloader(0)

    def order(seed):
        loader.generator.manual_seed(seed)
        return torch.cat([x[:, 0] for x, _ in loader]).tolist()

    assert order(1) == order(1) != order(2)


class Named(Items):
    targets = (2, 0, 1)


class Nothing(Items):
    targets, labels = None, ("cat", "dog")


class Uneven(Items):
    targets = ([1], [2, 3])


class Classes(Items):
    labels = (0, 1)


@pytest.mark.parametrize(
    ("dataset", "labels"),
    [
        (Named([None] * 3), [2, 0, 1]),
        (Subset(TensorDataset(X, Y), [4, 2]), [1, 2]),
        (Items([(X[0], 1), (X[1], 0)]), [1, 0]),
        (Items([(X[0], torch.tensor(1)), (X[1], torch.tensor(2))]), [1, 2]),
        (Items([X[0], X[1]]), None),
        (TensorDataset(X, torch.randn(90)), None),
        (TensorDataset(X), None),
        (Subset(Subset(TensorDataset(X, Y), [5, 4, 2]), [2, 0]), [2, 2]),
        (Nothing([(X[0], 1), (X[1], 0)]), [1, 0]),
        (Classes([(X[0], 1), (X[1], 0), (X[2], 0)]), [1, 0, 0]),
        (Uneven([(X[0], 1), (X[1], 0)]), [1, 0]),
        (Items([torch.arange(3), torch.arange(3)]), None),
        (Items([{"x": 1}]), None),
        (Items([(X[0], [1, 2])]), None),
    ],
)
def test_labels_are_found_where_they_are(dataset, labels):
    read = labels_of(dataset)
    assert (None if read is None else read.tolist()) == labels


def test_without_labels_only_iid_is_possible():
    unlabelled = Theirs(TensorDataset(X))
    data = ready(Partitioned(unlabelled, num_clients=3))
    assert data.info(0).label_counts is None
    assert data.info(0).num_examples == 30
    with pytest.raises(UsageError, match=r"data.partitioner='Dirichlet'"):
        ready(Partitioned(unlabelled, Dirichlet(1.0), num_clients=3))


def test_the_search_for_labels_stops_at_the_first_that_is_none():
    class Counted(Items):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return super().__getitem__(index)

    dataset = Counted([(X[0], 0.5)] * 20)
    assert labels_of(dataset) is None
    assert dataset.read == 1


def test_negative_labels_are_refused():
    with pytest.raises(UsageError, match=r"data.datamodule='Theirs': labels must count from 0, its smallest is -1"):
        ready(Partitioned(Theirs(TensorDataset(X, Y - 1)), num_clients=3))


def test_validation_data_never_stands_in_for_test_data():
    class Validated(LightningDataModule):
        train_dataloader = Theirs.train_dataloader
        dataset = TensorDataset(X, Y)

        def val_dataloader(self):
            return DataLoader(TensorDataset(X[:7], Y[:7]))

    class Both(Validated):
        test_dataloader = Theirs.test_dataloader

    validated = ready(Partitioned(Validated()))
    assert (len(validated.val_dataloader().dataset), validated.test_dataloader()) == (7, [])
    both = ready(Partitioned(Both()))
    assert (len(both.val_dataloader().dataset), len(both.test_dataloader().dataset)) == (7, 10)


def test_a_training_loader_that_is_no_dataloader_is_refused():
    theirs = Theirs()
    theirs.train_dataloader = lambda: [1, 2]
    with pytest.raises(UsageError, match=r"data.datamodule='Theirs'"):
        ready(Partitioned(theirs))
