"""The command ``report``: what it takes, what it refuses, and what it writes."""

import csv
import gc
import re
import shutil
from pathlib import Path

import pytest
from helpers.benches import TOY, FakeWorkerClient, outcome, toy_scheduler, toy_suite
from helpers.errors import assert_names
from helpers.reports import write_run
from helpers.tiers import sample
from optuna import create_study

from fl_lightning.bench.scheduler import SuiteStudy
from fl_lightning.bench.study import open_database, results_of
from fl_lightning.bench.table import write_tables
from fl_lightning.cli import main
from fl_lightning.report.figures import Card

PUBLISHED = """tables:
  - {caption: Table 7, page: 3, published: {FedAvg: {0.1: 40, 0.2: 41}, FedProx: {0.1: 45.5, 0.2: 40}}}
"""

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
# what the command says that it has written
WRITTEN = "report.html, and report.md, report.tex, report.csv, report.runs.csv beside it"
WITH_PAPER = WRITTEN.replace(" beside", ", report.paper.csv beside")


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch, request):
    """Leave the drawings out where they do not matter: they take most of the time."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(Card, "elements", lambda self: iter(["<svg></svg>"]))


@pytest.fixture
def drawn():
    """For a test that needs the drawings."""


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """``command(*args)`` runs the report in an empty folder; gives the status, and what it says and complains of."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*args):
        status = 0
        try:
            main(["report", *map(str, args)])
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs" / "fedavg" / "version_0", rounds=3, measured=False)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# ------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], ("DIR|STUDY",)),
        (["nowhere"], ("nowhere", "No such file")),
        (["empty"], ("empty",)),
        (["broken.db"], ("broken.db",)),
        (["sqlite:///nowhere.db"], ("STUDY='sqlite:///nowhere.db'",)),
        (["RUNS", "--output", "page.txt"], ("--output='page.txt'",)),
        (["RUNS", "--output", "/proc/nowhere/page.html"], ("--output='/proc/nowhere",)),
        (["RUNS", "--output", "mine.html"], ("--output='mine.html'",)),
        (["RUNS", "--output", "README.html"], ("--output='README.html'", "README.md")),
        (["RUNS", "--metric", "test/f1"], ("--metric='test/f1'",)),
        (["RUNS", "--metric", "test/acuracy"], ("--metric='test/acuracy'", "are: test/accuracy, train/accuracy")),
        (["RUNS", "--baseline", "FedUV"], ("--baseline='FedUV'", "FedAvg")),
        (["RUNS", "--target", "60"], ("--target=60.0",)),
        (["RUNS", "--figure", "nothing"], ("--figure='nothing'", "test-accuracy")),
        (["RUNS", "--figure", "test-accuracy", "--output", "a.html"], (".pdf", ".svg", ".png")),
        (["RUNS", "--names", "FedAvg=a", "FedAvg=b"], ("--names='FedAvg=b'",)),
        (["RUNS", "--names", "FedAvgg=a"], ("--names='FedAvgg'",)),
        (["RUNS", "--figures", "figures", "--figure", "test-accuracy"], ("--figures='figures'", "--figure")),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(command, run, tmp_path, args, named):
    here = tmp_path / "here"
    (here / "empty").mkdir()
    for name in ("broken.db", "mine.html", "README.md"):
        (here / name).write_text("something else\n" * 99)
    before = files(tmp_path)
    status, out, err = command(*(str(tmp_path / "runs") if one == "RUNS" else one for one in args))
    assert (status, out) == (2, "") and err.count("\n") == 1 and err.startswith("error: ")
    assert_names(err, *named)
    assert files(tmp_path) == before


# ------------------------------------------------------------------ runs
def test_the_page_and_its_tables_are_written_side_by_side(command, run, tmp_path):
    status, out, err = command(tmp_path / "runs", "--output", "new/page.html")
    assert (status, out, err) == (0, f"1 run: new/{WRITTEN}\n".replace("report", "page"), "")
    named = ["page.csv", "page.html", "page.md", "page.runs.csv", "page.tex"]
    assert files(tmp_path / "here" / "new") == named
    # named twice it is read once, and the page of an earlier report is replaced
    again = command(tmp_path / "runs", run, "--output", "new/page.html", "--title", "Second")
    assert again == (status, out, err)
    assert "<title>Second" in (tmp_path / "here" / "new" / "page.html").read_text()


@pytest.mark.parametrize("ending", sample(["pdf", "svg", "png"], "svg"))
def test_one_figure_is_made_alone(command, run, tmp_path, ending):
    status, out, _ = command(run, "--figure", "test-accuracy", "--output", f"a.{ending}")
    assert (status, out) == (0, f"a.{ending}\n") and files(tmp_path / "here") == [f"a.{ending}"]
    begins = {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}[ending]
    assert (tmp_path / "here" / f"a.{ending}").read_bytes().startswith(begins)


