"""Every suite under experiments/: its cells are valid configs, and their networks take their data.

A parser takes 0.1 s for a config and there are more than a thousand. The sections of a config (``model``, ``data``,
``trainer``, ``method``) are parsed independently of each other. So each section is parsed once, with new ones of the
other kinds, whichever cells they are from; one cell of each suite is parsed as it is.
"""

import json
import re
from collections import ChainMap
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from helpers.tiers import sample
from jsonargparse import Namespace

from fl_lightning.bench.suite_file import load_suite
from fl_lightning.cli.cli import FederatedCLI
from fl_lightning.cli.config_checks import check_resolved
from fl_lightning.data import Digits, ImageDataModule
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.utilities.errors import UsageError

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
PATHS = sorted(path for path in EXPERIMENTS.rglob("*.yaml") if re.search(r"^axes:", path.read_text(), re.M))
SUITES = {f"{path.parent.name}/{path.stem}": path for path in PATHS}
# one of each kind: images with published numbers, synthetic data, a method of one's own
KINDS = ("feduv/table1", "fedlc/table4", "own_method/suite")
SECTIONS = ("model", "data", "trainer", "method")
# arguments of a data module that say which images of a data set are whose, not what an image is
OF_CLIENTS = ("partitioner", "train_size", "test_size", "val_fraction", "drop_last", "num_clients", "batch_size")


@pytest.fixture(autouse=True)
def _path_of_own_classes(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS / "own_method")


@cache
def fit_parser():
    """The parser of ``fit``, built once."""

    class Parsers(FederatedCLI):
        def parse_arguments(self, parser, args):
            self.found = self._subcommand_parsers["fit"]
            raise KeyboardInterrupt

    program = Parsers.__new__(Parsers)
    with pytest.raises(KeyboardInterrupt):
        program.__init__([])
    return program.found


def parsed(fragments):
    """The config of some fragments, as ``fit`` reads it from several ``--config``."""
    config = fit_parser().parse_args([f"--config={json.dumps(fragment)}" for fragment in fragments if fragment])
    check_resolved(config)
    return config


def built(**sections):
    """Some sections of a config, as the objects that they describe."""
    return fit_parser().instantiate(Namespace(**sections))


@cache
def suite_of(name):
    return load_suite(SUITES[name])


@cache
def cells_of(name):
    """One cell for each combination of labels."""
    return [suite_of(name).cell(labels, 0) for labels in suite_of(name).combinations()]


def sections_of(cell):
    """What each section of a config is merged from."""

    def of(section):
        parts = ({key: value for key, value in part.items() if key.rstrip("+") == section} for part in cell.fragments)
        return json.dumps([part for part in parts if part])

    return {section: of(section) for section in SECTIONS}


CONFIGS: dict[tuple[str, str], object] = {}
# what a config cannot lack, where no section of this kind is new
LEAST = {
    "model": json.dumps([{"model": {"class_path": "ImageClassifier", "init_args": {"encoder": "Logistic"}}}]),
    "data": json.dumps([{"data": "Digits"}]),
}


def parse_sections(new):
    """Parse sections, at most one of a kind."""
    parts = [json.loads(text) for text in {**LEAST, **new}.values()]
    try:
        config = parsed([dict(ChainMap(*some)) for some in zip_longest(*parts, fillvalue={})])
    except UsageError as error:
        raise AssertionError(f"{error}, in {new}") from error
    CONFIGS.update({(section, text): config[section] for section, text in new.items()})


@cache
def configs_of(name):
    """The config of each cell, by section."""
    cells, sections = cells_of(name), [sections_of(cell) for cell in cells_of(name)]
    of_kind = ([(one, text) for text in dict.fromkeys(some[one] for some in sections)] for one in SECTIONS)
    new = [[pair for pair in pairs if pair not in CONFIGS] for pairs in of_kind]
    for together in zip_longest(*new):
        parse_sections(dict(filter(None, together)))
    return [(cell, {k: CONFIGS[k, v] for k, v in some.items()}) for cell, some in zip(cells, sections, strict=True)]


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_has_distinct_cells_and_published_numbers_of_them(name):
    suite, cells = suite_of(name), cells_of(name)
    assert cells and len({cell.name for cell in cells}) == len(cells)
    assert suite.title and suite.tables
    keys = {*SECTIONS, "seed_everything", "weights"}
    assert not any(key.rstrip("+") not in keys for cell in cells for key in cell.config)
    assert any(suite.baseline.items() <= cell.labels.items() for cell in cells)
    for table in suite.tables:
        axes = (*table.rows, *table.columns)
        assert set(table.published) <= {tuple(cell.labels[axis] for axis in axes) for cell in cells}
        assert not table.published or (suite.source and table.page and table.caption)


@pytest.mark.parametrize("name", sample(SUITES, *KINDS))
def test_every_cell_is_a_valid_config_that_can_be_scaled(name):
    assert len(configs_of(name)) == len(cells_of(name))
    whole, config = configs_of(name)[-1]
    less = parsed(suite_of(name).cell(whole.labels, 0, scale=0.001).fragments)
    assert less.trainer.max_rounds == max(1, round(0.1 * config["trainer"].max_rounds))
    if "train_size" in whole.config["data"]["init_args"]:
        data = config["data"].init_args
        batches = min(data.batch_size * data.num_clients, data.train_size or 0)  # the largest client keeps one
        assert less.data.init_args.train_size in (0.1, max(batches, round(0.1 * (data.train_size or 0))))


@pytest.mark.parametrize("name", sample(SUITES, *KINDS))
def test_everything_can_be_built_and_the_networks_take_the_data(name):
    for cell, config in configs_of(name):
        make_once("method", config["method"])
        data = make_once("data", config["data"])
        make_once("trainer", config["trainer"])
        # else --scale would train on all images; of the digits there are 1,797, which any scale may take
        if isinstance(data, ImageDataModule) and not isinstance(data, Digits):
            assert "train_size" in cell.config["data"]["init_args"]
        x, classes = example_of(config["data"])
        outputs = outputs_of(network_of(config["model"]), x)
        assert outputs == (len(x), classes), f"{cell.name}: inputs {tuple(x.shape)}"


MADE: dict[str, object] = {}


def make_once(name, section):
    key = f"{name} {section}"
    if key not in MADE:
        made = built(**{name: section})[name]
        MADE[key] = FederatedTrainer(**made) if name == "trainer" else made
    return MADE[key]


@cache
def outputs_of(network, x):
    """The shape of a network's outputs."""
    with torch.no_grad():
        return network(x.to("meta")).shape


def network_of(section):
    """The network of a section, on the meta device, with its optimizer."""
    key = f"model {section}"
    if key not in MADE:
        with torch.device("meta"):
            MADE[key] = built(model=section).model.eval()
        assert MADE[key].configure_optimizers()
    return MADE[key]


def example_of(section):
    """A batch of inputs, and the number of classes, of a section's data set; it needs no files."""
    given = {key: value for key, value in vars(section.init_args).items() if key not in OF_CLIENTS}
    key = f"{section.class_path} {given}"
    if key not in MADE:
        given |= {"offline": True} if "offline" in given else {"largest": 99} if "largest" in given else {}
        init_args = Namespace(**given, num_clients=2, batch_size=4)
        data = built(data=Namespace(class_path=section.class_path, init_args=init_args)).data
        data.setup()
        x, _ = next(iter(data.train_dataloader(0)))
        MADE[key] = x[:2], data.num_classes
    return MADE[key]
