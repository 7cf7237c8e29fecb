"""The guides to data and partitioners of your own run; what such code gives that cannot be used is refused."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import refused, warned
from helpers.runs import fitted, small_data
from helpers.tiny import TinyModule
from torch import nn

from fl_lightning import Partitioned
from fl_lightning.cli import main
from fl_lightning.data import IID, Partitioner, Plan

DOCS = Path(__file__).parents[2] / "docs"
GUIDE, OF_PARTITIONERS = ((DOCS / f"own_{name}.md").read_text() for name in ("data", "partitioner"))
SOURCE = "\n\n".join(re.findall(r"```python\n(.*?)```", GUIDE + OF_PARTITIONERS, re.DOTALL))
CODE = {}
exec(SOURCE, CODE)


class Small(TinyModule):
    """For the 6 columns of the guide's examples."""

    def build(self):
        self.body = nn.Linear(6, 6)


@pytest.mark.parametrize(
    "data",
    [lambda: Partitioned(CODE["Hospitals"](), CODE["RangeAndShare"](0.3), num_clients=3), lambda: CODE["Sensors"]()],
)
def test_the_code_of_the_guide_trains(tmp_path, data, undrawn):
    trained = data()
    assert fitted(tmp_path, data=trained, model=Small(), max_rounds=1).metrics["clients"] == trained.num_clients


@pytest.mark.thorough
def test_the_config_and_the_commands_of_the_guides_run(tmp_path, monkeypatch, capsys, undrawn, one_parser):
    (tmp_path / "my_data.py").write_text(SOURCE)
    (tmp_path / "experiments").symlink_to(DOCS.parent / "experiments")
    config, of_sensors = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "hospitals.yaml").write_text(config)
    (tmp_path / "sensors.yaml").write_text(of_sensors)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    commands = re.findall(r"^python cli\.py (.*)$", GUIDE + OF_PARTITIONERS, re.MULTILINE)
    again = " ".join(re.search(r"`python cli\.py (test\s[^`]*)`", GUIDE)[1].split())
    for command in [*commands[:2], again, *commands[2:], "fit --config hospitals.yaml --config sensors.yaml"]:
        few = ["--trainer.max_rounds", "1"] if command.startswith("fit") else []
        main([*shlex.split(command), *few])
    said = capsys.readouterr()
    table = re.search(r"```text\n(domain.*?)\n", GUIDE, re.DOTALL)[1]
    assert said.err.count(table) == 2
    dealt = re.search(r"```text\n(client.*?)```", OF_PARTITIONERS, re.DOTALL)[1]
    assert dealt in said.out


def test_the_partitioner_of_the_guide_holds_ranges_of_classes_and_shares():
    labels = np.arange(1000) % 10
    plan = Plan(CODE["RangeAndShare"](0.0)(labels, 5, np.random.default_rng(0)), labels, 10)
    assert ((plan.label_counts > 0).sum(1) == 2).all()
    plan = Plan(CODE["RangeAndShare"](1.0)(labels, 5, np.random.default_rng(0)), labels, 10)
    assert (plan.label_counts > 0).all()
    with refused("RangeAndShare.share=2"):
        CODE["RangeAndShare"](2)


class Deals(Partitioner):
    """Deals the samples out evenly, and changes what it returns."""

    def __init__(self, change):
        self.change = change

    def __call__(self, labels, num_clients, rng):
        return self.change(IID()(labels, num_clients, rng))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: None, ("Deals", "4 arrays")),
        (lambda parts: parts[:3], ("Deals", "4 arrays")),
        (lambda parts: [part * 1.0 for part in parts], ("Deals", "4 arrays")),
        (lambda parts: [np.isin(np.arange(400), part) for part in parts], ("Deals", "4 arrays")),
        (lambda parts: [parts[1], *parts[1:]], ("exactly one client",)),
        (lambda parts: [parts[0] - 1000, *parts[1:]], ("exactly one client",)),
    ],
)
def test_what_is_no_partition_is_refused(change, words):
    with refused("data.partitioner", *words):
        small_data(partitioner=Deals(change)).setup()


def test_an_empty_client_is_named(tmp_path, undrawn):
    def move(parts):
        return [np.concatenate(parts[:2]), parts[1][:0], *parts[2:]]

    with warned("data: 1 of 4 clients (1)", "min_size"):
        fitted(tmp_path, data=small_data(partitioner=Deals(move)), max_rounds=1)


def test_a_loader_that_an_empty_client_breaks_is_refused_before_anything_is_written(tmp_path):
    class Empty(CODE["Sensors"]):
        def setup(self, stage):
            super().setup(stage)
            self.plan = Plan([np.arange(120), *[np.arange(0)] * 3])

    with refused("train_dataloader(1)"):
        fitted(tmp_path, data=Empty(), model=Small(), max_rounds=1)
    assert not list(tmp_path.iterdir())
