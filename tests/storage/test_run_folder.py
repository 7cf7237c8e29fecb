"""The folder of a run, where loggers fail and the disk is full."""

import multiprocessing
import os
import resource
import warnings
from functools import partial

import pytest
import torch
from helpers.errors import refused
from helpers.runs import Removes, assert_same_bits, fitted, plain_sgd_model, small_data
from lightning.fabric.loggers import CSVLogger, Logger

from fl_lightning.callbacks import Callback, SpectrumMonitor
from fl_lightning.methods import MOON
from fl_lightning.utilities.errors import ClientError, UsageError


@pytest.fixture(autouse=True)
def _undrawn(undrawn):
    """Figures are not tested here."""


class Unreachable(Logger):
    """A logger whose server is down."""

    name, version, root_dir = "unreachable", 0, None

    def _fails(self, *args, **kwargs):
        raise ConnectionError("no route to host")

    experiment = property(_fails)
    log_metrics = log_hyperparams = finalize = _fails


DATA = partial(small_data, num_clients=2, train_size=60, test_size=30)
fit = partial(fitted, methods=lambda: [MOON()], model=plain_sgd_model, data=DATA, max_rounds=3, name="run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is never disturbed."""
    return fit(tmp_path_factory.mktemp("whole"))


def test_a_run_does_not_depend_on_its_loggers(tmp_path, whole):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = fit(tmp_path, logger=[Unreachable(), CSVLogger(tmp_path / "theirs")])
    assert_same_bits(whole.server.state, trainer.server.state)
    texts = [str(one.message) for one in told if "logger" in str(one.message)]
    assert texts == ["logger: Unreachable fails, and the run continues: no route to host"]
    assert len(list((tmp_path / "theirs").rglob("metrics.csv"))) == 1


class DiskFull(Callback):
    """From the second round on, no file may grow beyond some bytes."""

    def __init__(self, size):
        self.size = size

    def on_round_start(self, trainer):
        if trainer.server.round == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))


@pytest.fixture
def _room_again():
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("size", "file", "writers"),
    [
        (4096, "version_0/checkpoints/", {}),
        (0, "version_0/metrics.csv", {}),
        (0, "version_0/spectra.npz", {"callbacks": [SpectrumMonitor()]}),
        (0, "0.pt", {"client_memory": 1e-9}),
    ],
)
@pytest.mark.filterwarnings("ignore:logger. CSVLogger fails")  # where its file is the one that finds no room
@pytest.mark.usefixtures("_room_again")
def test_a_full_disk_ends_the_run_by_one_line_and_the_last_checkpoint_stands(tmp_path, whole, size, file, writers):
    with refused("round 1", f"/{file}", kind=ClientError) as ended:
        fit(tmp_path, **{**writers, "callbacks": [DiskFull(size), *writers.get("callbacks", [])]})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # no cause: the command line prints the line alone
    assert ended.value.__cause__ is None
    checkpoint = tmp_path / "run/version_0/checkpoints/last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["round"] == 1
    assert_same_bits(whole.server.state, fit(tmp_path, ckpt_path="last", **writers).server.state)
    assert (tmp_path / "run/version_0/metrics.csv").read_text().count("\n") == 4


def test_a_run_folder_that_is_removed_is_named(tmp_path):
    with refused("round 1", "version_0", kind=ClientError):
        fit(tmp_path, callbacks=[Removes(tmp_path / "run/version_0")])


def in_another_process(work):
    """Return the text of ``work`` in a separate process."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put(work()))
    process.start()
    text = queue.get()
    process.join()
    return text


class MeetsAnother(Callback):
    """Lets another process resume the run in its second round."""

    def __init__(self, tmp_path):
        self.tmp_path, self.text, self.written = tmp_path, "", None

    def on_round_start(self, trainer):
        if trainer.server.round == 1:
            before = table(self.tmp_path)
            self.text = in_another_process(self.resume)
            assert table(self.tmp_path) == before

    def resume(self):
        try:
            fit(self.tmp_path, ckpt_path="last")
        except UsageError as error:
            return str(error)
        return "resumed"


def table(tmp_path):
    return (tmp_path / "run/version_0/metrics.csv").read_text()


def test_a_run_that_another_process_goes_on_with_is_not_resumed(tmp_path):
    meets = MeetsAnother(tmp_path)
    fit(tmp_path, callbacks=[meets])
    assert meets.text.startswith("ckpt_path=") and f"process {os.getpid()} on" in meets.text
    # it can be once the other one has ended, and by the process itself
    fit(tmp_path, ckpt_path="last")
    assert in_another_process(meets.resume) == "resumed"
