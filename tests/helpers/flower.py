"""A federation through Flower on this machine: SuperLink, SuperNodes, TLS and keys, as in docs/federation.md."""

import os
import socket
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import psutil

ADDRESS = "127.0.0.1"
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "federation.md").read_text()


class Flower:
    """A SuperLink and SuperNodes, whose processes end with the block.

    Args:
        folder: where certificates, keys, logs and the database lie.
        blocked: a folder of modules that the processes of Flower find before all others.
    """

    def __init__(self, folder, blocked=None):
        self.folder, self.port, self.processes = Path(folder), free_port(), {}
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([*([str(blocked)] if blocked else []), *sys.path]),
        }

    def __enter__(self):
        (self.folder / "home").mkdir(parents=True)
        self.execute(commands_of_page(("openssl", "echo")))
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "tls"\n[superlink.tls]\naddress = "{ADDRESS}:{self.port}"\n'
            f'root-certificates = "{self.folder / "ca.crt"}"\n'
        )
        self.start_link()
        return self

    def __exit__(self, *error):
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes.values():
            process.wait(30)

    def tree(self):
        """Return all processes of this federation, found by their environment, since parents may have ended."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("FLWR_HOME") == self.environment["FLWR_HOME"]:
                    found.append(process)
        return found

    def execute(self, script):
        """Run commands of the guide in the folder."""
        subprocess.run(script, shell=True, cwd=self.folder, check=True, capture_output=True)

    def start(self, name, *words):
        """Start a program with a log of its name."""
        with open(self.folder / f"{name}.log", "a") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in words], env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        return self.processes[name]

    def start_link(self):
        """Start the SuperLink, and wait until it listens."""
        files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
        tls = [word for option, file in files.items() for word in (option, self.folder / file)]
        rules = ("--enable-supernode-auth", "--disable-runtime-dependency-installation")
        database = ("--database", self.folder / "state.db", "--port", self.port)
        self.start("link", "flower-superlink", *tls, *rules, *database)
        self.until(lambda: socket.socket().connect_ex((ADDRESS, self.port)) == 0, "link")

    def register(self, name):
        """Make the key of a node, and register it."""
        self.execute(commands_of_page("ssh-keygen").replace("a.key", f"{name}.key"))
        self.command("supernode", "register", self.folder / f"{name}.key.pub", "tls")

    def start_node(self, name, config, port=None):
        """Start the node of a site with a config of Flower's, such as ``socket="path"`` of its worker."""
        link = ("--superlink", f"{ADDRESS}:{port or self.port}", "--root-certificates", self.folder / "ca.crt")
        own = ("--auth-supernode-private-key", self.folder / f"{name}.key", "--port", free_port())
        return self.start(name, "flower-supernode", *link, *own, "--node-config", config)

    def command(self, *words, seconds=120):
        """Return the output of a command of ``flwr``, which must succeed."""
        done = subprocess.run(
            ["flwr", *(str(word) for word in words)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, app, seconds=600, **settings):
        """Run an app to its end; return the output of its server."""
        given = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in settings.items())
        return self.command("run", app, "tls", "--stream", "--run-config", given, seconds=seconds)

    def log(self, name):
        """Return the output of a program so far."""
        return (self.folder / f"{name}.log").read_text()

    def until(self, condition, name, seconds=120):
        """Wait for something that a program is to bring about."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it has not come; {name} says:\n{self.log(name)}"
            time.sleep(0.1)


def free_port():
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return probe.getsockname()[1]


def commands_of_page(program):
    """The commands of the guide that begin with a program, as a script."""
    return "\n".join(line.strip() for line in PAGE.splitlines() if line.strip().startswith(program))
