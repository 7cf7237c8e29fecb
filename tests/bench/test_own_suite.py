"""The suite of the guide runs, its tables come with it, and what it tunes is a config."""

import csv
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from helpers.benches import stored, train

from fl_lightning.bench import Suite, Table, load_suite
from fl_lightning.bench.shows import SHOWS
from fl_lightning.bench.tuner import TuningSpec
from fl_lightning.cli import main
from fl_lightning.cli.bench import bench_parser

pytest_plugins = ["helpers.bench_fixtures"]

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "experiments" / "own_method" / "suite.yaml"
GUIDE = (ROOT / "docs" / "bench.md").read_text()
# a round of two clients
SHORT = {
    "trainer": {"max_rounds": 1, "local_epochs": 1},
    "data": {"init_args": {"num_clients": 2, "train_size": 100, "test_size": 200}},
}


@pytest.fixture
def short(tmp_path, monkeypatch, one_parser, undrawn):
    """Arguments by which the suite's runs are short."""
    monkeypatch.syspath_prepend(str(SUITE.parent))
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(SHORT))
    return [SUITE, "--config", tmp_path / "short.yaml"]


def test_the_first_suite_of_the_guide_is_valid_with_the_method_of_its_guide(bench, tmp_path, one_parser):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "own_method.md").read_text(), re.DOTALL)[1]
    (tmp_path / "my_method.py").write_text(code)
    (tmp_path / "my_suite.yaml").write_text(re.search(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)[1])
    ended = bench("my_suite.yaml", "--dry-run")
    assert ended.status == 0 and "30 cells, 0 done" in ended.out


def test_the_guide_names_all_keys_arguments_and_files():
    kinds = (Suite, Table, TuningSpec, *SHOWS.values())
    words = {field.name for kind in kinds for field in fields(kind)} - {"path", "summary"}
    parsers = [bench_parser(name) for name in ("bench", "tune")]
    options = {text for parser in parsers for action in parser._actions for text in action.option_strings}
    for word in [*words, *SHOWS, *options - {"-h", "--help"}]:
        assert re.search(rf"(?<![\w-]){word}(?![\w-])", GUIDE), word


def test_it_runs_and_its_tables_come_with_it(bench, short, tmp_path):
    only = ["--only", "alpha=0.1,method=FedAvg", "alpha=0.1,method=ClippedChange"]
    ended = bench(*short, "--seeds", 1, *only, "--output", "out", "--save", "saved", answer=train)
    assert ended.status == 0 and "2 cells: 2 done." in ended.out and "| ClippedChange | 0.1 |" in ended.out
    files = [f"own_method-suite.{end}" for end in ("cells.csv", "table.csv", "table.md", "table.tex")]
    assert sorted(one.name for one in (tmp_path / "saved").iterdir()) == files
    # the files hold the whole suite, whatever part of it was asked for
    _, results = stored(tmp_path / "out" / files[0], load_suite(SUITE))
    done = [one for one in results.values() if one.state == "done"]
    assert len(done) == 2 < len(results) and len({one.plan for one in done}) == 1
    with (tmp_path / "saved" / files[1]).open() as file:
        means = {(one["table"], one["method"]): float(one["mean"]) for one in csv.DictReader(file) if one["mean"]}
    # the first round of this method is FedAvg
    assert means["1", "FedAvg"] == means["1", "ClippedChange"] and "| FedAvg | **1.50** |" in ended.out


def test_what_is_tuned_is_a_config_of_fit(tune, short, tmp_path, capsys):
    ended = tune(*short, "--only", "method=ClippedChange", "--trials", 2, "--output", "out", answer=train)
    assert ended.status == 0 and "(2 of 2)" in ended.out
    tuned = tmp_path / "out" / "tuned" / "ClippedChange.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["fit", f"--config={SUITE.parent / 'clipped_change.yaml'}", f"--config={tuned}", "--print_config"])
    assert ended.value.code == 0
    (method,) = yaml.safe_load(capsys.readouterr().out)["method"]
    assert method["class_path"].endswith("ClippedChange") and method["init_args"]["factor"] in (0.5, 0.8)
