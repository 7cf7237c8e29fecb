"""``partition`` shows who holds what, without training."""

import csv

import numpy as np
import pytest
import torch
from helpers.runs import small_data, small_model, small_trainer
from lightning.pytorch import LightningDataModule
from matplotlib.image import imread
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import Partitioned
from fl_lightning.cli import main
from fl_lightning.data import Dirichlet, FromPlan, Partitioner, Plan, Pooled, RandomRotation
from fl_lightning.storage.partition_table import client_rows, means_of

CONFIGS = [f"--config=experiments/{part}.yaml" for part in ("data/digits", "models/feduvcnn", "methods/fedprox")]


def partition(tmp_path, capsys, data):
    folder = small_trainer(tmp_path).partition(data)
    return folder, capsys.readouterr().out


def test_the_command_prints_the_table_and_writes_plan_csv_and_figures(tmp_path, capsys):
    main(["partition", *CONFIGS, f"--trainer.default_root_dir={tmp_path}"])
    said = capsys.readouterr().out
    assert said.splitlines()[0].split() == ["client", "samples", "classes", "largest", "class", "its", "share"]
    folder = tmp_path / "partition" / "version_0"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*")} == {
        "plan.npz",
        "clients.csv",
        "figures/labels.png",
        "figures/means.png",
    }
    for figure in folder.glob("figures/*.png"):
        assert imread(figure).std() > 0.01
    with open(folder / "clients.csv") as file:
        rows = list(csv.DictReader(file))
    sizes = Plan.load(folder / "plan.npz").sizes
    assert [int(row["samples"]) for row in rows] == sizes.tolist()


def test_the_plan_is_that_of_the_run_and_can_be_used_for_one(tmp_path, capsys):
    folder, _ = partition(tmp_path, capsys, small_data())
    trainer = small_trainer(tmp_path, max_rounds=1)
    trainer.fit(small_model(), small_data(partitioner=FromPlan(str(folder / "plan.npz"))))
    assert Plan.load(trainer.run_dir / "plan.npz").hash == Plan.load(folder / "plan.npz").hash


def test_rows_say_what_a_client_holds():
    labels, domains = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 0, 1, 1, 1, 1])
    plan = Plan([np.array([0, 1]), np.array([2, 3, 4, 5]), np.array([], int)], labels, 3, 0, domains, ("art", "photo"))
    assert client_rows(plan) == [(0, 2, 1, 0, "1.00", "art"), (1, 4, 2, 2, "0.75", "photo"), (2, 0, "", "", "", "")]


def test_the_means_are_of_the_images_as_stored_before_augmentation_and_noise():
    plain = small_data(kind="cnn")
    changed = small_data(kind="cnn", augment=[RandomRotation(90)], client_noise=1.0, drop_last=True)
    for data in (plain, changed):
        data.setup()
    for k, (stored, found) in enumerate(zip(means_of(plain), means_of(changed), strict=True)):
        assert torch.equal(stored, found)
        x = torch.cat([x for x, _ in plain.train_dataloader(k)])
        torch.testing.assert_close(found.sort()[0], x.flatten(1).mean(1).sort()[0])


def test_clients_without_examples_and_inputs_that_are_missing_have_no_means():
    x = torch.arange(40.0).view(20, 2)
    x[3, 0] = torch.nan

    class Lacking(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(x, torch.arange(20) % 2), batch_size=4)

    class Last(Partitioner):
        def __call__(self, labels, num_clients, rng):
            return [[], [*range(len(labels))]]

    data = Partitioned(Lacking(), Last(), num_clients=2)
    data.setup()
    assert [len(means) for means in means_of(data)] == [0, 19]


@pytest.mark.parametrize(("clients", "words"), [(1, "1 client of"), (60, "60 clients of")])
def test_one_client_and_many_are_drawn(tmp_path, capsys, clients, words):
    data = small_data(num_clients=clients, partitioner=Pooled() if clients == 1 else Dirichlet(0.5, 1))
    folder, said = partition(tmp_path, capsys, data)
    assert (folder / "figures" / "labels.png").is_file()
    assert words in said


def test_inputs_that_are_no_numbers_have_no_figure_of_means(tmp_path, capsys):
    class Words(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.arange(40).view(20, 2), torch.arange(20) % 2), batch_size=4)

    folder, _ = partition(tmp_path, capsys, Partitioned(Words(), num_clients=2))
    assert [path.name for path in folder.glob("figures/*")] == ["labels.png"]
