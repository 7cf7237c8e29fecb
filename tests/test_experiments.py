"""Every config is parsed, every smoke config is run."""

import sys
from pathlib import Path

import pytest

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


def test_there_are_the_smoke_configs_of_every_method():
    names = {path.stem for path in SMOKE}
    assert names >= {"fedavg", "fedprox", "fedlc", "fedcka", "feduv", "feddecorr", "fedprox_feddecorr"}


@pytest.mark.parametrize("path", SMOKE, ids=lambda path: path.stem)
def test_every_smoke_config_runs_and_learns(path, tmp_path, capsys):
    main(["fit", f"--config={path}", f"--trainer.default_root_dir={tmp_path}"])
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert float(said.split("test/accuracy ")[1].split(",")[0]) > 0.3