def test_every_drawing_is_written_as_wide_as_a_column_with_the_names_that_are_given(command, tmp_path):
    for method in ("FedAvg", "FedUV"):
        folder = write_run(tmp_path / "runs" / method / "version_0", method, rounds=3, measured=False)
        (folder / "metrics.csv").write_text(
            "round,test/accuracy,bytes/down,bytes/up\n0,0.5,9,9\n1,0.6,9,9\n2,0.7,9,9\n"
        )
    names = ["--names", "test/accuracy=Accuracy", "FedUV=Ours"]
    status, out, _ = command(tmp_path / "runs", "--figures", "figures", *names)
    drawn = ["partition", "test-accuracy-bytes", "test-accuracy-rounds"]
    assert status == 0 and f"{len(drawn)} drawings" in out
    figures = tmp_path / "here" / "figures"
    assert files(figures) == [f"{name}.{ending}" for name in drawn for ending in ("pdf", "svg")]
    text = (figures / "test-accuracy-rounds.svg").read_text()
    assert float(re.search(r'width="([\d.]+)pt"', text)[1]) == pytest.approx(3.3 * 72, abs=0.01)
    assert ">Accuracy in %<" in text and ">Ours<" in text
    assert b"/Type3" not in (figures / "test-accuracy-rounds.pdf").read_bytes()
    for ending in ("html", "md", "tex"):
        page = (tmp_path / "here" / f"report.{ending}").read_text()
        assert "final Accuracy in" in page.replace("\\%", "%") and "Ours" in page
    status, _, err = command(tmp_path / "runs", "--names", "FedUV=FedAvg")  # two cannot have one name
    assert status == 2
    assert_names(err, "--names='FedUV=FedAvg'", "FedAvg, FedUV")


@pytest.mark.usefixtures("drawn")
def test_a_real_run_has_a_page(command, finished_run, tmp_path):
    """What the trainer leaves is what the report reads."""
    status, _, err = command(finished_run)
    assert (status, err) == (0, "")
    (line,) = csv.DictReader((tmp_path / "here" / "report.runs.csv").read_text().splitlines())
    assert (line["method"], line["state"], line["rounds"]) == ("FedAvg", "finished", "3") and line["partition"]
    page = page_of(tmp_path)
    for heading in ("Spectra", "Who holds what", "Drift of the clients", "Cost"):
        assert f"<h3>{heading}</h3>" in page
    assert "Digits" in page and "warning" not in page.split("</style>")[1].split("<h2>")[0]


# ------------------------------------------------------------------ studies
def answers(cell, on_round):
    """FedProx is better by 1/16 in each of its cells, or a little more."""
    prox, second = "FedProx" in cell["name"], "seed=1" in cell["name"]
    better = 0.0625 * prox + 0.03125 * second + 0.00390625 * (prox and second)
    return outcome((0.25, 0.5 + better))


def run_study(folder):
    """A suite with published numbers, and the output of a bench that has run it, with its tables."""
    text = TOY.replace("seeds: 1", "seeds: 2\nnotes: [One thing is left open.]") + PUBLISHED
    suite = toy_suite(folder, text)
    output = folder / "output"
    output.mkdir()
    scheduler, opened, _ = toy_scheduler(suite, output, client=lambda job=0: FakeWorkerClient(job, answers))
    scheduler.run()
    # the study that tunes a method of the suite lies in the same database
    tuned = create_study(study_name=f"{suite.name}/tune/FedProx", storage=opened.database)
    tuned.set_user_attr("suite", suite.name)
    tuned.enqueue_trial({"mu": 0.1}, user_attrs={"digest": "trial 0"})
    write_tables(suite, suite.cells(), results_of(opened, suite.cells()), folder / "tables")
    del scheduler, opened, tuned
    gc.collect()  # closes the database, whose files for connections then go, and not while a test looks
    return suite, output, folder / "tables"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return run_study(tmp_path_factory.mktemp("study"))


def page_of(tmp_path):
    return (tmp_path / "here" / "report.html").read_text()


def test_a_study_has_the_papers_table_and_its_verdicts(command, study, tmp_path):
    _, output, _ = study
    before = files(output)
    status, out, err = command(output)
    assert files(output) == before  # nothing beside the database
    assert (status, err) == (0, "") and out == f"8 runs: {WITH_PAPER}\n"
    page = page_of(tmp_path)
    assert "Table 7 (page 3 of the source)" in page and "One thing is left open." in page
    assert "8 cells: 8 done." in page and "45.50" in page and "+5.50" in page
    assert ">reproduced<" in page
    assert ">reversed<" in page  # the paper has -1.00 in the second column
    paper = list(csv.DictReader((tmp_path / "here" / "report.paper.csv").read_text().splitlines()))
    assert [line["verdict"] for line in paper] == ["", "reproduced", "", "reversed"]


