"""The files that ``federate`` writes for the parties of a federation."""

import copy

import numpy as np
import pytest
import yaml
from helpers.errors import refused
from helpers.sites import SMALL, command, written

from fl_lightning.data import NpyImages
from fl_lightning.federation.data import SingleSite

pytestmark = pytest.mark.usefixtures("one_parser")


def federated(folder, config, *words):
    app = folder / "app"
    command("federate", "--config", written(folder / "config.yaml", config), "--output", app, *words)
    return app


def test_each_site_gets_a_file_with_its_name_that_a_worker_reads(tmp_path):
    app = federated(tmp_path, SMALL, "--sites", "[oslo, 'no', '1']")
    for name in ("oslo", "no", "1"):
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
    with refused("sites=None", "data"):
        federated(tmp_path / "more", config)


def test_the_file_that_a_site_has_filled_in_stays(tmp_path):
    own = federated(tmp_path, SMALL, "--sites", "[oslo]") / "sites" / "oslo.yaml"
    own.write_text("part: 2\n")
    config = copy.deepcopy(SMALL)
    config["trainer"]["max_rounds"] = 7
    app = federated(tmp_path, config, "--sites", "[oslo, lima]")
    assert own.read_text() == "part: 2\n" and (app / "sites" / "lima.yaml").exists()
    assert yaml.safe_load((app / "site" / "config.yaml").read_text())["trainer"]["max_rounds"] == 7


def test_a_site_measures_nothing_that_other_sites_would_measure_otherwise(tmp_path):
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", np.arange(90, dtype=np.uint8).reshape(10, 3, 3))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(10) % 2)
    alone = {"num_clients": 1, "root": str(tmp_path)}
    with refused("data.mean"):
        SingleSite(NpyImages(**alone, std=[1.0])).setup()
    SingleSite(NpyImages(**alone, std=[1.0]), part=0).setup()  # a simulation, whose sites measure the whole
    SingleSite(NpyImages(**alone, mean=[0.5], std=[1.0])).setup()
