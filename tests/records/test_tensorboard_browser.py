"""TensorBoard's pages of three runs, one of them extended, as a browser shows them."""

import json
import re
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from helpers.pages import needs_browser, of_level, requests_but, shown
from helpers.runs import small_data, small_model, small_trainer

from fl_lightning.callbacks import SpectrumMonitor
from fl_lightning.callbacks.record import LAYOUT
from fl_lightning.methods import FedProx, FedUV

pytestmark = [needs_browser, pytest.mark.thorough]
METHODS = {"fedavg": [], "fedprox": [FedProx(0.1)], "feduv": [FedUV(0.5)]}
RUNS = {f"{name}/version_0" for name in METHODS}
SIZE = (1600, 4000)  # what is out of sight is not drawn
# ``every(selector, root)``: the elements below one that match, in shadow trees, too
EVERY = """const every = (selector, root) => [root.shadowRoot, root].flatMap(tree => tree ?
    [...tree.querySelectorAll("*")] : []).flatMap(one => [...(one.matches(selector) ? [one] : []),
    ...(one.shadowRoot ? every(selector, one.shadowRoot) : [])]);"""
CHARTS = """
const panels = every("tf-category-paginated-view", document).map(panel => ({
    name: panel.category.name, number: panel.category.items.length,
    charts: every("tf-custom-scalar-multi-line-chart-card", panel).map(card => ({
        title: card.title, lines: every("vz-line-chart2", card).flatMap(one => one._visibleSeriesCache || []),
        paths: every("path", card).filter(path => path.getAttribute("d")).length,
        busy: every("tf-line-chart-data-loader", card).some(one => one.dataLoading)}))}));
const drawn = panels.every(panel => panel.charts.length === panel.number
    && panel.charts.every(chart => chart.lines.length && chart.paths && !chart.busy));
return panels.length && drawn && {panels};"""
TABLE = """
const rows = every("vaadin-grid#sessionGroupsTable", document).flatMap(grid => every("tr", grid))
    .filter(row => !row.hidden).map(row => [...row.querySelectorAll("slot")].flatMap(slot => slot.assignedNodes())
        .map(cell => cell.textContent.trim().replace(/\\s+/g, " ")));
return rows.length > 1 && rows.every(row => row[0]) && {rows};"""


def train(root, name, **kwargs):
    """Train a small run; gives the metrics of its last round."""
    ckpt_path = kwargs.pop("ckpt_path", None)
    given = {"max_rounds": 2, "local_epochs": 2, "callbacks": [SpectrumMonitor()], "threads_per_worker": 1, **kwargs}
    trainer = small_trainer(root, logger=True, name=name, **given)
    trainer.fit(small_model(), small_data(), METHODS[name], ckpt_path=ckpt_path)
    return trainer.metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the runs, and the last metrics of each."""
    root = tmp_path_factory.mktemp("runs")
    last = {name: train(root, name) for name in METHODS}
    return root, {**last, "fedavg": train(root, "fedavg", ckpt_path="last", max_rounds=3)}


@pytest.fixture(scope="module")
def board(runs, tmp_path_factory):
    """The address of a TensorBoard that has read the runs."""
    log = tmp_path_factory.mktemp("board") / "log"
    args = [sys.executable, "-m", "tensorboard.main", "--logdir", runs[0], "--host", "127.0.0.1", "--port", "0"]
    with log.open("w") as file, subprocess.Popen(args, stdout=file, stderr=file) as process:
        try:
            yield wait_for(lambda: ready(log.read_text(), process))
        finally:
            process.terminate()


def wait_for(answer, seconds=240):
    """What a function answers as soon as that is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := answer():
            return found
        time.sleep(0.2)
    raise AssertionError("no answer in time")


def ready(log, process):
    """The address that TensorBoard's log names, once it has rows of all runs, which are the last that runs write."""
    if process.poll() is not None:
        pytest.skip(f"TensorBoard does not start here: {log.splitlines()[-1:]}")
    address = re.search(r"http://[\d.]+:\d+/", log)
    return address and len(rows_of(address[0])) == len(RUNS) and address[0]


def rows_of(address):
    asked = {"startIndex": 0, "sliceSize": 9, "allowedStatuses": ["STATUS_SUCCESS"]}
    url, head = f"{address}data/plugin/hparams/session_groups", {"Content-Type": "application/json"}
    try:
        with urlopen(Request(url, json.dumps(asked).encode(), head)) as answer:
            return json.load(answer).get("sessionGroups", [])
    except (URLError, ConnectionError):
        return []


def look(board, page, script):
    """What a script finds on a page of TensorBoard that has no error and asks no other machine for anything."""
    # what is the same twice is complete
    whole = f"""(() => {{ {EVERY} const found = (() => {{ {script} }})(), before = window.before;
        window.before = found && JSON.stringify(found); return before === window.before && before; }})()"""
    found = shown(f"{board}#{page}", SIZE, whole)
    assert of_level(found, "error") == []  # warnings are TensorBoard's own, of its elements and of columns of texts
    assert requests_but(found, board) == []
    return found


def test_each_panel_has_its_charts_and_each_chart_its_runs(board):
    panels = look(board, "custom_scalars", CHARTS)["panels"]
    assert [panel["name"] for panel in panels] == list(LAYOUT)
    lines = {chart["title"]: chart["lines"] for panel in panels for chart in panel["charts"]}
    titles = {title for charts in LAYOUT.values() for title in charts if not title.startswith("validation")}
    assert lines.keys() == titles
    runs = {title: [line.split(" (")[1].rstrip(")") for line in one] for title, one in lines.items()}
    assert set(runs["penalties"]) == RUNS - {"fedavg/version_0"}
    assert all(set(one) == RUNS for title, one in runs.items() if title != "penalties")
    # a colour is a run: but for the penalties and the phases of a round, a run has one line in a chart
    assert all(
        len(one) == len(RUNS) for title, one in runs.items() if title not in ("penalties", "seconds of its phases")
    )


def test_the_table_has_a_row_for_each_run_with_what_tells_runs_apart(board, runs):
    header, *rows = look(board, "hparams", TABLE)["rows"]
    hparams = ["coefficients", "methods", "trainer/local_epochs", "trainer/local_steps", "trainer/participation"]
    metrics = ["test/accuracy", "test/loss", "round", "train/accuracy", "train/loss"]
    assert [name for name in header if "/" in name or name.islower()] == [*hparams, *metrics]
    table = {row[0]: dict(zip(header, row, strict=False)) for row in rows}  # below the last a row has a button
    assert table.keys() == RUNS and len(rows) == len(RUNS)
    for name, last in runs[1].items():
        row = table[f"{name}/version_0"]
        assert row["methods"] == name
        assert [float(row[tag]) for tag in metrics] == pytest.approx([last[tag] for tag in metrics], rel=1e-4)
    assert table["fedprox/version_0"]["coefficients"] == "mu=0.1"
    assert float(table["fedavg/version_0"]["round"]) == 2  # it was extended by a round