def test_a_study_is_read_in_a_folder_of_any_name_and_beside_its_writer(command, study, tmp_path):
    output = shutil.copytree(study[1], tmp_path / "a #b ä")
    database = open_database(f"sqlite:///{output / 'study.db'}")
    with database.engine.begin() as connection:  # which locks the database
        connection.exec_driver_sql("UPDATE trials SET number = -1 - number")
        assert command(output)[:2] == (0, f"8 runs: {WITH_PAPER}\n")
        connection.rollback()
    database.engine.dispose()
    assert "study.db-wal" not in files(output)


def test_the_numbers_are_those_that_bench_prints(command, study, tmp_path):
    _, output, tables = study
    command(output)
    (table,) = tables.glob("*.table.md")
    report = (tmp_path / "here" / "report.md").read_text()
    for line in table.read_text().splitlines():
        assert not line.startswith("|") or line in report


def test_a_folder_of_everything_has_its_runs_and_its_studies(command, study, tmp_path):
    shutil.copytree(study[1], tmp_path / "runs" / "study")
    write_run(tmp_path / "runs" / "fedavg" / "version_0", rounds=3, measured=False)
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "study.db").write_text("no database")
    status, out, err = command(tmp_path / "runs")
    assert status == 0 and out == f"9 runs: {WITH_PAPER}\n"
    assert_names(err, "other", "study.db", "skipped")
    page = page_of(tmp_path)
    assert ">reversed<" in page and ">CIFAR10</h2>" in page


@pytest.mark.parametrize("how", ["folder", "database", "url", "cells", "suite"])
def test_a_study_is_found_by_any_of_its_names(command, study, tmp_path, how):
    suite, output, tables = study
    given = {
        "folder": [output],
        "database": [output / "study.db"],
        "url": [f"sqlite:///{output / 'study.db'}"],
        "cells": [tables / f"{suite.name}.cells.csv", "--suite", suite.path],
        "suite": [suite.path],
    }
    if how == "suite":
        (tmp_path / "here" / "runs").mkdir()
        (tmp_path / "here" / "runs" / suite.name).symlink_to(output)
    status, out, err = command(*given[how])
    assert (status, err) == (0, "") and out.startswith("8 runs")
    assert ">reversed<" in page_of(tmp_path)


def test_cells_without_their_suite_have_tables_without_published_numbers(command, study, tmp_path):
    suite, _, tables = study
    status, _, err = command(tables / f"{suite.name}.cells.csv")
    assert status == 0
    assert_names(err, "--suite")
    page = page_of(tmp_path)
    assert "45.50" not in page and "56.25" in page and "lr=0.1" in page


@pytest.mark.parametrize(("name", "lacking"), [("papers/results/scaled-seconds", True), ("front/front-suite", False)])
def test_a_table_of_bytes_says_which_stored_cells_lack_values_that_methods_send(command, tmp_path, name, lacking):
    command(EXPERIMENTS / f"{name}.cells.csv")
    page = (tmp_path / "here" / "report.md").read_text()
    assert " MB |" in page and ("MB of SCAFFOLD and FedProto in cells from before" in page) == lacking


def test_a_run_without_its_folder_has_the_median_seconds_that_the_study_keeps(command, study, tmp_path):
    (cells,) = study[2].glob("*.cells.csv")
    head, *lines = csv.reader(cells.read_text().splitlines())
    for line in lines:
        line[head.index("seconds")] = "9.75"
        line[head.index("metrics")] = '{"time/round": 44.1}'
    with (tmp_path / cells.name).open("w", newline="") as file:
        csv.writer(file).writerows([head, *lines])
    assert command(tmp_path / cells.name)[0] == 0
    told = csv.DictReader((tmp_path / "here" / "report.runs.csv").read_text().splitlines())
    assert {line["seconds_a_round"] for line in told} == {"9.75"} and "44.1" not in page_of(tmp_path)


def test_cells_of_an_edited_suite_are_shown_with_a_warning(command, tmp_path):
    suite, output, _ = run_study(tmp_path)
    suite.path.write_text(suite.path.read_text().replace("max_rounds: 3", "max_rounds: 4"))
    status, _, err = command(output)
    assert status == 0
    assert_names(err, "8 cells", "suite")
    assert "8 cells: 8 done." in page_of(tmp_path)


def test_a_study_of_which_nothing_has_run_has_a_page(command, tmp_path):
    suite = toy_suite(tmp_path)
    SuiteStudy(suite, open_database(f"sqlite:///{tmp_path / 'study.db'}"), suite.cells())
    status, out, _ = command(tmp_path / "study.db")
    assert (status, out) == (0, f"0 runs: {WITH_PAPER}\n")
    assert "4 cells: 4 waiting." in page_of(tmp_path)
