"""Test data by client and by domain of any data module, and the table of the domains at the end of a run."""

import csv
import re

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_trainer
from helpers.tiny import TinyModule, variant
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from fl_lightning import Partitioned
from fl_lightning.callbacks import Callback, DomainMetrics, PersonalAccuracy
from fl_lightning.data import Dirichlet, Natural
from fl_lightning.methods import FedBN

SITES = ("kent", "oslo", "pisa")


def site(number, size, **attributes):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(number)) + number
    dataset = TensorDataset(x, (x[:, :3] - number).argmax(1))
    vars(dataset).update(attributes)
    return dataset


def named(sizes, key="site"):
    return ConcatDataset([site(i, n, **{key: name}) for i, (n, name) in enumerate(zip(sizes, SITES, strict=True))])


class Data(LightningDataModule):
    def __init__(self, train, test, batch_size=16):
        super().__init__()
        self.train, self.test, self.batch_size = train, test, batch_size

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=8) if isinstance(self.test, Dataset) else self.test


class Net(TinyModule):
    """Logs under names of its own, and has BatchNorm, which FedBN keeps with the clients."""

    taps = {"logits": "head"}  # noqa: RUF012

    def build(self):
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3)

    def hits(self, batch):
        return (self(batch[0]).argmax(1) == batch[1]).float().mean()

    def test_step(self, batch, batch_idx):
        self.log("test/acc", self.hits(batch))
        self.log("test/misses", 1 - self.hits(batch))

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", self.hits(batch))


def ready(train, test, partitioner=None, **kwargs):
    data = Partitioned(Data(train, test), partitioner or Natural(), **{"num_clients": 3, **kwargs})
    data.setup()
    return data


def sizes(data, clients=3):
    by_domain = {name: len(loader.dataset) for name, loader in data.test_dataloaders_by_domain().items()}
    return by_domain, [len(data.test_dataloader(k).dataset) for k in range(clients)]


def test_a_name_for_each_part_divides_the_test_data_too():
    data = ready(named((40, 30, 50)), named((8, 6, 9)))
    assert [data.info(k).domain for k in range(3)] == list(SITES)
    assert sizes(data) == ({"kent": 8, "oslo": 6, "pisa": 9}, [8, 6, 9])
    for k, loader in enumerate(data.test_dataloader(k) for k in range(3)):
        torch.testing.assert_close(torch.cat([x for x, _ in loader]), named((8, 6, 9)).datasets[k].tensors[0])
    assert len(data.test_dataloader().dataset) == 23
    data.teardown()
    data.datamodule.test = named((3, 4, 5))
    data.setup()
    assert sizes(data) == ({"kent": 3, "oslo": 4, "pisa": 5}, [3, 4, 5])


@pytest.mark.parametrize(("key", "named"), [("domains", {}), ("hospital", {"domains": "hospital"})])
def test_the_domains_are_a_column_of_any_name(key, named):
    train, test = site(0, 30), site(1, 12)
    setattr(train, key, np.array(SITES)[np.arange(30) % 3])
    setattr(test, key, [SITES[i % 2] for i in range(12)])
    data = ready(Subset(train, range(24)), Subset(test, range(10)), **named)
    assert sizes(data) == ({"kent": 5, "oslo": 5}, [5, 5, 0])
    with refused("data.datamodule='Data'", "TensorDataset has no clinic"):
        ready(train, test, domains="clinic")


def test_a_dictionary_has_a_loader_for_each_domain():
    parts = dict(zip(SITES, (DataLoader(site(i, 5 + i), batch_size=4) for i in range(3)), strict=True))
    data = ready(named((40, 30, 50)), parts)
    assert data.test_dataloaders_by_domain() == parts and data.test_dataloader(1) == [parts["oslo"]]
    unlike = ready(named((40, 30, 50)), {"clean": parts["kent"], "noisy": parts["oslo"]})
    assert unlike.test_dataloaders_by_domain() == {}


def test_without_domains_a_clients_test_data_have_the_proportions_of_its_labels():
    data = ready(site(0, 120), site(1, 90), Dirichlet(0.3, 5), num_clients=4)
    for k in range(4):
        labels = torch.cat([y for _, y in data.test_dataloader(k)])
        counts = data.info(k).label_counts.double()
        shares = torch.bincount(labels, minlength=3).double() / len(labels)
        assert torch.allclose(shares, counts / counts.sum(), atol=0.1)
    assert data.test_dataloaders_by_domain() == {}


def test_a_test_sampler_leaves_out_the_training_examples_of_its_data_set():
    train, rows = site(0, 60), range(40, 60)
    train.domains = [SITES[i % 2] for i in range(60)]
    test = DataLoader(train, batch_size=8, sampler=SubsetRandomSampler(rows))
    held = set(map(tuple, train.tensors[0][40:].tolist()))
    for data in (ready(train, test, num_clients=2), ready(train, test, Dirichlet(5.0, 5), num_clients=2)):
        loaders = [*data.test_dataloaders_by_domain().values(), *map(data.test_dataloader, range(2))]
        assert all({tuple(x.tolist()) for x, _ in loader.dataset} <= held for loader in loaders)
        assert [len(loader.dataset) for loader in loaders[:2]] == [10, 10]
    kept = DataLoader(train, batch_size=8, sampler=RandomSampler(train, num_samples=9))
    with refused("data.datamodule='Data'", "sampler"):
        ready(train, kept, num_clients=2).test_dataloader(0)


