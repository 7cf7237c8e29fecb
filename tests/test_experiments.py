"""All configs are parsed, and all smoke configs are run."""

import inspect
from pathlib import Path

import pytest
import yaml
from helpers.tiers import sample

from fl_lightning import methods, optim
from fl_lightning.cli import main

CONFIGS = Path(__file__).resolve().parent.parent / "experiments"
# what a fragment of a folder needs beside it to be a whole config
BASE = {
    "data": ["models/feduvcnn"],
    "models": ["data/digits"],
    "methods": ["data/digits", "models/feduvcnn"],
    "protocols": ["data/npy_images", "models/feduvcnn"],
    "own_method": [],
}
# methods of one optimizer step, of two workers, of two terms, of models of the clients' own, and what is no method
SMOKE = ("fedavgm", "two_workers", "moon_feddecorr", "fedproto", "recalibrate", "stragglers")


@pytest.fixture(autouse=True)
def _alone(monkeypatch, one_parser, undrawn):
    monkeypatch.chdir(CONFIGS.parent)


def names_in(folder):
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml") if path.name != "suite.yaml")


CASES = [(folder, name) for folder in BASE for name in names_in(folder)]


@pytest.mark.parametrize("case", sample(CASES, *((folder, names_in(folder)[0]) for folder in BASE)), ids="/".join)
def test_a_config_is_parsed(case):
    folder, name = case
    parts = [*BASE[folder], f"{folder}/{name}"]
    with pytest.raises(SystemExit) as ended:
        main(["fit", *(f"--config={CONFIGS / part}.yaml" for part in parts), "--print_config"])
    assert ended.value.code == 0


def test_every_folder_of_configs_is_known():
    """Suites, and the fragments of which they are made, are parsed by tests/bench/test_suites.py."""
    folders = {path.relative_to(CONFIGS).parts[0] for path in CONFIGS.rglob("*.yaml") if path.name != "suite.yaml"}
    assert folders == {*BASE, "smoke", "papers", "leaderboard"}


@pytest.mark.parametrize("folder", ["smoke", "methods"])
def test_every_method_and_server_optimizer_has_a_config(folder):
    assert {*names_in(folder)} >= {name.lower() for name in [*methods.__all__, *optim.__all__]}


def test_a_fragment_spells_out_every_argument():
    """Else a file before it, whose list it replaces or extends, would shine through."""
    for name in names_in("methods"):
        found = yaml.safe_load((CONFIGS / f"methods/{name}.yaml").read_text())
        given = [*found.get("method+", []), *filter(None, [found.get("trainer", {}).get("server_optimizer")])]
        assert given, name
        for part in given:
            kind = getattr(methods, part["class_path"], None) or getattr(optim, part["class_path"])
            assert set(part.get("init_args", {})) == set(inspect.signature(kind).parameters) - {"params"}, name


OFFLINE = [name for name in names_in("data") if "root: data" in (CONFIGS / f"data/{name}.yaml").read_text()]


@pytest.mark.parametrize("name", sample(OFFLINE, "cifar10"))
def test_every_data_set_runs_on_its_offline_data(name, tmp_path, capsys):
    data, grey = CONFIGS / f"data/{name}.yaml", "_grey" if "mnist" in name else ""
    classes = {"cifar100": 100, "tiny_imagenet": 200, "image_folder": 12, "office_home": 65, "femnist": 62}
    options = {
        "config": CONFIGS / f"models/feduvcnn_small{grey}.yaml",
        "data.offline": "true",
        "data.test_size": "30",
        "model.num_classes": classes.get(name, 10),
        "trainer.max_rounds": "1",
        "trainer.default_root_dir": tmp_path,
    }
    if name == "office_home":
        options["data.train_size"] = "130"
    if "Dirichlet" in data.read_text():
        options["data.partitioner.init_args.min_size"] = "2"
    main(["fit", f"--config={data}", *(f"--{key}={value}" for key, value in options.items())])
    assert "1 round, test/accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("name", sample(names_in("smoke"), *SMOKE))
def test_every_smoke_config_runs_and_learns(name, tmp_path, capsys):
    main(["fit", f"--config={CONFIGS}/smoke/{name}.yaml", f"--trainer.default_root_dir={tmp_path}"])
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert float(said.split("test/accuracy ")[1].split(" %")[0]) > 30
