"""Writes a run as an app for Flower, and what each site needs beside it."""

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
# What belongs to the site {name}. Fill in its data, then start its worker:
#   python cli.py site --config config.yaml --config {name}.yaml
name: {name}
# What its client remembers between rounds, and the socket of the worker, lie in this folder.
folder: {name}
# The site's data: any data module with the data of one client. One that deals its data out to several clients needs
# `part`, the number of the client that this site stands for.
part: null
"""
# what stands in place of data where none are given
DATA = """\
# data:
#   class_path: ImageFolderImages
#   init_args: {root: /srv/images, classes: [benign, malignant], num_clients: 1, batch_size: 32}
"""
README = """\
# A run at sites

`federated_run` is the app, which `flwr run` submits. Each site gets `site/config.yaml`, which it compares with the
server's, and its own file of `sites`, where it fills in its data. SERVER stands for the name of the server's machine,
and SITE for that of a site. What happens when something breaks, and who must trust whom, is in `docs/federation.md` of
fl_lightning.

1. The server, once: certificates, and the SuperLink, which keeps running.

       export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
       openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=authority -keyout ca.key -out ca.crt
       openssl req -newkey rsa:2048 -nodes -subj /CN=SERVER -keyout server.key -out server.csr
       echo "subjectAltName=DNS:SERVER" > server.ext        # of an address: IP:192.0.2.1
       openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 \\
           -extfile server.ext -out server.crt
       flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \\
           --enable-supernode-auth --disable-runtime-dependency-installation --database state.db \\
           --host 0.0.0.0 --port 8000

2. The server, once: `$FLWR_HOME/config.toml`, which is `~/.flwr/config.toml` where nothing else is said.

       [superlink]
       default = "tls"
       [superlink.tls]
       address = "SERVER:8000"
       root-certificates = "/path/to/ca.crt"

3. Each site, once: a key. It sends `SITE.key.pub` to the server, and gets `ca.crt`, `config.yaml` and `SITE.yaml`.

       ssh-keygen -t ecdsa -b 384 -N "" -f SITE.key

4. The server, for each site: `flwr supernode register SITE.key.pub tls`
5. Each site: its worker, which says where its socket is once it is ready, and then its node. Both keep running. No
   other machine must reach the site; of several nodes on one machine, each needs a `--port` of its own.

       python cli.py site --config config.yaml --config SITE.yaml
       export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
       flower-supernode --superlink SERVER:8000 --root-certificates ca.crt --auth-supernode-private-key SITE.key \\
           --port 9101 --node-config 'socket="/path/to/SITE/worker.sock"'

6. The server, to run, and to go on from the last checkpoint:

       flwr run . tls --stream --run-config 'root="/path/to/runs"'
       flwr run . tls --stream --run-config 'root="/path/to/runs" ckpt-path="last"'
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
    data = yaml.safe_dump({"data": whole["data"]}, sort_keys=False) if "data" in whole else DATA
    files = {
        "pyproject.toml": PROJECT,
        "README.md": README,
        "federated_run/__init__.py": "",
        "federated_run/server.py": SERVER,
        "federated_run/client.py": CLIENT,
        "federated_run/config.yaml": yaml.safe_dump(server, sort_keys=False),
        "site/config.yaml": yaml.safe_dump(whole, sort_keys=False),
        **{f"sites/{name}.yaml": SITE.format(name=name) + data for name in names},
    }
    for name, text in files.items():
        write_atomically(folder / name, partial(Path.write_text, data=text, encoding="utf-8"))
