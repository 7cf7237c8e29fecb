"""Every config is parsed, every smoke config is run."""

import inspect
import sys
from pathlib import Path

import pytest
import yaml

from fl_lightning import methods, optim
from fl_lightning.cli import main

ROOT = Path(__file__).resolve().parent.parent
SMOKE = sorted((ROOT / "experiments" / "smoke").glob("*.yaml"))
# what a fragment of a folder needs beside it to be a whole config
BASE = {
    "data": ["models/feduvcnn"],
    "models": ["data/digits"],
    "methods": ["data/digits", "models/feduvcnn"],
    "protocols": ["data/npy_images", "models/feduvcnn"],
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, one_parser, undrawn):
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    monkeypatch.chdir(ROOT)


def all_configs():
    """All but suites and the fragments of which they are made, which tests/bench/test_suites.py parses."""
    paths = [path.relative_to(ROOT / "experiments") for path in sorted((ROOT / "experiments").rglob("*.yaml"))]
    return [path for path in paths if path.parts[0] != "papers" and path.name != "suite.yaml"]


# a suite is no config, its cells are
@pytest.mark.parametrize("path", [path for path in all_configs() if path.name != "suite.yaml"], ids=str)
def test_every_config_is_parsed(path, capsys):
    parts = [ROOT / "experiments" / f"{part}.yaml" for part in BASE.get(path.parts[0], [])]
    with pytest.raises(SystemExit) as ended:
        main(["fit", *(f"--config={part}" for part in [*parts, ROOT / "experiments" / path]), "--print_config"])
    assert ended.value.code == 0


@pytest.mark.parametrize("folder", ["smoke", "methods"])
def test_every_method_and_server_optimizer_has_a_config(folder):
    names = {path.stem for path in (ROOT / "experiments" / folder).glob("*.yaml")}
    assert names >= {name.lower() for name in [*methods.__all__, *optim.__all__]}


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "methods").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_fragment_spells_out_every_argument(path):
    """Else a file before it, whose list it replaces or extends, would shine through."""
    found = yaml.safe_load(path.read_text())
    given = [*found.get("method+", []), *filter(None, [found.get("trainer", {}).get("server_optimizer")])]
    assert given
    for part in given:
        kind = getattr(methods, part["class_path"], None) or getattr(optim, part["class_path"])
        wanted = set(inspect.signature(kind).parameters) - {"params"}
        assert set(part.get("init_args", {})) == wanted


OFFLINE = sorted(path for path in (ROOT / "experiments" / "data").glob("*.yaml") if "root: data" in path.read_text())


@pytest.mark.parametrize("path", OFFLINE, ids=lambda path: path.stem)
def test_every_data_set_runs_on_its_offline_data(path, tmp_path, capsys):
    model = ROOT / "experiments" / "models" / "feduvcnn_small_grey.yaml" if "mnist" in path.stem else None
    configs = [path, model or ROOT / "experiments" / "models" / "feduvcnn_small.yaml"]
    classes = {"cifar100": 100, "tiny_imagenet": 200, "image_folder": 12, "office_home": 65, "femnist": 62}
    options = {
        "data.offline": "true",
        "data.partitioner.init_args.min_size": "2",
        "data.test_size": "30",
        "model.num_classes": str(max(classes.get(path.stem, 10), 10)),
        "trainer.max_rounds": "1",
        "trainer.default_root_dir": str(tmp_path),
    }
    if path.stem == "office_home":
        options["data.train_size"] = "130"
    if "Dirichlet" not in path.read_text():
        del options["data.partitioner.init_args.min_size"]
    main(["fit", *(f"--config={config}" for config in configs), *(f"--{k}={v}" for k, v in options.items())])
    assert "1 round, test/accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("path", SMOKE, ids=lambda path: path.stem)
def test_every_smoke_config_runs_and_learns(path, tmp_path, capsys):
    main(["fit", f"--config={path}", f"--trainer.default_root_dir={tmp_path}"])
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert float(said.split("test/accuracy ")[1].split(" %")[0]) > 30
