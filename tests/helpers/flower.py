"""A federation through Flower on this machine: SuperLink, SuperNodes, TLS and keys, as docs/federation.md has them."""

import datetime
import ipaddress
import os
import socket
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ADDRESS = "127.0.0.1"
PRIVATE = {"encoding": serialization.Encoding.PEM, "encryption_algorithm": serialization.NoEncryption()}


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
        write_certificates(self.folder)
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
        """All processes of this federation; those whose parent is gone are told by their environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("FLWR_HOME") == self.environment["FLWR_HOME"]:
                    found.append(process)
        return found

    def start(self, name, *words):
        """Start a program; what it says is in a log of its name."""
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
        write_key(self.folder, name)
        self.command("supernode", "register", self.folder / f"{name}.key.pub", "tls")

    def start_node(self, name, config, port=None):
        """Start the node of a site with a config of Flower's, such as ``socket="path"`` of its worker."""
        link = ("--superlink", f"{ADDRESS}:{port or self.port}", "--root-certificates", self.folder / "ca.crt")
        own = ("--auth-supernode-private-key", self.folder / f"{name}.key", "--port", free_port())
        return self.start(name, "flower-supernode", *link, *own, "--node-config", config)

    def command(self, *words, seconds=120):
        """What a command of ``flwr`` says, which must succeed."""
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
        """Run an app to its end; what its server says."""
        given = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in settings.items())
        return self.command("run", app, "tls", "--stream", "--run-config", given, seconds=seconds)

    def log(self, name):
        """What a program has said so far."""
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


def write_key(folder, name):
    """A key of a node, and its public part."""
    key = ec.generate_private_key(ec.SECP384R1())
    openssh = serialization.PrivateFormat.OpenSSH
    (folder / f"{name}.key").write_bytes(key.private_bytes(format=openssh, **PRIVATE))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{name}.key.pub").write_bytes(public)


def write_certificates(folder):
    """A certificate of an authority, and one of it for this machine, with its key."""
    today = datetime.datetime.now(datetime.timezone.utc)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("ca", ADDRESS)]
    for place, name in enumerate(("ca", "server")):
        certificate = (
            x509.CertificateBuilder()
            .issuer_name(names[0])
            .subject_name(names[place])
            .public_key(keys[place].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(today - datetime.timedelta(days=1))
            .not_valid_after(today + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=place == 0, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ADDRESS))]), False)
            .sign(keys[0], hashes.SHA256())
        )
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private = keys[place].private_bytes(format=serialization.PrivateFormat.PKCS8, **PRIVATE)
        (folder / f"{name}.key").write_bytes(private)
