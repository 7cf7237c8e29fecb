"""Writes a run as an app for Flower, and what each site needs beside it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.federation.data import Sites
from fl_lightning.records.files import write_atomically

SECTIONS = ("seed_everything", "model", "data", "method", "trainer")
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A run of fl_lightning at sites"
license = "Apache-2.0"
# it runs in the environment in which fl-lightning[federation] is installed
dependencies = []

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "federated_run.server:app"
clientapp = "federated_run.client:app"

[tool.flwr.app.config]
# folder of the server's runs; "" is that of the config
root = ""
# "last" goes on from the newest checkpoint in it
ckpt-path = ""
"""
SERVER = '''\
"""The ServerApp: the run of config.yaml, whose clients are sites."""

from pathlib import Path

from fl_lightning.cli.federation import server_app

app = server_app(Path(__file__).with_name("config.yaml"))
'''
CLIENT = '''\
"""The ClientApp: passes messages on to the worker of its site, which alone reads data."""

from fl_lightning.federation.relay import client_app

app = client_app()
'''
SITE = """\
# What belongs to one site. Fill it in, then start the worker of the site:
#   python cli.py site --config config.yaml --config site.yaml
# Name of this site, one of {names}.
name: {name}
# What its client remembers between rounds, and the socket of the worker, lie in this folder.
folder: site
# The site's data: any data module with the data of one client, in place of this one. One that deals its data out to
# several clients needs `part`, the number of the client that this site stands for.
part: null
"""
README = """\
# A run at sites

`federated_run` is the app, which `flwr run` submits. `site` is what each site gets: the config that it compares with
the server's, and `site.yaml`, which it fills in. The guide of fl_lightning has a page on federations.

The server, once, where `ca.crt`, `server.crt` and `server.key` are:

    flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \\
        --enable-supernode-auth --disable-runtime-dependency-installation --database state.db --host 0.0.0.0
    flwr supernode register SITE.pub tls                 # the public key of each site

Each site:

    python cli.py site --config config.yaml --config site.yaml
    flower-supernode --superlink SERVER:8000 --root-certificates ca.crt --auth-supernode-private-key SITE.key \\
        --node-config 'socket="/path/to/site/worker.sock"'

The server, to run, and to go on from the last checkpoint:

    flwr run . tls --stream
    flwr run . tls --stream --run-config 'ckpt-path="last"'
"""


def write_app(folder: Path, config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Write the app of a resolved config, whose clients are the sites of these names, and the files of a site."""
    whole = {key: copy.deepcopy(config[key]) for key in SECTIONS if config.get(key) is not None}
    # the bits of a visit depend on those beside which it is made: a site has one client
    whole["trainer"] |= {"clients_per_step": 1, "devices": 1, "num_nodes": 1, "workers_per_device": 1}
    server = {
        **whole,
        "data": {"class_path": f"{Sites.__module__}.{Sites.__name__}", "init_args": {"names": list(names)}},
    }
    data = yaml.safe_dump({"data": whole["data"]}, sort_keys=False)
    files = {
        "pyproject.toml": PROJECT.format(name="federated-run"),
        "README.md": README,
        "federated_run/__init__.py": "",
        "federated_run/server.py": SERVER,
        "federated_run/client.py": CLIENT,
        "federated_run/config.yaml": yaml.safe_dump(server, sort_keys=False),
        "site/config.yaml": yaml.safe_dump(whole, sort_keys=False),
        "site/site.yaml": SITE.format(names=", ".join(names), name=names[0]) + data,
    }
    for name, text in files.items():
        write_text(folder / name, text)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
