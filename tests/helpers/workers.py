"""Workers that are threads of one process, for tests of what workers exchange."""

import os
import queue
import socket
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fl_lightning.distributed.signals import Signals


class ThreadWorkers:
    """The collectives of ``engine.workers.Workers`` among threads."""

    def __init__(self, rank, size, barrier, values, queues):
        self.rank, self.size = rank, size
        self.signals = Signals(speaks=False)
        self._barrier, self._values, self._queues = barrier, values, queues

    def gather(self, value, label):
        self._values[self.rank] = value
        self._barrier.wait(120)
        values = list(self._values)
        self._barrier.wait(120)
        return values

    def all_reduce(self, tensor):
        parts = self.gather(tensor.clone(), "all_reduce")
        tensor.copy_(sum(parts))

    def all_gather(self, tensor):
        return self.gather(tensor.clone(), "all_gather")

    def send(self, packed, rank):
        self._queues[self.rank, rank].put(packed)

    def receive(self, rank):
        return self._queues[rank, self.rank].get(timeout=120)


def together(size, work):
    """Run ``work(workers)`` in ``size`` threads, and return their results by rank."""
    shared = threading.Barrier(size), [None] * size, defaultdict(queue.Queue)
    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(work, ThreadWorkers(rank, size, *shared)) for rank in range(size)]
        return [one.result(300) for one in running]


def listening():
    """The addresses and ports at which this process listens, and its descriptors of those sockets; needs /proc."""
    own = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own[os.readlink(f"/proc/self/fd/{number}")] = int(number)
    places = {}
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    number = own[f"socket:[{fields[9]}]"]
                    with socket.socket(fileno=os.dup(number)) as listener:
                        places[listener.getsockname()[:2]] = number
    return places
