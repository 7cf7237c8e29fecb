"""A user's own data module, federated unchanged."""

import pytest
import torch
from helpers.errors import refused
from helpers.runs import ready
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset, random_split

from fl_lightning import Partitioned
from fl_lightning.data import (
    IID,
    ByDomain,
    ClassesPerClient,
    ClientDirichlet,
    Dirichlet,
    Pooled,
    QuantityDirichlet,
    Shards,
)
from fl_lightning.data.partition_adapter import own_module_of

X, Y = torch.randn(90, 3), torch.arange(90) % 3


class Theirs(LightningDataModule):
    def __init__(self, dataset=None):
        super().__init__()
        self.dataset = dataset or TensorDataset(X, Y)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=8, shuffle=True, drop_last=True)

    def test_dataloader(self):
        return DataLoader(TensorDataset(X[:10], Y[:10]), batch_size=4)


def test_every_sample_goes_to_one_client_in_the_users_own_batches():
    data = ready(Partitioned(Theirs(), Dirichlet(0.5, 9), num_clients=4))
    loaders = [data.train_dataloader(k) for k in range(4)]
    assert sum(len(loader.dataset) for loader in loaders) == 90
    thirds = ready(Partitioned(Theirs(), num_clients=3))
    assert [[len(y) for _, y in thirds.train_dataloader(k)] for k in range(3)] == [[8] * 3] * 3
    assert data.info(2).label_counts.tolist() == torch.bincount(Y[data.plan.parts[2]], minlength=3).tolist()
    assert len(data.test_dataloader().dataset) == 10
    assert data.val_dataloader() == []


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


# ---------------------------------------------------------------- sets without labels
SEVERAL = TensorDataset(X, torch.randint(2, (90, 4)))


@pytest.mark.parametrize("dataset", [SEVERAL, TensorDataset(X)])
@pytest.mark.parametrize("partitioner", [IID(), QuantityDirichlet(1.0), Pooled()])
def test_partitioners_that_need_no_labels_take_any_targets(dataset, partitioner):
    data = ready(Partitioned(Theirs(dataset), partitioner, 1 if isinstance(partitioner, Pooled) else 3))
    assert sorted(row for part in data.plan.parts for row in part) == list(range(90))
    assert data.info(0).label_counts is None and data.plan.label_counts is None
    assert data.info(0).num_examples == len(data.plan.parts[0])


def test_a_partitioner_may_be_a_function_and_return_lists():
    def first(labels, num_clients, rng):
        return [list(range(len(labels))), *[[]] * (num_clients - 1)]

    data = ready(Partitioned(Theirs(), first, num_clients=3))
    assert [data.info(k).num_examples for k in range(3)] == [90, 0, 0]
    assert [len(data.train_dataloader(k)) for k in range(3)] == [11, 0, 0]


def test_by_domain_needs_no_labels():
    named = TensorDataset(X)
    named.domains = ["photo", "art"] * 45
    data = ready(Partitioned(Theirs(named), ByDomain(), 4))
    assert [data.info(k).domain for k in range(4)] == ["art", "art", "photo", "photo"]
    assert data.info(3).label_counts is None


@pytest.mark.parametrize("partitioner", [Dirichlet(1.0), ClientDirichlet(), Shards(), ClassesPerClient()])
def test_partitioners_of_labels_or_domains_are_refused_without(partitioner):
    with refused(f"data.partitioner='{type(partitioner).__name__}'", "IID", "QuantityDirichlet", "ByDomain"):
        ready(Partitioned(Theirs(SEVERAL), partitioner, 3))
    with refused("'Theirs'", "TensorDataset"):
        ready(Partitioned(Theirs(), ByDomain(), 3))


@pytest.mark.parametrize(("labels", "words"), [(Y - 1, ("is -1",)), (torch.arange(90) + 999_999_999, ("1000000088",))])
def test_integers_that_are_no_classes_are_refused(labels, words):
    with refused("data.datamodule='Theirs'", *words, "floats"):
        ready(Partitioned(Theirs(TensorDataset(X, labels))))


def test_a_data_set_alone_and_a_partitioner_that_is_no_object_are_refused():
    with refused("data.datamodule='TensorDataset'", "LightningDataModule.from_datasets"):
        Partitioned(SEVERAL)
    for partitioner in ("IID", IID):
        with refused("data.partitioner=", "Dirichlet(alpha=0.5)"):
            Partitioned(Theirs(), partitioner)


# ---------------------------------------------------------------- loaders and hooks of the user's data module
def test_evaluation_loaders_of_any_form_are_passed_on_as_they_are():
    theirs, loader = Theirs(), DataLoader(TensorDataset(X, Y))
    forms = [{"a": loader, "b": [loader]}, CombinedLoader({"a": loader}, "sequential"), [loader, loader]]
    for form in forms:
        theirs.val_dataloader = theirs.test_dataloader = lambda form=form: form
        data = ready(Partitioned(theirs))
        assert data.val_dataloader() is form and data.test_dataloader() is form


class Hooked(Theirs):
    def __init__(self):
        super().__init__()
        self.called = []

    def setup(self, stage):
        self.called.append(("setup", stage))

    def teardown(self, stage):
        self.called.append(("teardown", stage))

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return ("moved", batch, device, dataloader_idx)

    def on_exception(self, exception):
        self.called.append(exception)

    def state_dict(self):
        return {"seen": len(self.called)}

    def load_state_dict(self, state_dict):
        self.called.append(state_dict)

    def predict_dataloader(self):
        return "predict"


def test_hooks_reach_the_users_data_module():
    theirs = Hooked()
    data = Partitioned(theirs)
    assert data.transfer_batch_to_device("batch", "cpu", 2) == ("moved", "batch", "cpu", 2)
    error = ValueError()
    data.on_exception(error)
    data.load_state_dict({"a": 1})
    assert theirs.called == [error, {"a": 1}]
    assert data.state_dict() == {"seen": 2} and data.predict_dataloader() == "predict"
    assert own_module_of(data) is own_module_of(theirs) is theirs
    assert Partitioned(Theirs()).predict_dataloader() == []


def test_teardown_ends_what_setup_began_and_a_later_setup_begins_it_again():
    theirs = Hooked()
    data = Partitioned(theirs, Dirichlet(1.0, 5), 3)
    data.teardown("fit")
    assert theirs.called == []
    ready(data)
    plan = data.plan.hash
    data.teardown("fit")
    data.teardown("test")
    ready(data)
    stages = [("setup", "fit"), ("setup", "test")]
    assert theirs.called == [*stages, ("teardown", "fit"), ("teardown", "test"), *stages]
    assert data.plan.hash == plan


def test_a_random_split_of_setup_is_the_same_in_every_process_and_stage():
    class Split(Theirs):
        def setup(self, stage):
            train, test = random_split(TensorDataset(X, Y), [60, 30])
            self.splits = [*getattr(self, "splits", []), train.indices]
            self.dataset, self.held_out = train, test

    def splits():
        torch.rand(1)
        data = ready(Partitioned(Split(), num_clients=3))
        return data.datamodule.splits, data.plan.labels.tolist()

    (first, labels), (again, same_labels) = splits(), splits()
    assert first[0] == first[1] == again[0] and labels == same_labels
