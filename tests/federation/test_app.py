"""What ``federate`` writes for the parties of a federation."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.errors import refused
from helpers.sites import SMALL, command, written
from PIL import Image

from fl_lightning.data import ImageFolderImages, NpyImages
from fl_lightning.federation.data import OneSite

pytestmark = pytest.mark.usefixtures("one_parser")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "federation.md"


def federated(folder, config, *words):
    app = folder / "app"
    command("federate", "--config", written(folder / "config.yaml", config), "--output", app, *words)
    return app


def test_each_site_gets_a_file_with_its_name_that_a_worker_reads(tmp_path):
    app = federated(tmp_path, SMALL, "--sites", "[oslo, lima, rome]")
    for name in ("oslo", "lima", "rome"):
        own = yaml.safe_load((app / "sites" / f"{name}.yaml").read_text())
        assert (own["name"], own["folder"]) == (name, name)
        assert own["data"]["class_path"].endswith("Digits")


def test_sites_need_no_data_in_the_config_and_their_number_needs_one_of_both(tmp_path):
    config = copy.deepcopy(SMALL)
    data = config.pop("data")
    app = federated(tmp_path, config, "--sites", "[oslo, lima]")
    assert "data" not in yaml.safe_load((app / "site" / "config.yaml").read_text())
    own = app / "sites" / "oslo.yaml"
    assert "data" not in yaml.safe_load(own.read_text())
    own.write_text(own.read_text() + yaml.safe_dump({"data": data}))  # as a site fills it in
    with refused("data.num_clients=3", "part"):
        command("site", "--config", app / "site" / "config.yaml", "--config", own)
    with refused("sites=None", "give the names of the sites, or data"):
        federated(tmp_path / "more", config)


def test_a_site_measures_nothing_that_other_sites_would_measure_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", np.arange(90, dtype=np.uint8).reshape(10, 3, 3))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(10) % 2)
        for name in ("ill", "well"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(tmp_path / split / name / "0.png")
    alone = {"num_clients": 1, "root": str(tmp_path)}
    for key, data in {"mean": NpyImages(**alone, std=[1.0]), "value_range": ImageFolderImages(**alone)}.items():
        with refused(f"data.{key}"):
            OneSite(data).setup()
        OneSite(data, part=0).setup()  # a simulation, whose sites measure the whole
    OneSite(NpyImages(**alone, mean=[0.5], std=[1.0])).setup()
    OneSite(ImageFolderImages(**alone, value_range=[0, 4095])).setup()


def test_the_guide_and_the_readme_of_an_app_have_the_same_options(tmp_path):
    readme, page = (federated(tmp_path, SMALL) / "README.md").read_text(), PAGE.read_text()
    options = {*re.findall(r"(?<=[ `])--[a-z-]+", readme)}
    assert {"--auth-supernode-private-key", "--root-certificates", "--port", "--host"} <= options
    assert options <= {*re.findall(r"--[a-z-]+", page)}
