"""The clients that failed in a round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fl_lightning.engine.identity.changes import identity
from fl_lightning.engine.model_files import entries_of_module, state_of_data, storable
from fl_lightning.errors import ClientError, UsageError, text_of
from fl_lightning.records.files import save

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run

# failures of a run whose visits are recorded: each file holds a model
MOST = 10


class Failures:
    """The clients that failed in a round, on any worker.

    Attributes:
        messages: for each client, whether its error is a UsageError, and the text of the error.
    """

    def __init__(self) -> None:
        self.messages: dict[int, tuple[bool, str]] = {}
        self._errors: dict[int, Exception] = {}

    def __len__(self) -> int:
        return len(self.messages)

    def add(self, k: int, error: Exception) -> None:
        """Record that client ``k`` failed on this worker."""
        self.messages[k] = (isinstance(error, UsageError), str(error))
        self._errors[k] = error

    def take(self, messages: dict[int, tuple[bool, str]]) -> None:
        """Record the clients that failed on another worker."""
        self.messages = dict(sorted((self.messages | messages).items()))

    def texts(self) -> list[str]:
        """The texts of the errors, by ascending client."""
        return [text for _, text in self.messages.values()]

    def throw(self, run: Run) -> NoReturn:
        """Raise the error of the first client; it keeps its cause only if the client failed on this worker."""
        k, (usage, text) = next(iter(self.messages.items()))
        error = self._errors.get(k) or (UsageError(text) if usage else ClientError(text))
        path = record_path(run, k)
        if isinstance(error, ClientError) and path is not None and path.is_file():
            error.record = path
        raise error


def record_path(run: Run, k: int) -> Path | None:
    """The file that records a visit of client ``k`` in the present round; None where the run writes nothing."""
    folder = run.folder.shared
    return None if folder is None else folder / "failures" / f"round-{run.server.round}-client-{k}.pt"


def record_failure(run: Run, k: int, error: Exception) -> None:
    """Write what the command ``replay`` needs to repeat the visit of client ``k`` that has just failed on this worker.

    Only the first :data:`MOST` failures of a run are recorded.
    """
    path = record_path(run, k)
    if path is None or len(list(path.parent.glob("*.pt"))) >= MOST:
        return
    try:
        save(contents_of_failure(run, k, error), path)
    except Exception as problem:  # whatever it is, the failure itself is what the user has to see
        run.trainer.warn(f"{path} could not be written: {text_of(problem)}")


def contents_of_failure(run: Run, k: int, error: Exception) -> dict[str, Any]:
    """Everything that the visit of client ``k`` in the present round depends on, beside the config and the data."""
    server, client = run.server, run.client
    term = client.resident.logged.first_bad_term()
    what = {"error": str(error), "term": term[0] if term else None, "step": term[1] if term else client.num_steps}
    return {
        "failure": {"round": server.round, "client": k, **what},
        "state_dict": server.state,
        "cohort": server.cohort,
        "memory": client.memories().get(k, {}),
        "methods": run.methods.state_dict(),
        "module": storable(entries_of_module(run)),
        "datamodule": state_of_data(run.data),
        "client_schedulers": run.local_training.monitored.state_dict(),
        "evaluated": client.resident.evaluated,
        "threads": torch.get_num_threads(),
        **identity(run),
    }
