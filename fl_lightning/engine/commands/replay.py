"""Repeats the visit of one client in a single process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_lightning.core.systems import SystemOutcome
from fl_lightning.distributed.launcher import threads
from fl_lightning.engine.checkpointing import restore_run, verified_checkpoint
from fl_lightning.engine.cohort_training import follow_schedule, plan_round
from fl_lightning.engine.commands.fit import begin_fit
from fl_lightning.engine.fingerprint import description_of, differences, identity, message
from fl_lightning.engine.model_io import call_on_load, load_state, restore_data
from fl_lightning.engine.run import Run
from fl_lightning.engine.run_state import load_state_of_round
from fl_lightning.storage.checkpoint import read
from fl_lightning.utilities.errors import UsageError, count, require


def replay(
    run: Run,
    ckpt_path: str | Path | None,
    round_: int,
    client: int,
    weights: Path | None = None,
    allow_changes: bool = False,
) -> dict[str, float]:
    """Repeat the visit of ``client`` in round ``round_`` from the record of its failure, or from a checkpoint.

    Afterwards the worker's module holds the client's model. ``weights``, from which the run began, are ignored.
    With ``allow_changes`` the run may differ from the one that wrote the file, for example in its learning rate.
    Returns the number of local steps, the last learning rate, and the logged values.
    """
    hint = "a replay is one process; start it without torchrun or srun"
    require(run.workers.size == 1, "trainer.world_size", run.workers.size, hint)
    hint = "pass RUN/failures/round-R-client-K.pt, or the checkpoint of the preceding rounds"
    require(ckpt_path is not None, "ckpt_path", ckpt_path, hint)
    rounds, clients = run.trainer.max_rounds, run.data.num_clients
    of_rounds = f"pass a round from 0 to {rounds - 1}, or a larger trainer.max_rounds"
    require(0 <= round_ < rounds, "round", round_, of_rounds)
    require(0 <= client < clients, "client", client, f"pass a client from 0 to {clients - 1}")
    source = verified_checkpoint(run, ckpt_path)
    assert source is not None
    contents = read(source)
    require("description" in contents, "ckpt_path", str(source), hint)
    # the bits depend on the threads of the worker that trained the client
    with threads(contents["description"]["trainer"]["threads_per_worker"]):
        run.methods.on_fit_start(run.server)
        run.runner.prepare(run)
        follow_schedule(run)
        description_of(run).pop("code", None)  # a replay may test corrected code
        restore = restore_failure if "failure" in contents else restore_round
        restore(run, source, contents, round_, client, allow_changes)
        begin_fit(run, fresh=False)
        run.worker_module.begin_round(round_)
        run.versions.begin_round(round_, run.client.travelling)
        # the cohort of a changed run may differ
        systems = dict.fromkeys((*run.server.cohort, client), SystemOutcome()) | plan_round(run, round_).systems
        work = {k: system.work for k, system in systems.items()}
        steps = {k: run.local_training.steps(k, work[k]) for k in run.server.cohort}
        run.runner.repeat(run, client, round_, steps, work)
    if "failure" in contents:
        run.trainer.warn(f"in the run it failed: {contents['failure']['error']}")
    return {"steps": run.client.num_steps, "lr": run.client.lr, **run.client.metrics}


def restore_failure(
    run: Run, path: Path, record: dict[str, Any], round_: int, client: int, allow_changes: bool
) -> None:
    """Restore the server, the methods and the client's memory from the record of a failure."""
    failure = record["failure"]
    require(failure["round"] == round_, "round", round_, f"{str(path)!r} is of round {failure['round']}; pass it")
    require(failure["client"] == client, "client", client, f"{str(path)!r} is of client {failure['client']}; pass it")
    changes = differences(identity(run), record)
    if changes and not allow_changes:
        hint = "restore the old values, or try the new ones with --allow_changes true"
        raise UsageError(message(path, changes, hint))
    call_on_load(run, record)
    restore_data(run.data, record["datamodule"])
    run.server.begin_round(round_, record["cohort"])
    restore_server(run, path, record)
    # the hook may set attributes that no file holds; the record already has its changes of the server values
    run.methods.on_round_start(run.server)
    restore_server(run, path, record)
    load_state_of_round(run, record, without=["methods"])
    for k, memory in {**record["memories"], client: record["memory"]}.items():
        if memory:
            run.client.memories().visited(k).update(memory)
            run.client.memories().commit_visit(k)  # its visit moves it to the device


def restore_server(run: Run, path: Path, record: dict[str, Any]) -> None:
    """Load the global state and the methods' server values from a record."""
    load_state(run.client.module, record["state_dict"], "ckpt_path", path)
    run.server.assign(run.client.state())
    try:
        run.methods.load_state_dict(record["methods"], run.fabric.device)
    except KeyError as error:
        raise UsageError(f"ckpt_path={str(path)!r}: not a record of this run: it has no {error}") from error


def restore_round(
    run: Run, path: Path, checkpoint: dict[str, Any], round_: int, client: int, allow_changes: bool
) -> None:
    """Restore the checkpoint after ``round_`` rounds, and begin the next round."""
    rounds_done = checkpoint["round"]
    hint = f"{str(path)!r} has {count(rounds_done, 'round')} done; pass round {rounds_done}, or another checkpoint"
    require(rounds_done == round_, "round", round_, hint)
    restore_run(run, path, allow_changes)
    run.server.begin_round(round_, plan_round(run, round_).cohort)
    clients = ", ".join(map(str, sorted(run.server.cohort)))
    require(client in run.server.cohort, "client", client, f"the clients of round {round_} are {clients}")
    run.methods.on_round_start(run.server)
