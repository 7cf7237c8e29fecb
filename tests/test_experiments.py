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
def _alone(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    monkeypatch.chdir(ROOT)


def all_configs():
    return [path.relative_to(ROOT / "experiments") for path in sorted((ROOT / "experiments").rglob("*.yaml"))]


@pytest.mark.parametrize("path", all_configs(), ids=str)
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


@pytest.mark.parametrize("path", SMOKE, ids=lambda path: path.stem)
def test_every_smoke_config_runs_and_learns(path, tmp_path, capsys):
    main(["fit", f"--config={path}", f"--trainer.default_root_dir={tmp_path}"])
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert float(said.split("test/accuracy ")[1].split(",")[0]) > 0.3
