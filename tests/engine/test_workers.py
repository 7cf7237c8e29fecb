"""Several workers: the same bits as one, whatever trains; and what happens when one is lost."""

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import launched
from helpers.errors import assert_names, refused
from helpers.runs import (
    OnWorker,
    assert_same_bits,
    history,
    plain_sgd_model,
    sends,
    small_data,
    small_model,
    small_trainer,
)
from helpers.theirs import Labelled, Synchronises, TheirData, Theirs
from helpers.tiny import TinyData, TinyModule, clients, variant
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch.utils.data import DataLoader

from fl_lightning import Method, Partitioned
from fl_lightning.callbacks import Callback
from fl_lightning.distributed import launcher, workers
from fl_lightning.distributed.launcher import IndependentStrategy
from fl_lightning.distributed.workers import schedule
from fl_lightning.methods import SCAFFOLD, FedBN
from fl_lightning.models import MLP
from fl_lightning.utilities.errors import ClientError, LostWorkerError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _undrawn(undrawn):
    """Metrics hold all results of several workers."""


def compare(tmp_path, methods=list, model=plain_sgd_model, data=None, workers=(1, 2), **kwargs):
    """Train by each number of workers, and hold the global models and all metrics against each other."""
    found = []
    for number in workers:
        given = {"devices": number, "threads_per_worker": 1, **kwargs}
        trainer = small_trainer(tmp_path, **given)
        torch.manual_seed(0)
        trainer.fit(model(), data() if data else small_data(num_clients=7), methods())
        found.append(({n: v.clone() for n, v in trainer.server.state.items()}, history(trainer)))
    for state, metrics in found[1:]:
        assert_same_bits(found[0][0], state)
        assert metrics == found[0][1]
    return trainer


def test_more_workers_than_clients_give_the_bits_of_one(tmp_path):
    trainer = compare(tmp_path, SCAFFOLD, workers=(1, 3), cohort_size=2)
    assert trainer.metrics["placed/2/clients"] == 0


class WithLoaders(TheirData):
    """The same data, loaded by a separate process."""

    def train_dataloader(self):
        return DataLoader(Labelled(self.items[:240]), batch_size=16, shuffle=True, num_workers=1)


class Leaks(TinyModule):
    """Counts its steps in a buffer that no state holds, and lets the count into the loss."""

    def build(self):
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def loss(self, batch):
        self.count += 1
        return super().loss(batch) * (1 + 0.01 * self.count)


def synchronises():
    return Synchronises(MLP(64, [8]), optimizer=partial(torch.optim.SGD, lr=0.02))


