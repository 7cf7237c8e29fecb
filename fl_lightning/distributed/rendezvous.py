"""Connects the workers: a store in which they find each other, and the gloo group over which they communicate.

Workers of one machine communicate over loopback. This uses private names of torch 2.15: ``ProcessGroupGloo._Options``
and its ``_devices`` and ``_timeout``, since the public constructor takes no device.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
from torch import distributed

from fl_lightning.utilities.errors import UsageError

Result = TypeVar("Result")
LOOPBACK = "127.0.0.1"
# seconds in which all workers must join, and then connect
JOIN = 300.0
# gloo's time limit of a collective: a round may take hours
NEVER = timedelta(days=30)


def tcp_store(address: str, port: int, is_host: bool, listener: socket.socket | None = None) -> distributed.Store:
    """Connect to the store at an address; with ``is_host``, also start its server.

    A server at the loopback address listens only there, at ``listener`` if set; any other one on all interfaces.
    """
    # libuv cannot listen at a socket that is passed before torch 2.8
    libuv = os.name != "nt" and torch.__version__ >= "2.8"
    how: dict[str, Any] = {"is_master": is_host, "wait_for_workers": False, "use_libuv": libuv}
    if is_host and address == LOOPBACK:
        how["master_listen_fd"] = (listener or socket.create_server((address, port))).detach()
    return distributed.TCPStore(address, port, timeout=timedelta(seconds=JOIN), **how)


# A program that is started once per worker keeps one store for all its runs: otherwise a worker could begin the next
# run while the store of the last one is being closed, and fail.
shared_tcp_store = cache(tcp_store)


def group_store(store: distributed.Store, rank: int, size: int, check: Callable[[], None]) -> distributed.Store:
    """Wait until all workers have joined, and return the part of the store that belongs to this group only.

    Other parts hold the addresses of earlier groups and of ended workers. So each worker writes the name of a new key,
    under which worker 0 stores the name of the new part. An ended worker reads no answer.
    """
    own_key, part = f"fl_lightning/{uuid4()}", None
    store.set(f"fl_lightning/worker/{rank}", own_key)
    end, pause = time.monotonic() + JOIN, 0.001
    while True:
        if rank == 0:
            for key in (f"fl_lightning/worker/{number}" for number in range(size)):
                if store.check([key]):
                    store.set(store.get(key).decode(), own_key)
        if part is None and store.check([own_key]):
            part = distributed.PrefixStore(store.get(own_key).decode(), store)
            part.set(f"joined/{rank}", "")
        missing = [0]
        if part is not None:
            missing = [number for number in range(size) if not part.check([f"joined/{number}"])]
            if not missing:
                return part
        if time.monotonic() > end:
            names = ", ".join(f"worker {number}" for number in missing)
            hint = "start the program on every node with the same MASTER_ADDR and MASTER_PORT"
            raise UsageError(f"{names} of {size} did not join within {JOIN:.0f} s: {hint}")
        check()
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def connect(store: distributed.Store, rank: int, size: int, one_machine: bool) -> Any:
    """Return the process group of the workers that have joined, which is not torch's default one.

    Its backend is gloo, since sums are added in float64 on the CPU for every device.
    """
    gloo = cast(Any, distributed.ProcessGroupGloo)
    if not one_machine:
        return gloo(store, rank, size, timeout=NEVER)
    options = gloo._Options()
    options._timeout, options._devices = NEVER, [gloo.create_device(hostname=LOOPBACK)]
    return gloo(store, rank, size, options)


def checked(call: Callable[[], Result], check: Callable[[], None], limit: float | None = None) -> Result:
    """Return the result of ``call``, and call ``check`` meanwhile, for at most ``limit`` seconds or ``JOIN``.

    The call runs in a thread, since torch does not notice that another worker has ended.
    """
    result = Future[Result]()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    limit = JOIN if limit is None else limit
    end = time.monotonic() + limit
    while not wait([result], timeout=0.5).done:
        if time.monotonic() > end:
            raise RuntimeError(f"the workers did not connect within {limit:.0f} s: one of them has ended")
        check()
    return result.result()
