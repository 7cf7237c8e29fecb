"""Configs that the package carries, and the wheel that has them."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.errors import assert_names

from fl_lightning.bench import load_suite
from fl_lightning.cli import main
from fl_lightning.utilities.bundled_configs import named_configs, packaged_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path, one_parser):
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    monkeypatch.chdir(tmp_path)


def test_a_config_has_the_same_name_with_and_without_its_ending():
    names = ("smoke/feduv", "smoke/feduv.yaml", "experiments/smoke/feduv.yaml")
    assert {packaged_config(name) for name in names} == {ROOT / "experiments/smoke/feduv.yaml"}
    assert packaged_config("smoke/nothing") is packaged_config("feduv") is packaged_config("papers/x") is None
    names = ("feduv/table1", "papers/feduv/table1", "experiments/papers/feduv/table1.yaml")
    assert {packaged_config(name) for name in names} == {ROOT / "experiments/papers/feduv/table1.yaml"}


def test_bench_takes_the_name_of_a_suite_and_fit_does_not(capsys):
    main(["bench", "feduv/table1", "--status"])
    assert "FedUV, Table 1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "feduv/tabel1"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert_names(line, "SUITE='feduv/tabel1'")
    assert "feduv/table1" in line
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", "feduv/table1"])
    assert "bench" in capsys.readouterr().err


def test_a_run_begins_with_a_name_and_a_file_of_that_name_comes_first(capsys, tmp_path):
    (tmp_path / "smoke/fedavg.yaml").mkdir(parents=True)  # a folder does not
    given = ["fit", "--config", "smoke/fedavg.yaml", "--print_config"]
    with pytest.raises(SystemExit, match="0"):
        main(given)
    assert "FedUV\n" not in capsys.readouterr().out
    (tmp_path / "smoke/fedavg.yaml").rmdir()
    shutil.copy(ROOT / "experiments/smoke/feduv.yaml", tmp_path / "smoke/fedavg.yaml")
    with pytest.raises(SystemExit, match="0"):
        main(given)
    assert "FedUV\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "listed"),
    [("smoke/fedup", "smoke/feduv"), ("experiments/data/digit.yaml", "data/digits"), ("fedprx", "smoke/fedprox")],
)
def test_a_name_that_there_is_not_is_refused_with_some_that_there_are(capsys, name, listed):
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", name])
    line = capsys.readouterr().err.splitlines()[-1]
    assert_names(line, f"config={name!r}")
    assert listed in line and line.endswith("experiments")
    assert len(line) < 300


@pytest.mark.thorough
def test_a_wheel_holds_the_configs_and_its_program_finds_them(tmp_path):
    for name in ("fl_lightning", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    build = [sys.executable, "-m", "pip", "wheel", "./source", "--no-deps", "--no-build-isolation", "-q", "-w", "."]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    if built.returncode and "invalid command" in built.stderr + built.stdout:
        pytest.skip(f"setuptools cannot build a wheel here: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if name.endswith(".yaml")}
        archive.extractall(tmp_path / "site")
    assert carried == {
        f"fl_lightning/configs/{path.relative_to(ROOT / 'experiments')}" for path in named_configs().values()
    }
    assert not any("tests" in path.parts for path in (tmp_path / "site").iterdir())
    counts = "from fl_lightning.bench import load_suite; print(len(load_suite('feduv/table1').cells()))"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    said = subprocess.run([sys.executable, "-c", counts], capture_output=True, text=True, check=True, env=environment)
    assert int(said.stdout) == len(load_suite(ROOT / "experiments/papers/feduv/table1.yaml").cells())
