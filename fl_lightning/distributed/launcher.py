"""Starts the workers: forks this process, runs the program again, or joins the workers of a cluster.

The workers communicate over a process group that is not torch's default one. A module, its metrics and its libraries
find no default group and so see one process: nothing is synchronised between different clients.

Private names of lightning 2.6: ``Fabric._wrap_with_setup``, and ``_configure_launcher``, ``_launcher``,
``_parallel_devices`` and ``_set_world_ranks`` of ``DDPStrategy``.
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
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.multiprocessing
from joblib import cpu_count
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import distributed

from fl_lightning.client.lightning.private import IS_INTERACTIVE, Launcher
from fl_lightning.distributed.rendezvous import LOOPBACK, checked, connect, group_store, shared_tcp_store, tcp_store
from fl_lightning.utilities.errors import ClientError, LostWorkerError, Stopped, UsageError, count, own_text, require

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess  # missing on Windows

# errors that need no traceback
PLAIN_ERRORS = (UsageError, ClientError, KeyboardInterrupt, SystemExit)
# longest error of a worker that worker 0 reports
MAX_ERROR_LENGTH = 2**12


class WorkerFabric(Fabric):
    """Fabric that does not patch the constructors of loaders; Lightning's leaves them patched after an error."""

    def _wrap_with_setup(self, to_run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.strategy.setup_environment()
        return to_run(*args, **kwargs)


def build_fabric(trainer: Any, devices: int | str | list[int] = 1, num_nodes: int = 1) -> Fabric:
    """Build the Fabric of the workers that ``devices``, ``num_nodes`` and the trainer's arguments specify.

    Raises:
        UsageError: accelerator, precision and devices are incompatible, or no program exists to run again.
    """
    on_apple = trainer.accelerator == "auto" and MPSAccelerator.is_available()
    has_gpu = CUDAAccelerator.is_available() or (trainer.accelerator == "gpu" and MPSAccelerator.is_available())
    hint = "there is no GPU that torch can use; set cpu"
    require(has_gpu or trainer.accelerator not in ("gpu", "cuda"), "trainer.accelerator", trainer.accelerator, hint)
    accelerator = "cpu" if on_apple else trainer.accelerator  # Apple's GPU lacks float64, which sums need
    how: dict[str, Any] = {"accelerator": accelerator, "precision": trainer.precision, "devices": devices}
    try:
        fabric = WorkerFabric(**how, callbacks=trainer.callbacks)
        if fabric.world_size * num_nodes * trainer.workers_per_device == 1:
            return fabric
        obstacle = fork_obstacle(trainer)
        if obstacle:
            hint = f"{obstacle}, and a notebook or prompt has no program to run again; use 1, or run a script"
            require(can_run_anew(), "trainer.devices", trainer.devices, hint)
            rank_zero_info(f"trainer.devices={trainer.devices}: each worker runs the program again ({obstacle})")
        strategy = IndependentStrategy(trainer.workers_per_device, uses_fork(trainer))
        return WorkerFabric(**how, num_nodes=num_nodes, strategy=strategy, callbacks=trainer.callbacks)
    except UsageError:
        raise
    except (ImportError, ValueError, RuntimeError, TypeError, MisconfigurationException) as error:
        why = " ".join(str(error).split()).rstrip(".")
        named = {name: value for name, value in how.items() if name in why.lower()} or how
        keys = ", ".join(f"trainer.{name}={value!r}" for name, value in named.items())
        hint = "pass another value" if len(named) == 1 else "choose compatible values, such as devices auto"
        raise UsageError(f"{keys}: {why}; {hint}") from None


def uses_fork(trainer: Any) -> bool:
    """Return whether this process starts its workers, and can fork them."""
    return starts_workers() and not fork_obstacle(trainer)


def starts_workers() -> bool:
    """Return whether this process starts the workers: neither a cluster nor a worker has started it."""
    return world_of_cluster() is None and "LOCAL_RANK" not in os.environ


def can_fork() -> bool:
    """Return whether processes can be forked safely; libraries of macOS may crash in a forked process."""
    return "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"


def fork_obstacle(trainer: Any) -> str:
    """Return why this process cannot fork its workers; empty if it can, or does not start them."""
    if not starts_workers():
        return ""
    if not can_fork():
        return f"{platform.system()} cannot fork a process safely"
    if trainer.threads_per_worker not in (None, 1):
        return f"trainer.threads_per_worker={trainer.threads_per_worker}, and a forked process has one thread"
    return "a forked process cannot use a GPU that this one has used" if torch.cuda.is_initialized() else ""


def can_run_anew() -> bool:
    """Return whether this process runs a script or module, which Lightning can run again; a notebook has neither."""
    module = sys.modules["__main__"]
    return not IS_INTERACTIVE and (module.__spec__ is not None or os.path.isfile(sys.argv[0]))


def refuse_default_group(workers: int) -> None:
    """Refuse torch's default process group, over which metrics would mix clients, unless this worker is alone in it."""
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        hint = "metrics would be synchronised across clients; call torch.distributed.destroy_process_group() first"
        require(size == workers == 1, "torch.distributed", f"a default group of {size} process(es)", hint)


def devices_and_nodes(trainer: Any, data: Any) -> tuple[int | str | list[int], int]:
    """Return the devices of a node and the number of nodes, from the cluster or else the trainer's arguments."""
    world = world_of_cluster()
    if world is not None:
        return world
    if trainer.devices != "auto" or trainer.fabric.device.type != "cpu":
        return trainer.devices, trainer.num_nodes
    workers, obstacle = workers_of_auto(trainer, data)
    why = f" ({obstacle})" if obstacle else ""
    rank_zero_info(f"trainer.devices=auto: {count(workers, 'worker')} on {count(cpu_count(), 'core')}{why}")
    return workers, trainer.num_nodes


def show_idle_cores(trainer: Any, data: Any) -> None:
    """Say how many more cores ``devices=auto`` would use, if the trainer has one worker on a CPU."""
    if starts_workers() and str(trainer.devices) == "1" and trainer.fabric.device.type == "cpu":
        workers, _ = workers_of_auto(trainer, data)
        if workers > 1:
            rank_zero_info(f"trainer.devices=1: auto would train on {workers} cores at once, with the same bits")


def workers_of_auto(trainer: Any, data: Any) -> tuple[int, str]:
    """Return the number of workers that ``devices=auto`` starts on CPUs, and why they cannot be forked, if so."""
    obstacle = fork_obstacle(trainer)
    if obstacle and not (can_fork() and can_run_anew()):
        return 1, obstacle
    workers = max(1, cpu_count() // (trainer.threads_per_worker or 1))
    if uses_fork(trainer):
        # the data are set up before workers are forked, so the number of clients is known
        workers = min(workers, trainer.nominal_cohort(data.num_clients))
    return workers, obstacle


class IndependentStrategy(DDPStrategy):
    """Strategy of workers that train different clients: each holds the whole model, unwrapped.

    ``group`` is the process group of the connected workers, and ``store`` their part of the store.
    """

    def __init__(self, workers_per_device: int = 1, forks: bool = True) -> None:
        super().__init__()
        self.workers_per_device, self.forks = workers_per_device, forks
        self.group: Any = None
        self.store: Any = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """Return the device of each worker of this machine."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = []
        for device in devices or []:
            self._parallel_devices += [device] * self.workers_per_device

    def _configure_launcher(self) -> None:
        environment: Any = self.cluster_environment
        if self.forks and not environment.creates_processes_externally:
            self._launcher: Any = ForkLauncher(environment, self.num_processes, self.on_one_machine)
        else:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Connect to the other workers.

        Raises:
            UsageError: the port is in use, or a worker did not join.
            LostWorkerError: a worker of this machine has ended.
        """
        self.accelerator.setup_device(self.root_device)  # type: ignore[union-attr]
        self._set_world_ranks()
        rank, size, environment = self.global_rank, self.world_size, cast(Any, self.cluster_environment)
        forked = isinstance(self._launcher, ForkLauncher)
        check, listener, make_store = lambda: None, None, cast(Any, shared_tcp_store)
        address, port = environment.main_address, environment.main_port
        if forked:  # the store lives for one run, which frees the port at its end
            check, listener, make_store = self._launcher.check, self._launcher.listener, tcp_store
            address, port = self._launcher.address
        elif self.on_one_machine and not TorchElasticEnvironment.detect():
            address = LOOPBACK
        is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = checked(lambda: make_store(address, port, is_host, listener), check)
            self.store = group_store(store, rank, size, check)
            self.group = checked(lambda: connect(self.store, rank, size, self.on_one_machine), check)
            self.group.barrier().wait()  # a worker that fails at once must not leave while others connect
        except (UsageError, LostWorkerError):
            raise
        except (RuntimeError, OSError) as error:
            check()  # another worker may have ended and left a connection behind
            raise UsageError(f"MASTER_PORT={port}: {str(error).splitlines()[0]}") from error

    @property
    def on_one_machine(self) -> bool:
        """Return whether all workers are on this machine, and so communicate over loopback."""
        return self.num_nodes == 1 and os.environ.get("GROUP_WORLD_SIZE", "1") == "1"

    @property
    def is_private(self) -> bool:
        """Return whether this program has started all workers, so that all messages come from this machine."""
        return self.on_one_machine and world_of_cluster() is None

    def leave(self, waits: bool = False) -> None:
        """Close the connections to the other workers, unless a collective ``waits``: closing would wait for its end."""
        if waits:  # leak the group, whose connections the end of the process closes
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        self.group = self.store = None


class ForkLauncher(Launcher):
    """Forks the other workers from this process, which is worker 0 and shares its data and model with them.

    A forked process starts fast, since it need not import torch and lightning. It has one thread: the other threads of
    this process do not exist there, and a parallel operation would wait for them forever.
    """

    is_interactive_compatible = True

    def __init__(self, environment: ClusterEnvironment, number: int, on_one_machine: bool) -> None:
        self.environment, self.number, self.on_one_machine = environment, number, on_one_machine
        self.address, self.listener = ("", 0), cast("socket.socket | None", None)  # of the store
        self.forked = False  # whether this process was forked by another worker
        self._children: dict[int, tuple[ForkProcess, Any]] = {}  # each with the queue for its error
        self._parent = os.getpid()

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` in all workers, and return its result in this one."""
        # chosen before the fork, so that all workers know it
        if self.on_one_machine:
            self.listener = socket.create_server((LOOPBACK, 0))
            self.address = self.listener.getsockname()
        else:
            self.address = (self.environment.main_address, self.environment.main_port)
        try:
            with gc_disabled():
                for rank in range(1, self.number):
                    self._children[rank] = self._fork(rank, partial(function, *args, **kwargs))
            return function(*args, **kwargs)
        finally:
            self._end(failed=sys.exc_info()[0] is not None)

    def check(self) -> None:
        """Raise a LostWorkerError if another worker of this machine has ended."""
        if self.forked and os.getppid() != self._parent:
            raise LostWorkerError(f"worker 0 (process {self._parent}), which started this one, has ended", worker=0)
        for rank, (child, errors) in self._children.items():
            if child.exitcode:
                how = f"was killed by {signal.Signals(-child.exitcode).name}" if child.exitcode < 0 else "failed"
                reason = f": {errors.get()}" if not errors.empty() else ""
                raise LostWorkerError(f"worker {rank} (process {child.pid}) {how}{reason}", rank, child.exitcode)

    def _fork(self, rank: int, function: Callable[[], Any]) -> tuple[ForkProcess, Any]:
        context = torch.multiprocessing.get_context("fork")
        errors = context.SimpleQueue()
        # a daemon could not have loader processes
        child = context.Process(target=self._work, args=(rank, errors, function), daemon=False)
        # otherwise the child would write the contents of these buffers a second time
        sys.stdout.flush()
        sys.stderr.flush()
        child.start()
        return child, errors

    def _work(self, rank: int, errors: Any, function: Callable[[], Any]) -> None:
        init_forked_process()
        if self.listener is not None:
            self.listener.close()
        self._children, self.listener, self.forked = {}, None, True
        os.environ["LOCAL_RANK"] = str(rank)
        try:
            function()
        except BaseException as error:
            # worker 0 reports plain errors, which all workers share; only this process has the traceback of another
            if not isinstance(error.__cause__ or error, PLAIN_ERRORS):
                traceback.print_exc()
            if isinstance(error, LostWorkerError) and error.worker == 0:
                print(f"error: {error}; worker {rank} ends as well", file=sys.stderr)
            notes = getattr(error, "__notes__", [])
            # a longer text would block on the pipe, while its reader waits for the end of this process
            errors.put("; ".join([f"{type(error).__name__}: {own_text(error)}", *notes])[:MAX_ERROR_LENGTH])
            sys.stderr.flush()
            interrupted = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            os._exit(error.status if isinstance(error, Stopped) else interrupted)

    def _end(self, failed: bool) -> None:
        # repeatedly: after the first signal a worker may finish its batch or round
        children = [child for child, _ in self._children.values()]
        for seconds in (1.0 if failed else 30.0, 2.0, 3.0):
            end = time.monotonic() + seconds
            for child in children:
                child.join(max(0.0, end - time.monotonic()))
                child.terminate()
        for child in children:
            child.kill()
            child.join()
        self._children = {}
        if self.listener is not None:
            self.listener.close()  # no effect if the store has taken it over


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection in this block, also in processes that are forked in it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def init_forked_process() -> None:
    """Make a process safe that was forked in a block of :func:`gc_disabled`; call this first in it."""
    # the parent's garbage, such as the process group of an earlier run, may have threads that do not exist here; its
    # destructor would wait for them forever
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)


def world_of_cluster() -> tuple[int, int] | None:
    """Return the workers of a node and the number of nodes under torchrun or SLURM; None without a cluster."""
    if TorchElasticEnvironment.detect():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return local, int(os.environ["WORLD_SIZE"]) // local
    if SLURMEnvironment.detect():
        nodes = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    return None


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Let torch use ``number`` threads in this block; None leaves the choice to torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tune_malloc() -> None:
    """Let glibc's allocator keep freed blocks of up to 1 GiB: requesting new pages costs more than a small layer."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD in malloc.h
        for parameter, value in ((-3, 2**30), (-1, 2**31 - 1), (-2, 2**26)):
            mallopt(parameter, value)
