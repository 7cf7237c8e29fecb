"""Starts the workers: by forking this process, by running the program again, or by joining those of a cluster.

The workers talk over a process group that is not torch's default one. A module, its metrics and its libraries ask torch
for the default group, find none, and so see one process: nothing is synchronised between different clients.

Lightning's private names that this needs are used here alone, as of lightning 2.6: ``_Launcher``, ``_IS_INTERACTIVE``,
``Fabric._wrap_with_setup``, and ``DDPStrategy``'s ``_configure_launcher``, ``_launcher``, ``_parallel_devices`` and
``_set_world_ranks``.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.multiprocessing
from lightning.fabric import Fabric
from lightning.fabric.accelerators import MPSAccelerator
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.launchers.launcher import _Launcher
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import distributed

from fl_lightning.distributed.rendezvous import LOOPBACK, checked, connect, group_store, shared_tcp_store, tcp_store
from fl_lightning.errors import ClientError, LostWorkerError, Stopped, UsageError, own_text, require
from fl_lightning.sampling import size_of_cohort

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess  # which Windows does not have

# errors whose message is enough without a traceback
PLAIN_ERRORS = (UsageError, ClientError, KeyboardInterrupt, SystemExit)
# characters of a worker's error that worker 0 reports
MOST_SAID = 2**12


class WorkerArguments(Protocol):
    """The arguments of a trainer that decide how workers are started."""

    accelerator: str
    devices: int | str | list[int]
    workers_per_device: int
    num_nodes: int
    precision: str | int | None
    threads_per_worker: int | None
    participation: float
    cohort_size: int | None
    callbacks: list[Any]
    fabric: Fabric


class WorkerFabric(Fabric):
    """Fabric that leaves the classes of loaders and samplers as they are.

    Lightning's wraps their constructors while it runs a function, so that it can build them again in
    ``setup_dataloaders``, which nothing here calls. After an error it leaves the wrappers behind, one more each time,
    and every loader that the process builds becomes slower.
    """

    def _wrap_with_setup(self, to_run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.strategy.setup_environment()
        return to_run(*args, **kwargs)


def build_fabric(trainer: WorkerArguments, devices: int | str | list[int] = 1, num_nodes: int = 1) -> Fabric:
    """Fabric for the workers that ``devices``, ``num_nodes`` and ``trainer.workers_per_device`` ask for.

    Raises:
        UsageError: the accelerator, precision or devices do not fit together.
    """
    on_apple = trainer.accelerator == "auto" and MPSAccelerator.is_available()
    accelerator = "cpu" if on_apple else trainer.accelerator  # float64, in which updates are added, is not on that GPU
    how: dict[str, Any] = {"accelerator": accelerator, "precision": trainer.precision, "devices": devices}
    try:
        fabric = WorkerFabric(**how, callbacks=trainer.callbacks)
        if fabric.world_size * num_nodes * trainer.workers_per_device == 1:
            return fabric
        check_start(trainer)
        strategy = IndependentStrategy(trainer.workers_per_device, uses_fork(trainer))
        return WorkerFabric(**how, num_nodes=num_nodes, strategy=strategy, callbacks=trainer.callbacks)
    except UsageError:
        raise
    except (ValueError, RuntimeError, TypeError, MisconfigurationException) as error:
        keys = ", ".join(f"trainer.{name}={value!r}" for name, value in how.items())
        why = " ".join(str(error).split()).rstrip(".")
        raise UsageError(f"{keys}: {why}; choose values that fit together, such as devices auto") from error


def uses_fork(trainer: WorkerArguments) -> bool:
    """Whether this process starts its workers, and can do so by forking."""
    return starts_workers() and not obstacle_to_forks(trainer)


def starts_workers() -> bool:
    """Whether this process starts its workers; not where a cluster or another worker has started it."""
    return world_of_cluster() is None and "LOCAL_RANK" not in os.environ


def can_fork() -> bool:
    """Whether this system forks processes safely; on macOS the system's libraries may crash in a forked process."""
    return "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"


def obstacle_to_forks(trainer: WorkerArguments) -> str:
    """Why workers cannot be forked; empty where they can."""
    if not can_fork():
        return f"{platform.system()} cannot fork a process safely"
    if trainer.threads_per_worker not in (None, 1):
        return f"trainer.threads_per_worker={trainer.threads_per_worker}, and a forked process has one thread"
    if torch.cuda.is_initialized():
        return "a forked process cannot use a GPU that this one has used"
    return ""


def can_run_anew() -> bool:
    """Whether this process runs a script or a module, which Lightning can run again; a notebook has neither."""
    module = sys.modules["__main__"]
    return not _IS_INTERACTIVE and (module.__spec__ is not None or os.path.isfile(sys.argv[0]))


