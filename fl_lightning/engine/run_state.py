"""The state of a run beside the global model: in checkpoints, in records of failures, and in messages to sites."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fl_lightning.engine.fingerprint import identity
from fl_lightning.engine.model_io import entries_of_module, state_of_data, storable
from fl_lightning.engine.run import Run


def state_of_round(run: Run) -> dict[str, Any]:
    """What the visits of a round depend on, beside the global state and the clients' memories."""
    return {
        "methods": run.methods.state_dict(),
        "client_schedulers": run.local_training.monitored.state_dict(),
        "scaling": run.local_training.scaling,
        "evaluated": run.worker_module.evaluated,
        "versions": run.versions.state_dict(),
    }


def load_state_of_round(run: Run, saved: Mapping[str, Any], without: Collection[str] = ()) -> None:
    """Load the result of :func:`state_of_round`, except the keys in ``without``, which keep their values."""
    if "methods" not in without:
        run.methods.load_state_dict(saved["methods"], run.fabric.device)
    if "client_schedulers" not in without:
        run.local_training.monitored.load_state_dict(saved["client_schedulers"])
    run.local_training.scaling = saved["scaling"]
    run.worker_module.evaluated = saved["evaluated"]
    run.versions.load_state_dict(saved["versions"], run.fabric.device)


def recorded_state(run: Run) -> dict[str, Any]:
    """The state of a round, of the user's objects, and what the run is, for a file."""
    of_objects = {"module": storable(entries_of_module(run)), "datamodule": state_of_data(run.data)}
    return {**state_of_round(run), **of_objects, **identity(run)}
