"""All sites and all clients are in tables and bars, in percent, and classes have their names."""

import csv
import re

import numpy as np
import pytest
from helpers.reports import write_run

from fl_lightning.report.gallery import cards_of
from fl_lightning.report.page import Asked, make_report
from fl_lightning.report.run import find_runs, read_run
from fl_lightning.report.sections import Metric, sections_of
from fl_lightning.report.sites import parts_of, parts_sheet
from fl_lightning.report.sources import read_sources

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
def section(root):
    (made,) = sections_of([read_run(folder) for folder in find_runs(root)], Metric("test/accuracy"), None)
    return made


def test_every_site_has_a_row_with_the_mean_over_the_seeds_in_percent(section):
    sites, _ = parts_of(section, "")
    sheet = parts_sheet(section, "", sites)
    assert [line[0].text for line in sheet.lines] == SITES
    assert [(name, list(inner)) for name, inner in sheet.groups] == [
        ("training examples", []),
        ("accuracy in %", ["FedAvg", "FedUV"]),
        ("loss", ["FedAvg", "FedUV"]),
    ]
    for at, line in enumerate(sheet.lines):
        means = [np.mean([accuracy_of(method, seed, at) for seed in range(2)]) for method in ("FedAvg", "FedUV")]
        assert [text.text for text in line[1:4]] == [str(9 * at + 3), *(f"{100 * mean:.2f}" for mean in means)]
        assert line[4].text == f"{2.0 + at:.4f}"


def test_every_client_has_a_row_with_its_site(section):
    _, clients = parts_of(section, "")
    sheet = parts_sheet(section, "", clients)
    assert [line[0].text for line in sheet.lines] == [f"{at} ({site})" for at, site in enumerate(SITES)]
    assert [sheet.lines[0][1].text, sheet.lines[-1][2].text] == ["20.00", "80.00"]


def test_bars_are_of_all_sites_and_nothing_of_them_is_left_to_a_file(section):
    cards = {card.name: card for *_, card in cards_of(section)}
    assert "domain" not in cards  # what was measured once is no curve
    for name, number in (("sites-accuracy", 60), ("clients-accuracy-as-it-is", 60)):
        assert len(cards[name].rows) == number and len(cards[name].drawings) == 2  # of 24 and of 6
    for drawing in cards["sites-accuracy"].drawings:
        drawing.alone()


def test_the_page_names_sites_and_classes(root):
    text = make_report(read_sources([str(root)], []), Asked()).files("page")["page.html"]
    assert "metrics.csv of the runs" not in text
    for name in (*SITES, *CLASSES):
        assert len(re.findall(rf">{name}\b|\({name}\)", text)) >= 2, name


def test_a_site_that_a_run_lacks_has_a_dash(section, tmp_path):
    folder = write_run(tmp_path / "version_0", "MOON", 0, 2, measured=False)
    (folder / "metrics.csv").write_text("round,test/accuracy,domain/Hospital 3/accuracy\n0,0.5,\n1,0.6,0.25\n")
    runs = [*(run for group in section.groups for run in group.runs.values()), read_run(folder)]
    config = runs[0].config
    runs[-1].config.update({key: config[key] for key in ("trainer", "data", "model")})
    (other,) = sections_of(runs, Metric("test/accuracy"), None)
    sites, _ = parts_of(other, "")
    sheet = parts_sheet(other, "", sites)
    column = [name for name, _ in sheet.groups].index("accuracy in %") + 3
    assert [line[column].text for line in sheet.lines if line[column].text != "-"] == ["25.00"]


def test_the_columns_of_a_partition_have_the_names_of_a_few_sites(tmp_path):
    def names_along_x(at, sites):
        folder = write_run(tmp_path / str(at) / "version_0", clients=len(sites), measured=False)
        counts = np.full((len(sites), 3), 120)
        counts[0] = 340
        np.savez(folder / "plan.npz", label_counts=counts, sizes=counts.sum(1), hash="same", domains=np.array(sites))
        (made,) = sections_of([read_run(folder)], Metric("test/accuracy"), None)
        (card,) = (card for *_, card in cards_of(made) if card.name == "partition")
        axes = card.drawings[0].alone().axes[0]
        return [[one.get_text() for one in axis.get_ticklabels()] for axis in (axes.xaxis, axes.child_axes[0].yaxis)]

    # there is no power of ten between the counts
    assert names_along_x(0, SITES[:5]) == [SITES[:5], ["120", "340"]]
    for at, others in enumerate((["A", "A", "B"], SITES[:13]), 1):
        assert not {*names_along_x(at, others)[0]} & {*others}


def test_each_table_in_latex_is_labelled_by_what_it_shows(root):
    text = make_report(read_sources([str(root)], []), Asked()).files("page")["page.tex"]
    labels = re.findall(r"\\label{tab:(.*?)}", text)
    assert {"results", "differences", "sites", "clients", "runs"} <= {*labels}
    assert {*labels} <= {"results", "differences", "sites", "clients", "configs", "runs", "cost"}
