"""The page of results is made of the stored cells."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers.errors import refused

from fl_lightning.bench import load_suite
from fl_lightning.bench.cells_csv import read_cells, stored_cells
from fl_lightning.bench.readings import with_readings
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.table import write_tables

PAPERS = Path(__file__).resolve().parents[2] / "experiments" / "papers"
sys.path.insert(0, str(PAPERS / "programs"))

from make_results import changed, make, suite_of, text_of, write_tables_beside  # noqa: E402, found through the path above

SUITE = {
    "title": "A paper, Table 3",
    "base": {"model": {"lr": 0.1}, "trainer": {"max_rounds": 8}},
    "axes": {"method": {"FedAvg": {}, "FedProx": {"method": ["prox"]}}},
    "seeds": 3,
    "tables": [{"published": {"FedAvg": 60, "FedProx": 61}}],
}


@pytest.fixture
def papers(tmp_path):
    """A folder with a suite, of which two seeds were run on other terms than it says."""
    path = tmp_path / "paper" / "table3.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(SUITE))
    suite = load_suite(path)
    cells = suite.cells(0.125, [{"model": {"lr": 0.2}}], [0, 1])
    done = CellResult("", "", "done", values={0: 0.5, 1: 0.6}, seconds=1800.0, plan="p", machine="a CPU", scale=0.125)
    results = {
        cell.digest: replace(done, cell=cell.name, digest=cell.digest, metrics={"time/round": 7.0 + cell.seed})
        for cell in cells
    }
    write_tables(suite, cells, results, tmp_path / "results")
    return tmp_path


def test_a_part_says_what_was_run_and_what_we_conclude(papers):
    (papers / "results" / "paper-table3_scale0.125.md.j2").write_text("The ordering\nremains open.\n")
    text = make(papers)
    assert "## A paper, Table 3" in text
    assert "[`paper/table3.yaml`](paper/table3.yaml)" in text
    assert "- Seeds 0, 1 of the suite's 3 at scale 0.125 (rounds, local epochs and examples each times 0.50)" in text
    assert "- 4.0 hours of training in the rounds of the 4 finished cells" in text
    assert "- `model.lr`: `0.2` instead of the suite's `0.1`" in text
    assert text.count("instead of the suite's") == 1
    assert "4 cells: 4 done." in text
    assert "Run on a CPU." in text
    assert "| FedProx | **60.00 ± 0.00**† | 61.00 |" in text
    assert text.rstrip().endswith("### What we conclude\n\nThe ordering\nremains open.")


def test_the_tables_are_made_again_from_the_cells(papers):
    tables = {path: path.read_bytes() for path in (papers / "results").glob("*.table.*")}
    for path in tables:
        path.write_text("old")
    assert set(write_tables_beside(papers)) == set(tables) and len(tables) == 3
    assert {path: path.read_bytes() for path in tables} == tables


def test_conclusions_that_are_missing_are_missed(papers):
    assert make(papers).rstrip().endswith("Not written yet.")


QUOTED = """{% set at = stored("paper-table3_scale0.125") %}
{% set prox, avg = at(method="FedProx"), at(method="FedAvg") %}
{{ prox.mean | plain }} {{ avg.values | span(0) }} {{ prox.difference | signed(2) }} {{ prox.pairs }} {{ prox.verdict }}
{{ prox.deviation }} {{ prox.published }} {{ prox.gain_published }} {{ prox.needed }} {{ at.done }} {{ at.hours }}
{{ at("best", method="FedProx").mean | plain }} {{ at("last", k=2, method="FedAvg").mean | plain }}
{{ prox.difference | aside }} {{ -0.6 | side }} {{ paired(prox.values, avg.values).mean | signed }} {{ -0.01 | signed }}
{{ paired({0: 1.0, 1: 2.0}, {0: 0.0, 1: -1.0, 2: 5.0}) | span }} {{ avg.metric("time/round") | span }}
{{ at.each() | map(attribute="labels.method") | listed }} {{ [] | listed }} {{ prox.above + prox.below }}
{{ [2, -1] | span(0, True) }} {{ differences({0: 3.0, 1: 1.0}, {1: 2.0}) }}
"""


def test_a_text_quotes_the_stored_cells(papers):
    file = papers / "results" / "paper-table3_scale0.125.md.j2"
    file.write_text(QUOTED)
    lines = text_of(file, papers).splitlines()
    assert lines == [
        "60.0 60 to 60 0.00 2 undecided",
        "0.0 61.0 1.0 None 4 4.0",
        "60.0 55.0",
        "0.0 below 0.0 0.0",
        "-10.7 to +14.7 7.0 to 8.0",
        "FedAvg and FedProx none 0",
        "-1 to +2 {1: -1.0}",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{{ stored("paper-table4") }}', ["paper-table4"]),
        ('{{ stored("paper-table3_scale0.125")(method="FedUV") }}', ["FedUV"]),
        ('{{ stored("paper-table3_scale0.125")() }}', ["paper-table3", "one entry"]),
        ('{{ stored("paper-table3_scale0.125")(method="FedAvg").rate }}', ["rate"]),
        ("{{ rate }}", ["rate"]),
        ("{% if %}", ["quotes.py"]),
    ],
)
def test_a_text_that_quotes_what_is_not_there_is_refused(papers, text, words):
    file = papers / "results" / "claims.md.j2"
    file.write_text(text)
    with refused(*words):
        make(papers)


def test_cells_without_a_suite_are_refused(papers):
    (papers / "paper" / "table3.yaml").unlink()
    with refused("paper-table3"):
        make(papers)


def test_cells_of_readings_are_of_the_suite_that_has_them(papers):
    path = papers / "paper" / "table3.yaml"
    path.write_text(
        yaml.safe_dump({**SUITE, "open": {"margin": 2, "readings": {"E=1": {}, "E=5": {"trainer": {"e": 5}}}}})
    )
    suite = with_readings(load_suite(path))
    done = CellResult("", "", "done", values={0: 0.6}, plan="p", machine="a CPU")
    results = {cell.digest: replace(done, cell=cell.name, digest=cell.digest) for cell in suite.cells()}
    (papers / "results" / "paper-table3_scale0.125.cells.csv").unlink()
    write_tables(suite, suite.cells(), results, papers / "results")
    text = make(papers)
    assert "readings of what the source leaves open" in text
    assert "| E=5 | final | 2 of 2 | 1.00 | 1 of 1 | 1.00 | all |" in text
    file = papers / "results" / "claims.md.j2"
    quote = "{{ one.reading }} {{ one.within }}/{{ one.numbers }} {{ one.farthest_gain }} {{ one.ruled_out }}"
    file.write_text(f'{{% for one in stored("paper-table3-readings").fits %}}{quote}; {{% endfor %}}')
    assert text_of(file, papers) == "E=1 3/3 1.0 False; E=5 3/3 1.0 False; "


@pytest.mark.parametrize("file", sorted((PAPERS / "results").glob("*.cells.csv")), ids=lambda file: file.name)
def test_the_cells_of_the_papers_are_still_those_of_their_suites(file):
    suite = suite_of(file, PAPERS)
    stored = stored_cells(file, suite)
    assert [cell.digest for cell in stored] == list(read_cells(file))
    # the page says where the images came from
    assert set(changed(suite, stored)) <= {"data.class_path"}
