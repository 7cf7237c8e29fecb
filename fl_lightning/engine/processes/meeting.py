"""How the workers meet: the store in which they find each other, and the process group over which they talk.

Workers that this program starts on one machine meet in a folder of the user's own, and talk over loopback. Those of
several machines, and those that a cluster has started, meet over the network, as :doc:`clusters` says.

Private names of torch that this needs, as of torch 2.15: ``ProcessGroupGloo._Options`` and its ``_devices`` and
``_timeout``; its public constructor takes no device.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import warnings
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import distributed

from fl_lightning.engine.processes.presence import JOIN, PATIENCE
from fl_lightning.records.temporary import TemporaryFolder

# the variable that tells a worker the folder in which those of its machine meet
FOLDER = "FL_LIGHTNING_WORKERS"
LOOPBACK = "127.0.0.1"
# a round may take hours
NEVER = timedelta(days=30)
# Linux's struct tcp_md5sig: family, address, flags, length of the address's prefix, length of the key, device, key
TCP_MD5SIG_EXT, TCP_MD5SIG_FLAG_PREFIX, SIGNATURE = 32, 1, struct.Struct("=H126xBBHi80s")


def open_folder() -> TemporaryFolder:
    """A new folder in which the workers that this process starts on its machine meet; they find it by a variable."""
    folder = TemporaryFolder("fl_lightning-workers-")
    os.environ[FOLDER] = str(folder.path)
    return folder


def meet(rank: int, size: int, address: str, port: int) -> distributed.Store:
    """The store at which workers meet that have no folder in common; worker 0 keeps it, or torchrun."""
    if TorchElasticEnvironment.detect():
        return next(distributed.rendezvous("env://", rank, size, timeout=timedelta(seconds=JOIN)))[0]
    # it waits for nobody: that is left to Presence, which names who is missing
    kept: dict[str, Any] = {
        "is_master": rank == 0,
        "wait_for_workers": False,
        "multi_tenant": True,
        "use_libuv": os.name != "nt",
    }
    if rank == 0 and address == LOOPBACK:
        # by itself it listens on all interfaces, whatever the address
        kept["master_listen_fd"] = socket.create_server((address, port)).detach()
    for attempt in count(1):
        try:
            return distributed.TCPStore(address, port, size, timeout=timedelta(seconds=PATIENCE), **kept)
        except distributed.DistNetworkError:
            if rank == 0 or attempt * PATIENCE >= JOIN:
                raise
            warnings.warn(f"waiting for worker 0 at {address}:{port}, since {attempt * PATIENCE:.0f} s", stacklevel=2)
    raise AssertionError


# A program that was started once for each worker keeps the store for its later runs: with a new one for each, a worker
# could begin the next run while the store of the last is being closed, and fail.
meet_once = cache(meet)


def meet_in(folder: Path) -> distributed.Store:
    """The store in a folder, for the start alone: it grows with each value, and waits where a disk is full."""
    return distributed.FileStore(str(folder / "store"))


def of_group(store: distributed.Store, number: int) -> distributed.Store:
    """The part of a store for a new group: other parts hold the addresses of earlier groups and of dead workers."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        # each node counts its own restarts, so count the workers that have joined instead
        attempt = (store.add("fl_lightning", 1) - 1) // int(os.environ["WORLD_SIZE"])
    return distributed.PrefixStore(f"fl_lightning/{attempt}/{number}", store)


def connect(store: distributed.Store, rank: int, size: int, one_machine: bool) -> Any:
    """The process group of the workers. Sums are added in float64 on the CPU, whatever the device, hence gloo.

    Raises:
        RuntimeError: a worker did not answer, or another program did in its place.
    """
    if not one_machine:
        return distributed.ProcessGroupGloo(store, rank, size, timeout=NEVER)
    gloo, before = cast(Any, distributed.ProcessGroupGloo), set(sockets())
    options = gloo._Options()
    options._timeout, options._devices = NEVER, [gloo.create_device(hostname=LOOPBACK)]
    group = gloo(store, rank, size, options)
    check_peers(group, store, rank, size)
    close_to_others(number for name, number in sockets().items() if name not in before)
    return group


def check_peers(group: Any, store: distributed.Store, rank: int, size: int) -> None:
    """Check that each connection leads to the worker that it should.

    gloo takes a connection for that of a worker if it begins with the worker's number, and any user of the machine
    can connect before the worker does. So each connection carries a word, which only the store tells.

    Raises:
        RuntimeError: one does not.
    """
    others = [other for other in range(size) if other != rank]
    words = {other: secrets.token_hex(16) for other in others}
    sent = []
    for other, word in words.items():
        store.set(f"word/{rank}/{other}", word)
        sent.append(group.send([torch.tensor(list(word.encode()), dtype=torch.uint8)], other, 0))
    for other in others:
        answer = torch.empty(32, dtype=torch.uint8)
        group.recv([answer], other, 0).wait(timedelta(seconds=JOIN))
        if bytes(answer.tolist()) != store.get(f"word/{other}/{rank}"):
            raise RuntimeError(f"another program has answered in the place of worker {other}")
    for work in sent:
        work.wait()


def sockets() -> dict[str, int]:
    """The descriptor of each socket of this process, by a name that is the socket's alone; empty without /proc."""
    names: dict[str, int] = {}
    with suppress(FileNotFoundError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                names[os.readlink(f"/proc/self/fd/{number}")] = int(number)
    return {name: number for name, number in names.items() if name.startswith("socket:")}


def close_to_others(numbers: Iterable[int]) -> None:
    """Let the listening ones of these sockets take no more connections; without effect where Linux does not.

    gloo listens as long as the group lives, keeps every connection, and ends the process when it has no descriptor
    left for the next one. To close its socket would end the process, too. So connections must be signed with a key
    that nobody knows.
    """
    for number in numbers:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                key = SIGNATURE.pack(socket.AF_INET, TCP_MD5SIG_FLAG_PREFIX, 0, 16, 0, secrets.token_bytes(16))
                listener.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT, key)