def test_a_probe_of_the_test_data_has_no_examples_that_their_sampler_leaves_out(tmp_path, undrawn):
    whole, probed = site(0, 60), []

    class Probing(Callback):
        def on_last_round_end(self, trainer):
            for _, (x, _), *_ in trainer.representations(None, ("logits",), "test", examples=15):
                probed.extend(map(tuple, x.tolist()))

    test = DataLoader(whole, batch_size=8, sampler=SubsetRandomSampler(range(40, 60)))
    data = Partitioned(Data(whole, test), num_clients=3)
    small_trainer(tmp_path, local_steps=1, max_rounds=1, callbacks=[Probing()]).fit(Net(), data)
    assert len(probed) == 15 and {*probed} <= {*map(tuple, whole.tensors[0][40:].tolist())}


@pytest.mark.parametrize(
    ("test", "words"),
    [
        (lambda: TensorDataset(torch.randn(9, 6)), ("without domains or labels", "domains (N,)")),
        (lambda: [[torch.randn(4, 6), torch.arange(4) % 3]], ("gives list", "one DataLoader", "a dictionary")),
    ],
)
def test_test_data_that_cannot_be_divided_say_why(test, words):
    with refused("data.datamodule='Data'", *words):
        ready(named((40, 30, 50)), test()).test_dataloader(0)


def fit(tmp_path, model=None, methods=(), test=None, **kwargs):
    trainer = small_trainer(tmp_path, local_steps=3, **{"max_rounds": 1, **kwargs})
    data = Data(named((40, 30, 50)), named((8, 6, 9)) if test is None else test)
    trainer.fit(model or Net(), Partitioned(data, Natural(), 3), list(methods))
    return trainer


def test_each_run_ends_with_the_modules_own_metrics_of_each_domain(tmp_path, capsys, undrawn):
    trainer = fit(tmp_path)
    values = {name: trainer.metrics[f"domain/{name}/acc"] for name in SITES}
    whole = sum(n * values[name] for n, name in zip((8, 6, 9), SITES, strict=True)) / 23
    assert whole == pytest.approx(trainer.metrics["test/acc"], abs=1e-6)
    assert re.search(rf"^ +kent +1 +40 +8 +{100 * values['kent']:.2f} % ", capsys.readouterr().err, re.MULTILINE)
    with open(trainer.run_dir / "domains.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["domain"] for row in rows] == list(SITES) and [row["test_examples"] for row in rows] == ["8", "6", "9"]
    assert [float(row["acc"]) for row in rows] == list(values.values())


def test_the_table_of_the_domains_is_utf_8_whatever_the_encoding_of_the_system(tmp_path, undrawn, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SITES", ("Köln", "Orléans", "Oslo"))
    monkeypatch.setattr("io.text_encoding", lambda encoding, level=2: encoding or "latin-1")
    lines = (fit(tmp_path).run_dir / "domains.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["Köln", "Orléans", "Oslo"]


def test_models_that_stay_with_the_clients_are_evaluated_on_their_own_domain(tmp_path, undrawn):
    trainer = fit(tmp_path, methods=[FedBN()], callbacks=[PersonalAccuracy(examples=None, fine_tune_steps=0)])
    own = np.load(trainer.run_dir / "personal.npz")["own"][-1]
    assert [trainer.metrics[f"domain/{name}/acc"] for name in SITES] == pytest.approx(own.tolist())


def test_other_rounds_and_fewer_domains(tmp_path, undrawn):
    often = fit(tmp_path, max_rounds=2, callbacks=[DomainMetrics(every_n_rounds=1)])
    assert ["domain/oslo/acc" in row for row in often.history] == [True, True]
    none = fit(tmp_path, callbacks=[DomainMetrics(max_domains=2)])
    assert not any(name.startswith("domain") for name in none.metrics)
    assert not (none.run_dir / "domains.csv").exists()


def test_a_test_of_a_finished_run_ends_with_its_tables(tmp_path, capsys, undrawn):
    callbacks = [PersonalAccuracy(examples=None, fine_tune_steps=2)]
    trainer = fit(tmp_path, methods=[FedBN()], callbacks=callbacks, enable_progress_bar=True)
    tables = capsys.readouterr().err.partition("client  domain")[2].partition("best")[0]
    assert "domain  clients" in tables and "pisa" in tables
    fitted, folder = trainer.metrics, trainer.run_dir
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = small_trainer(tmp_path, callbacks=callbacks, enable_progress_bar=True)
    data = Partitioned(Data(named((40, 30, 50)), named((8, 6, 9))), Natural(), 3)
    metrics = again.test(Net(), data, ckpt_path=folder / "checkpoints/last.ckpt", method=[FedBN()])
    assert capsys.readouterr().err.partition("client  domain")[2].split() == tables.split()
    assert all(metrics[name] == pytest.approx(value) for name, value in fitted.items() if "domain/" in name)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


Validated = variant(Data, val_dataloader=lambda self: DataLoader(named((3, 4, 5)), batch_size=8))


def test_validate_shows_the_domains_of_the_validation_data(tmp_path, capsys):
    data = Partitioned(Validated(named((40, 30, 50)), named((8, 6, 9))), Natural(), 3)
    values = small_trainer(tmp_path, enable_progress_bar=True).validate(Net(), data)
    said = capsys.readouterr().err
    assert re.search(rf"^ +oslo +1 +30 +4 +{100 * values['domain/oslo/acc']:.2f} %$", said, re.MULTILINE)
    assert "validation examples" in said
