"""Writes a run as an app for Flower, and the files of its sites; docs/federation.md has all commands."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.federation.data import Sites
from fl_lightning.storage.atomic_io import write_atomically

SECTIONS = ("seed_everything", "model", "data", "method", "trainer")
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federated-run"
version = "1.0.0"
description = "A run of fl_lightning at sites"
license = "Apache-2.0"
# run it in an environment with fl-lightning[federation]
dependencies = []

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "federated_run.server:app"
clientapp = "federated_run.client:app"

[tool.flwr.app.config]
# folder of the server's runs; "" takes the one in the config
root = ""
# "last" resumes from the newest checkpoint in this folder
ckpt-path = ""
"""
SERVER = '''\
"""The ServerApp: the run of config.yaml with sites as clients."""

from pathlib import Path

from fl_lightning.cli.federation import server_app

app = server_app(Path(__file__).with_name("config.yaml"))
'''
CLIENT = '''\
"""The ClientApp: relays messages to the worker of its site, the only process that reads data."""

from fl_lightning.federation.framing import client_app

app = client_app()
'''
SITE = """\
# The settings of site {name}. Fill in its data, then start its worker:
#   python cli.py site --config config.yaml --config {name}.yaml
name: "{name}"
# This folder holds the state that its client keeps between rounds, and the socket of the worker.
folder: "{name}"
# The site's data: any data module with the data of one client. A data module with several clients needs `part`, the
# number of the client that this site represents.
part: null
"""
# replaces the data of a config without data
DATA = """\
# data:
#   class_path: ImageFolderImages
#   init_args: {root: /srv/images, classes: [benign, malignant], num_clients: 1, batch_size: 32}
"""


def write_app(folder: Path, config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Write the app of a resolved config, with the named sites as its clients, and the files of each site.

    An existing file of a site stays, since it may be filled in.
    """
    keys = [key for key in SECTIONS if config.get(key) is not None]
    sections = {key: copy.deepcopy(config[key]) for key in keys}
    # results depend on which clients share a step; a site has one client
    sections["trainer"] |= {"clients_per_step": 1, "devices": 1, "num_nodes": 1, "workers_per_device": 1}
    server = {
        **sections,
        "data": {"class_path": f"{Sites.__module__}.{Sites.__name__}", "init_args": {"names": list(names)}},
    }
    site_data = yaml.safe_dump({"data": sections["data"]}, sort_keys=False) if "data" in sections else DATA
    files = {
        "pyproject.toml": PROJECT,
        "federated_run/__init__.py": "",
        "federated_run/server.py": SERVER,
        "federated_run/client.py": CLIENT,
        "federated_run/config.yaml": yaml.safe_dump(server, sort_keys=False),
        "site/config.yaml": yaml.safe_dump(sections, sort_keys=False),
        **{f"sites/{name}.yaml": SITE.format(name=name) + site_data for name in names},
    }
    for name, text in files.items():
        if name.startswith("sites/") and (folder / name).exists():
            continue
        write_atomically(folder / name, partial(Path.write_text, data=text, encoding="utf-8"))