def check_start(trainer: WorkerArguments) -> None:
    """Say that several workers run the program anew, where they cannot be forked.

    Raises:
        UsageError: there is no program to run.
    """
    obstacle = obstacle_to_forks(trainer) if starts_workers() else ""
    if obstacle:
        hint = f"{obstacle}, and a notebook or a prompt has no program to run anew; give 1, or run a script"
        require(can_run_anew(), "trainer.devices", trainer.devices, hint)
        rank_zero_info(f"trainer.devices={trainer.devices}: each worker runs the program anew ({obstacle})")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_default_group(workers: int) -> None:
    """Raise a UsageError where torch has a default process group, over which metrics would mix different clients.

    A group of one process, beside one worker, mixes nothing.
    """
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        hint = "metrics would be synchronised across clients; call torch.distributed.destroy_process_group() before"
        require(size == workers == 1, "torch.distributed", f"a default group of {size} process(es)", hint)


def devices_and_nodes(trainer: WorkerArguments, data: Any) -> tuple[int | str | list[int], int]:
    """Devices of a node and number of nodes: those of the cluster, else those of the trainer's arguments."""
    world = world_of_cluster()
    if world is not None:
        return world
    if trainer.devices != "auto" or trainer.fabric.device.type != "cpu":
        return trainer.devices, trainer.num_nodes
    obstacle = obstacle_to_forks(trainer) if starts_workers() else ""
    if obstacle and not (can_fork() and can_run_anew()):
        rank_zero_info(f"trainer.devices=auto: 1 worker, which is this process ({obstacle})")
        return 1, trainer.num_nodes
    chosen = max(1, cores() // (trainer.threads_per_worker or 1))
    if uses_fork(trainer):
        # before workers are forked the data are set up, so the number of clients is known
        chosen = min(chosen, size_of_cohort(data.num_clients, trainer.participation, trainer.cohort_size))
    rank_zero_info(f"trainer.devices=auto: {chosen} workers on {cores()} cores")
    return chosen, trainer.num_nodes


class IndependentStrategy(DDPStrategy):
    """A strategy for workers that train different clients: each has the whole model, and nothing wraps it.

    Args:
        workers_per_device: processes that share a device.
        forks: start the workers of this machine by forking this process, where no cluster starts them.

    Attributes:
        group: the process group of the workers; None before they have joined and after :meth:`leave`.
        store: the part of the store in which they have joined; None without a group.
    """

    def __init__(self, workers_per_device: int = 1, forks: bool = True) -> None:
        super().__init__()
        self.workers_per_device, self.forks = workers_per_device, forks
        self.group: Any = None
        self.store: Any = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device of each worker of this machine."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = [device for device in devices or [] for _ in range(self.workers_per_device)]

    def _configure_launcher(self) -> None:
        environment: Any = self.cluster_environment
        if self.forks and not environment.creates_processes_externally:
            self._launcher: Any = ForkLauncher(environment, self.num_processes, self.on_one_machine)
        else:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Join the other workers.

        Raises:
            UsageError: the port is in use, or a worker has not come.
            LostWorkerError: a worker of this machine has ended.
        """
        self.accelerator.setup_device(self.root_device)  # type: ignore[union-attr]
        self._set_world_ranks()
        forked = isinstance(self._launcher, ForkLauncher)
        check = self._launcher.check if forked else lambda: None
        address, port = self._address
        try:
            if forked:  # they meet once, and free the port when they part
                listener = self._launcher.listener
                store = checked(lambda: tcp_store(address, port, self.global_rank == 0, listener), check)
            else:
                of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                store = shared_tcp_store(address, port, self.global_rank == 0 and not of_agent)
            world = (self.global_rank, self.world_size)
            self.store = group_store(store, *world, check)
            self.group = checked(lambda: connect(self.store, *world, self.on_one_machine), check)
            self.group.barrier().wait()  # one that fails at once must not leave while others are joining
        except (UsageError, LostWorkerError):
            raise
        except (RuntimeError, OSError) as error:
            check()  # another worker may have ended, and left a connection behind
            raise UsageError(f"MASTER_PORT={port}: {str(error).splitlines()[0]}") from error

    @property
    def _address(self) -> tuple[str, int]:
        """Address and port of the store."""
        if isinstance(self._launcher, ForkLauncher):
            return self._launcher.address
        environment: Any = self.cluster_environment
        inside = self.on_one_machine and not TorchElasticEnvironment.detect()
        return LOOPBACK if inside else environment.main_address, environment.main_port

    @property
    def on_one_machine(self) -> bool:
        """Whether all workers are on this machine, and so talk over loopback."""
        return self.num_nodes == 1 and os.environ.get("GROUP_WORLD_SIZE", "1") == "1"

    @property
    def is_private(self) -> bool:
        """Whether this program has started all workers, so that messages come from no other machine."""
        return self.on_one_machine and world_of_cluster() is None

    def leave(self, waits: bool = False) -> None:
        """Close the connections to the other workers.

        Args:
            waits: whether a collective still waits for one of them. To close the group would then take until it has
                come, so the connections are left to the end of the process.
        """
        if waits:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        self.group = self.store = None


class ForkLauncher(_Launcher):
    """Worker 0 is this process, and the others are forked from it, with the data and the model it holds.

    A forked process starts soon, as it need not import torch and lightning. It has one thread: the other threads of
    this process do not exist there, and a parallel operation would wait for them forever.

    Args:
        environment: address and port at which the workers of several machines meet.
        number: number of workers of this machine.
        on_one_machine: whether there are no others.

    Attributes:
        address: address and port of the store.
        listener: the socket on which worker 0 listens there; None in other workers, and where there are several
            machines.
        forked: whether this process is a worker that another one has forked, and that reports its errors.
    """

    is_interactive_compatible = True

    def __init__(self, environment: ClusterEnvironment, number: int, on_one_machine: bool) -> None:
        self.environment, self.number, self.on_one_machine = environment, number, on_one_machine
        self.address, self.forked = ("", 0), False
        self.listener: socket.socket | None = None
        self._children: dict[int, ForkProcess] = {}
        self._errors: dict[int, Any] = {}
        self._parent = os.getpid()

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` in all workers, and return what it returns in this one.

        Raises:
            LostWorkerError: a worker was lost.
        """
        # chosen before the fork, so that all workers know it
        if self.on_one_machine:
            self.listener = socket.create_server((LOOPBACK, 0))
            self.address = self.listener.getsockname()
        else:
            self.address = (self.environment.main_address, self.environment.main_port)
        try:
            with gc_disabled():
                for rank in range(1, self.number):
                    self._children[rank] = self._fork(rank, function, args, kwargs)
            return function(*args, **kwargs)
        finally:
            self._end(failed=sys.exc_info()[0] is not None)

    def check(self) -> None:
        """Check that the other workers of this machine still run.

        Raises:
            LostWorkerError: one has ended.
        """
        if self.forked and os.getppid() != self._parent:
            raise LostWorkerError(f"worker 0 (process {self._parent}), which started this one, has ended", worker=0)
        for rank, child in self._children.items():
            if child.exitcode:
                errors = self._errors[rank]
                how = f"was killed by {signal.Signals(-child.exitcode).name}" if child.exitcode < 0 else "failed"
                what = f": {errors.get()}" if not errors.empty() else ""
                raise LostWorkerError(f"worker {rank} (process {child.pid}) {how}{what}", rank, child.exitcode)

    def _fork(self, rank: int, function: Callable[..., Any], args: tuple, kwargs: dict) -> ForkProcess:
        context = torch.multiprocessing.get_context("fork")
        self._errors[rank] = context.SimpleQueue()
        # not a daemon, which could have no loader processes of its own
        child = context.Process(target=self._work, args=(rank, function, args, kwargs), daemon=False)
        # the child would write the contents of this process's buffers a second time
        sys.stdout.flush()
        sys.stderr.flush()
        child.start()
        return child

    def _work(self, rank: int, function: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        init_forked_process()
        if self.listener is not None:
            self.listener.close()
        self._children, self.listener, self.forked = {}, None, True
        os.environ["LOCAL_RANK"] = str(rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
        try:
            function(*args, **kwargs)
        except BaseException as error:
            # worker 0 reports plain errors, which all workers share; another error has its traceback only here
            if not isinstance(error.__cause__ or error, PLAIN_ERRORS):
                traceback.print_exc()
            if isinstance(error, LostWorkerError) and error.worker == 0:
                print(f"error: {error}; worker {rank} ends, too", file=sys.stderr)
            notes = getattr(error, "__notes__", [])
            # one that does not fit into the pipe would wait for its reader, who waits for the end of this process
            self._errors[rank].put("; ".join([f"{type(error).__name__}: {own_text(error)}", *notes])[:MOST_SAID])
            sys.stderr.flush()
            os._exit(error.status if isinstance(error, Stopped) else 1)

    def _end(self, failed: bool) -> None:
        # several times: after the first signal a worker may finish its batch, or its round
        for seconds in (1.0 if failed else 30.0, 2.0, 3.0):
            end = time.monotonic() + seconds
            for child in self._children.values():
                child.join(max(0.0, end - time.monotonic()))
                child.terminate()
        for child in self._children.values():
            child.kill()
            child.join()
        self._children = {}
        if self.listener is not None:
            self.listener.close()  # without effect where the store has taken it over


@contextmanager
def gc_disabled() -> Iterator[None]:
    """In this block Python does not collect garbage, and neither do processes that are forked in it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def init_forked_process() -> None:
    """Make a process safe that was forked in a block of :func:`gc_disabled`; it is its first call."""
    # garbage of the parent, such as a process group of an earlier run, has threads that do not exist here; its
    # destructor would wait for them forever
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)


def world_of_cluster() -> tuple[int, int] | None:
    """Workers of a node and number of nodes where torchrun or SLURM started this process; None where neither did."""
    if TorchElasticEnvironment.detect():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return local, int(os.environ["WORLD_SIZE"]) // local
    if SLURMEnvironment.detect():
        nodes = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    return None


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """In this block let torch use ``number`` threads; None leaves the choice to torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tune_malloc() -> None:
    """Let the allocator of glibc keep freed blocks up to 1 GiB for the next use; no effect on other systems.

    By default it returns blocks above some megabytes to the system. Every activation and gradient of a step then lies
    on new pages, and getting those costs more than computing a small layer.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            mallopt(parameter, value)


# of malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
