"""The pages of results are made of the stored cells."""

import sys
from pathlib import Path

import pytest
import yaml
from helpers.benches import result, save, stored
from helpers.errors import refused

from fl_lightning.bench import load_suite

PAPERS = Path(__file__).resolve().parents[2] / "experiments" / "papers"
sys.path.insert(0, str(PAPERS / "programs"))

from make_results import changed, pages, suite_of, text_of  # noqa: E402, found through the path above
from quotes import Stored, outcome  # noqa: E402

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
    suite = suite_in(tmp_path)
    cells = suite.cells(0.125, [{"model": {"lr": 0.2}}], [0, 1])
    told = {"seconds": 1800.0, "machine": "a CPU"}
    results = {cell.digest: result(cell, [0.5, 0.6], metrics={"time/round": 7.0 + cell.seed}, **told) for cell in cells}
    save(suite, cells, results, tmp_path / "results")
    return tmp_path


def page_of(papers, name="paper-table3_scale0.125"):
    """The page of a file of cells."""
    return dict(pages(papers))[papers / "results" / f"{name}.md"]


def suite_in(folder, **keys):
    path = folder / "paper" / "table3.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({**SUITE, **keys}))
    return load_suite(path)


def test_every_suite_has_its_tables_as_csv(papers):
    texts = {file.name: text for file, text in pages(papers)}
    stored = (papers / "results" / "paper-table3_scale0.125.table.csv").read_text()
    assert texts["paper-table3_scale0.125.table.csv"] == stored and len(texts) == 2


@pytest.mark.parametrize(
    ("published", "gains", "word"),
    [
        ((60, 61), {0: 1.0, 1: 1.1, 2: 1.2}, "reproduced"),
        ((60, 59), {0: 1.0, 1: 1.1, 2: 1.2}, "reversed"),
        ((60, 61), {0: 1.0, 1: -1.1, 2: 1.2}, "undecided"),
        ((63.5, 64.5), {0: 1.0, 1: 1.1, 2: 1.2}, "untested"),
    ],
)
def test_a_claim_is_untested_where_the_baseline_is_far_from_the_published_one(tmp_path, published, gains, word):
    both = dict(zip(("FedAvg", "FedProx"), published, strict=True))
    suite = suite_in(tmp_path, tables=[{"show": "last", "k": 1}, {"show": "final", "published": both}])
    values = {"FedAvg": dict.fromkeys(gains, 0.6), "FedProx": {seed: 0.6 + gain / 100 for seed, gain in gains.items()}}
    cells = suite.cells()
    results = {cell.digest: result(cell, [values[cell.labels["method"]][cell.seed]]) for cell in cells}
    at = Stored(suite, cells, results)
    assert outcome(at(method="FedProx"), at("final", method="FedProx"), at("final", method="FedAvg")) == word


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
    (papers / "pages").mkdir()
    (papers / "pages" / "RESULTS.md.j2").write_text(text)
    with refused(*words):
        dict(pages(papers))


def test_cells_without_a_suite_are_refused(papers):
    (papers / "paper" / "table3.yaml").unlink()
    with refused("paper-table3"):
        dict(pages(papers))


def test_a_suite_of_readings_has_their_fits_above_its_tables(papers):
    axes = {**SUITE["axes"], "reading": {"E=1": {}, "E=5": {"trainer": {"e": 5}}}}
    published = {reading: {"FedAvg": 60, "FedProx": 61} for reading in axes["reading"]}
    suite = suite_in(papers, axes=axes, tables=[{"rows": ["reading", "method"], "published": published}])
    results = {cell.digest: result(cell, [0.6], plan="p") for cell in suite.cells()}
    (papers / "results" / "paper-table3_scale0.125.cells.csv").unlink()
    save(suite, suite.cells(), results, papers / "results")
    above, _, tables = page_of(papers, "paper-table3").partition("## ")
    assert "| E=5 | final | 2 of 2 | 1.00 | 1 of 1 | 1.00 | all |" in above and "| E=5 | FedProx | " in tables
    file = papers / "results" / "claims.md.j2"
    quote = "{{ fit.reading }} {{ fit.within }}/{{ fit.numbers }} {{ fit.farthest_gain }} {{ fit.ruled_out }}"
    file.write_text(f'{{% for fit in stored("paper-table3").fits %}}{quote}; {{% endfor %}}')
    assert text_of(file, papers) == "E=1 3/3 1.0 False; E=5 3/3 1.0 False; "


@pytest.mark.parametrize("file", sorted((PAPERS / "results").glob("*.cells.csv")), ids=lambda file: file.name)
def test_the_stored_cells_of_the_papers_are_those_of_their_suites(file):
    suite = suite_of(file, PAPERS)
    cells, results = stored(file, suite)
    assert [cell.digest for cell in cells] == list(results)
    # the page says where the images came from, and which file had the weights
    assert set(changed(suite, cells)) <= {"data.class_path", "weights"}