MODULES = {
    "a user's module and data": (Theirs, lambda: Partitioned(TheirData(), num_clients=5)),
    "loader processes": (Theirs, lambda: Partitioned(WithLoaders(), num_clients=2)),
    "a buffer in no state": (Leaks, lambda: clients(TinyData(40), 9, 20, 11)),
    "numbers that the module synchronises": (synchronises, lambda: small_data(num_clients=3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_the_users_trains_to_the_bits_of_one_worker(tmp_path, name):
    compare(tmp_path, model=MODULES[name][0], data=MODULES[name][1], max_rounds=2)


def test_workers_start_after_this_process_has_computed_with_several_threads(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(2000, 2000) @ torch.randn(2000, 2000)
        torch.randn(4_000_000).exp().sum()
        small_trainer(tmp_path, max_rounds=1, devices=2).fit(small_model("cnn"), small_data("cnn"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_run_leaves_no_process_and_no_variable_behind(tmp_path):
    before = dict(os.environ)
    small_trainer(tmp_path, devices=3, max_rounds=1).fit(small_model(), small_data())
    assert dict(os.environ) == before
    assert not multiprocessing.active_children()
    assert not torch.distributed.is_initialized()


def test_one_worker_writes_in_each_fit_and_the_placement_is_logged(tmp_path):
    class Folders(Callback):
        def on_round_end(self, trainer):
            assert (trainer.run_dir is None) == (trainer.global_rank > 0)

    trainer = small_trainer(tmp_path, devices=2, max_rounds=1, callbacks=[Folders()])
    for _ in range(2):
        trainer.fit(small_model(), small_data())
    assert [path.name for path in tmp_path.iterdir()] == ["fedavg"]
    assert {path.name for path in (tmp_path / "fedavg").iterdir()} == {"version_0", "version_1"}
    assert trainer.metrics["placed/0/clients"] + trainer.metrics["placed/1/clients"] == 4
    assert "placed/1/steps" in (trainer.run_dir / "metrics.csv").read_text()


def test_validation_and_test_are_those_of_one_worker(tmp_path):
    small_trainer(tmp_path, max_rounds=1).fit(small_model(), small_data(), FedBN())
    ckpt = tmp_path / "fedbn/version_0/checkpoints/last.ckpt"
    found = [
        small_trainer(tmp_path, devices=n, threads_per_worker=1).test(small_model(), small_data(), ckpt, FedBN())
        for n in (1, 2)
    ]
    assert found[0] == found[1]


# ---------------------------------------------------------------------- collectives


@pytest.fixture
def network(monkeypatch):
    """Workers that cannot trust received messages, as on several machines."""
    monkeypatch.setattr(IndependentStrategy, "is_private", False)


class Gathers(Callback):
    """Gathers a value that is longer on the second worker, and one of plain values, arrays and tensors."""

    plain = {1: (np.arange(3.0), np.float32(2.5), {None}), "path": Path("b")}  # noqa: RUF012

    def on_last_round_end(self, trainer):
        self.sizes = {size: trainer.gather("a" * size * trainer.global_rank) for size in (0, 1000, 10**6)}
        self.seen = trainer.gather({**self.plain, "tensor": torch.arange(3)})


@pytest.mark.parametrize("machines", [1, 2])
def test_values_of_any_and_unequal_size_are_gathered_by_rank(tmp_path, request, machines):
    if machines == 2:
        request.getfixturevalue("network")
    gathers = Gathers()
    small_trainer(tmp_path, devices=2, max_rounds=1, callbacks=[gathers]).fit(small_model(), small_data())
    assert gathers.sizes == {size: ["", "a" * size] for size in gathers.sizes}
    for one in gathers.seen:
        array, number, rest = one[1]
        assert (one["path"], rest, array.dtype, array.tolist()) == (Path("b"), {None}, np.float64, [0.0, 1.0, 2.0])
        assert type(number) is np.float32 and number == 2.5
        assert torch.equal(one["tensor"], torch.arange(3))


class Own:
    """An object that no machine should build from a message."""


GathersOwn = variant(Callback, on_round_end=lambda self, trainer: trainer.gather({"own": Own()}))


@pytest.mark.usefixtures("network")
def test_workers_of_several_machines_refuse_other_values_by_place_and_type(tmp_path):
    with refused("on_round_end", "test_workers.Own", "worker 0"):
        small_trainer(tmp_path, devices=2, callbacks=[GathersOwn()]).fit(small_model(), small_data())


class AsksAlone(Callback):
    """Calls a collective on the first worker only."""

    def on_round_end(self, trainer):
        if trainer.global_rank == 0:
            trainer.gather(1)


def test_a_collective_that_one_worker_alone_calls_is_refused_by_place(tmp_path):
    with refused("worker 0", "on_round_end", "worker 1"):
        small_trainer(tmp_path, devices=2, callbacks=[AsksAlone()]).fit(small_model(), small_data())


def test_collectives_end_with_the_run(tmp_path):
    trainer = small_trainer(tmp_path, devices=2, max_rounds=1)
    trainer.fit(small_model(), small_data())
    with refused("trainer.world_size="):
        trainer.gather(1)


class Joins(Callback):
    """Makes a default process group of this process alone."""

    def on_fit_start(self, trainer):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@pytest.fixture
def leaves_no_group():
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("leaves_no_group")
@pytest.mark.parametrize("within", [False, True])
def test_a_default_group_beside_several_workers_is_refused(tmp_path, within):
    callbacks = [Joins()]
    if not within:
        small_trainer(tmp_path, max_rounds=1, callbacks=callbacks).fit(small_model(), small_data())
        callbacks = []
    with refused("torch.distributed=", "torch.distributed.destroy_process_group()"):
        small_trainer(tmp_path, devices=2, callbacks=callbacks).fit(small_model(), small_data())


# ---------------------------------------------------------------------- placing


def test_the_longest_are_placed_first_on_the_worker_with_the_least():
    assert schedule({0: 5, 1: 9, 2: 5, 3: 1}, 2, {}) == [[1, 3], [0, 2]]
    assert schedule({4: 1}, 3, {}) == [[4], [], []]


def test_a_client_stays_where_its_memory_is_while_that_worker_has_its_share():
    assert schedule({0: 5, 1: 5, 2: 5, 3: 5}, 2, {0: 1, 1: 1, 2: 0, 3: 0}) == [[2, 3], [0, 1]]
    assert sorted(map(len, schedule({0: 5, 1: 5, 2: 5, 3: 5}, 2, dict.fromkeys(range(4), 1)))) == [2, 2]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_worker_has_more_than_the_mean_and_the_longest(size):
    rng = np.random.default_rng(0)
    for _ in range(50):
        steps = {k: int(s) for k, s in enumerate(rng.integers(0, 100, 40))}
        owners = {k: int(rng.integers(0, size)) for k in range(0, 40, 2)}
        placed = schedule(steps, size, owners)
        assert sorted(k for clients in placed for k in clients) == list(range(40))
        assert max(sum(steps[k] for k in clients) for clients in placed) <= sum(steps.values()) / size + 100


# ---------------------------------------------------------------------- failures


class Fails(Method):
    """Fails in some clients' visits of the second round."""

    def __init__(self, *clients):
        self.clients, self.rounds = clients, 0

    def on_round_start(self, server):
        self.rounds = server.round

    def on_client_start(self, client):
        if client.info.id in self.clients and self.rounds == 1:
            raise ValueError("no such thing")


@pytest.mark.parametrize("k", [0, 3])
def test_a_client_that_fails_on_any_worker_is_named(tmp_path, k):
    with refused(f"client {k}", "round 1", "ValueError", kind=ClientError):
        small_trainer(tmp_path, devices=2).fit(small_model(), small_data(train_size=100), Fails(k))


def test_clients_that_fail_on_any_worker_are_skipped_alike(tmp_path):
    trainer = compare(tmp_path, lambda: Fails(0, 3), on_client_error="skip")
    assert [trainer.history[1][name] for name in ("clients/failed", "clients")] == [2, 5]


def test_a_lost_worker_ends_the_run_by_name(tmp_path):
    with refused("round 1", "worker 1", "SIGKILL", kind=ClientError):
        small_trainer(tmp_path, devices=2, callbacks=[sends(signal.SIGKILL)]).fit(small_model(), small_data())
    assert not torch.distributed.is_initialized()


@pytest.mark.thorough
def test_a_frozen_worker_is_named_after_the_timeout(tmp_path):
    with refused("round 1", "worker 2", "trainer.timeout=1", kind=LostWorkerError) as ended:
        small_trainer(tmp_path, devices=3, timeout=1, callbacks=[sends(signal.SIGSTOP, 2)]).fit(
            small_model(), small_data()
        )
    assert "worker 1" not in str(ended.value)
    assert not multiprocessing.active_children()


def test_a_slow_worker_is_waited_for_without_a_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "LOOK", 0.02)
    slow = OnWorker(partial(time.sleep, 0.15))
    small_trainer(tmp_path, devices=2, callbacks=[slow]).fit(small_model(), small_data())


def test_a_port_in_use_is_refused_and_nothing_written(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with refused("MASTER_PORT="):
            small_trainer(tmp_path, devices=1, num_nodes=2).fit(small_model(), small_data())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("devices", ["auto", -1, "-1"])
def test_auto_takes_a_worker_a_core_and_no_more_than_clients(tmp_path, said, devices):
    trainer = small_trainer(tmp_path, devices=devices, cohort_size=1, max_rounds=1)
    trainer.fit(small_model(), small_data())
    assert trainer.fabric.world_size == 1
    assert_names(said(), "trainer.devices=auto", "1 worker")


@pytest.mark.parametrize(("cores", "kwargs"), [(4, {}), (1, {}), (4, {"cohort_size": 1}), (4, {"devices": 2})])
def test_a_run_of_one_worker_names_the_cores_that_it_leaves_idle(tmp_path, said, monkeypatch, cores, kwargs):
    monkeypatch.setattr(launcher, "cpu_count", lambda: cores)
    small_trainer(tmp_path, max_rounds=1, **kwargs).fit(small_model(), small_data())
    lines = [line for line in said().splitlines() if "trainer.devices=1" in line and "auto" in line and "4" in line]
    assert len(lines) == (cores == 4 and not kwargs)


def test_a_worker_has_one_thread_by_default_and_the_program_gets_its_own_back(tmp_path):
    notes = variant(Callback, on_client_end=lambda self, trainer, client: numbers.append(torch.get_num_threads()))()

    numbers, states = [], []
    for threads in (1, 2):
        with launcher.threads(threads):
            trainer = small_trainer(tmp_path, max_rounds=1, callbacks=[notes])
            trainer.fit(small_model(), small_data())
            assert torch.get_num_threads() == threads
        states.append(trainer.server.state)
    assert {*numbers} == {1}
    assert_same_bits(*states)


# ---------------------------------------------------------------------- clusters


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The global model of ``helpers/launched.py`` by one worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "0")
        return launched.fit(tmp_path_factory.mktemp("alone"), "alone")


def assert_saved(folder, state, fits=1, workers=2):
    """Fail unless each fit of a run used this number of workers and ended with a state."""
    assert sorted(path.name for path in folder.iterdir()) == [f"version_{number}" for number in range(fits)]
    for path in folder.iterdir():
        assert f",placed/{workers - 1}/steps," in (path / "metrics.csv").read_text()
        assert_same_bits(torch.load(path / "checkpoints/last.ckpt", weights_only=True)["state_dict"], state)


def as_task(variables, arguments):
    """Fit in this forked process as a task that another program started with these variables."""
    gc.freeze()  # garbage of earlier tests must not be collected here
    os.environ.update(variables)
    launched.main(*arguments)


def fork_tasks(tasks, *arguments):
    """Fork a process for the variables of each task, without importing torch again."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=as_task, args=(variables, arguments)) for variables in tasks]
    for process in processes:
        process.start()
    return processes


def succeed(processes):
    """Wait for processes, which must succeed."""
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.fixture
def torchrun():
    """``torchrun(nodes, restarts)`` is the variables of each worker of nodes with two workers; the store is here."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def tasks(nodes, restarts=0):
        agent = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        size = {"WORLD_SIZE": str(2 * nodes), "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": str(nodes)}
        ranks = [(node, local) for node in range(nodes) for local in range(2)]
        return [
            {**agent, **job, **size, "GROUP_RANK": str(node), "LOCAL_RANK": str(local), "RANK": str(2 * node + local)}
            for node, local in ranks
        ]

    return tasks


def test_two_nodes_give_the_bits_of_one_worker_and_can_fit_twice(tmp_path, alone, torchrun):
    succeed(fork_tasks(torchrun(nodes=2), tmp_path, "nodes", 2))
    assert_saved(tmp_path / "nodes", alone, fits=2, workers=4)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_restart_by_torchrun_resumes_to_the_same_bits(tmp_path, alone, torchrun, nodes):
    first, killed, *rest = fork_tasks(torchrun(nodes=nodes), tmp_path, "restarted", 1, "killed")
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    for other in (first, *rest):
        other.terminate()
        other.join()
        assert other.exitcode
    again = torchrun(nodes=nodes, restarts=1)
    for task in again[: 2 * nodes - 2]:
        task["TORCHELASTIC_RESTART_COUNT"] = "0"  # each node counts its own, and the last one failed
    succeed(fork_tasks(again, tmp_path, "restarted", 1))
    assert_saved(tmp_path / "restarted", alone, workers=2 * nodes)


def test_slurm_tasks_give_the_bits_of_one_worker(tmp_path, alone):
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "12345"}
    job |= {"SLURM_JOB_NAME": "fit", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    tasks = [job | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    succeed(fork_tasks(tasks, tmp_path, "slurm", 1))
    assert_saved(tmp_path / "slurm", alone)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("start", "threads", "how"), [(TORCHRUN, 1, ()), ((), 2, ("several_threads",)), ((), 1, ("no_fork_after_setup",))]
)
def test_a_program_that_is_run_anew_for_each_worker_gives_the_bits_of_one_and_can_fit_twice(
    tmp_path, start, threads, how
):
    path = f"{ROOT}:{ROOT / 'tests'}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    program = (ROOT / "tests" / "helpers" / "launched.py", tmp_path / "runs", "run", "2", *how)
    subprocess.run([sys.executable, *start, *map(str, program)], cwd=ROOT, env=environment, check=True, timeout=600)
    alone = launched.fit(tmp_path, "alone", threads_per_worker=threads)
    assert_saved(tmp_path / "runs" / "run", alone, fits=2)
