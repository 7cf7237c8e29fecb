"""All sites and all clients are in tables and figures, in percent, and classes have their names."""

import csv
import re

import numpy as np
import pytest
from helpers.reports import report_of, write_run

pytest_plugins = ["helpers.report_fixtures"]

SITES = [f"Hospital {at}" for at in range(30)]
CLASSES = ["benign", "healthy", "malignant"]


def accuracy_of(method, seed, at):
    return 0.5 + 0.01 * at + 0.1 * (method == "FedUV") + 0.02 * seed


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two methods with two seeds on thirty hospitals of three classes."""
    root = tmp_path_factory.mktemp("runs")
    for method in ("FedAvg", "FedUV"):
        for seed in range(2):
            folder = write_run(root / f"{method}{seed}" / "version_0", method, seed, 4, clients=30, measured=False)
            with (folder / "metrics.csv").open() as file:
                rows = list(csv.DictReader(file))
            for at, site in enumerate(SITES):
                rows[-1][f"domain/{site}/accuracy"] = accuracy_of(method, seed, at)
                rows[-1][f"domain/{site}/loss"] = 2.0 + at
            with (folder / "metrics.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[-1]))
                writer.writeheader()
                writer.writerows(rows)
            counts = np.arange(90).reshape(30, 3)
            named = {"domains": np.array(SITES), "class_names": np.array(CLASSES)}
            np.savez(folder / "plan.npz", label_counts=counts, sizes=counts.sum(1), hash="same", **named)
            (folder / "environment.json").write_text('{"plan_hash": "same"}')
            own = np.tile(np.linspace(0.2, 0.8, 30), (2, 1))
            ids = np.tile(np.arange(30), (2, 1))
            np.savez(folder / "personal.npz", rounds=np.array([0, 3]), clients=ids, own=own)
            by_class = np.full((1, 30, 3), 0.5)
            np.savez(folder / "per_class.npz", rounds=np.array([3]), before=by_class, after=by_class)
    return root


@pytest.fixture(scope="module")
def files(root, tmp_path_factory):
    return report_of(tmp_path_factory.mktemp("report"), root, drawn=False)


def rows_of(files, beginning):
    """The cells of the rows of tables that begin so."""
    return [line.strip("| ").split(" | ") for line in files["md"].splitlines() if line.startswith(f"| {beginning}")]


def test_every_site_has_a_row_with_the_mean_over_the_seeds_in_percent(files):
    (head,) = rows_of(files, "site | ")
    assert [name.rpartition(" | ")[2] for name in head[1:4]] == [
        "training examples",
        "accuracy in %: FedAvg",
        "accuracy in %: FedUV",
    ]
    rows = rows_of(files, "Hospital ")
    assert [row[0] for row in rows] == SITES
    for at, row in enumerate(rows):
        means = [np.mean([accuracy_of(method, seed, at) for seed in range(2)]) for method in ("FedAvg", "FedUV")]
        assert row[1:4] == [str(9 * at + 3), *(f"{100 * mean:.2f}" for mean in means)]
        assert row[4] == f"{2.0 + at:.4f}"


def test_every_client_has_a_row_with_its_site(files):
    clients = [row for at in range(30) for row in rows_of(files, f"{at} (")]
    assert [row[0] for row in clients] == [f"{at} ({site})" for at, site in enumerate(SITES)]
    assert (clients[0][1], clients[-1][2]) == ("20.00", "80.00")


def test_the_drawings_name_sites_and_classes(root, tmp_path):
    text = report_of(tmp_path, root)["html"]
    for name in (*SITES, *CLASSES):
        assert len(re.findall(rf">{name}\b|\({name}\)", text)) >= 2, name


def test_a_site_that_a_run_lacks_has_a_dash(tmp_path, report):
    for method, site in (("FedAvg", "domain/Hospital 1/accuracy"), ("MOON", "domain/Hospital 3/accuracy")):
        folder = write_run(tmp_path / method / "version_0", method, 0, 2, measured=False)
        (folder / "metrics.csv").write_text(f"round,test/accuracy,{site}\n0,0.5,\n1,0.6,0.25\n")
    rows = [row[-2:] for row in rows_of(report(), "Hospital ")]
    assert rows == [["25.00", "-"], ["-", "25.00"]]


def test_each_table_in_latex_has_a_label_by_what_it_shows(files):
    labels = set(re.findall(r"\\label{tab:(.*?)}", files["tex"]))
    assert {"results", "differences", "sites", "clients", "runs"} <= labels
    assert labels <= {"results", "differences", "sites", "clients", "configs", "runs", "cost"}


def test_clients_are_compared_with_their_own_models_in_a_run_of_local(tmp_path, report):
    own = {"FedAvg": (0.5, 0.75), "Local": (0.625, 0.5)}
    for method, accuracies in own.items():
        folder = write_run(tmp_path / method / "version_0", method, 0, 2, measured=False)
        header = "round,test/accuracy,personal/accuracy,personal/client/0,personal/client/1"
        numbers = ",".join(map(str, (np.mean(accuracies), *accuracies)))
        (folder / "metrics.csv").write_text(f"{header}\n0,0.5,,,\n1,0.6,{numbers}\n")
    files = report()
    (head,) = [row for row in rows_of(files, "method | ") if "gain" in row]
    row = dict(zip(head, next(row for row in rows_of(files, "FedAvg | ") if len(row) == len(head)), strict=True))
    shown = [row[name].strip("*") for name in ("accuracy", "gain", "gain_worst", "helped")]
    assert shown == ["62.50", "6.25", "-12.50", "50.00"]
    assert "personal-client" not in files["html"]
