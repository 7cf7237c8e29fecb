"""Failures outside of the methods: callbacks that raise, a launcher that is killed."""

import multiprocessing
import os
import signal
import sys
import tempfile

import pytest
import torch
from helpers.errors import assert_names, refused
from helpers.runs import plain_sgd_model, small_data, small_model, small_trainer

from fl_lightning.callbacks import Callback
from fl_lightning.distributed.launcher import gc_disabled, init_forked_process
from fl_lightning.engine.run import VisitRunner
from fl_lightning.methods import SCAFFOLD
from fl_lightning.utilities.errors import ClientError


class Fails(Callback):
    """An observer with a mistake that shows in the second round, on some workers."""

    def __init__(self, *ranks):
        self.ranks = ranks

    def on_round_end(self, trainer):
        if trainer.server.round == 1 and trainer.global_rank in self.ranks:
            raise TypeError("my own mistake")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
@pytest.mark.parametrize(("workers", "ranks"), [(1, [0]), (2, [0, 1])])
def test_a_callback_that_raises_keeps_its_exception_and_is_named(tmp_path, workers, ranks):
    with pytest.raises(TypeError, match=r"^my own mistake") as ended:
        small_trainer(tmp_path, devices=workers, callbacks=[Fails(*ranks)]).fit(small_model(), small_data())
    assert ended.value.__notes__ == ["in Fails.on_round_end, round 1"]
    checkpoint = tmp_path / "fedavg/version_0/checkpoints/last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["round"] == 1


def test_a_callback_that_raises_on_another_worker_is_named(tmp_path):
    with refused("round 1", "worker 1", "TypeError", "my own mistake", "Fails.on_round_end", kind=ClientError):
        small_trainer(tmp_path, devices=2, callbacks=[Fails(1)]).fit(small_model(), small_data())


class Killed(Callback):
    """Kills the first worker in the second round."""

    def on_round_start(self, trainer):
        if trainer.server.round == 1 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder):
    """A run of two workers, of which the first is killed."""
    init_forked_process()
    trainer = small_trainer(folder, devices=2, callbacks=[Killed()], client_memory=0.0)
    trainer.fit(plain_sgd_model(), small_data(), SCAFFOLD())


def test_workers_end_with_the_process_that_started_them_and_leave_nothing(tmp_path, monkeypatch, capfd):
    (place := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    reader, writer = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=killed, args=(tmp_path / "runs",))
    with gc_disabled():
        process.start()
    os.close(writer)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert os.read(reader, 1) == b""  # the pipe ends with the last process that holds it
    os.close(reader)
    said = capfd.readouterr().err
    assert_names(said, "worker 1")
    assert "Traceback" not in said
    # that of the first one is removed when another run needs one
    assert len(list(place.glob("fl_lightning-clients-*"))) == 1


def test_without_the_optional_part_auto_trains_sequentially_and_a_number_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fl_lightning.vectorized.runner", None)
    trainer = small_trainer(tmp_path, clients_per_step="auto", max_rounds=1)
    trainer.fit(small_model(), small_data())
    assert type(trainer.run.runner) is VisitRunner and "fl_lightning.vectorized" in trainer.run.runner.reason
    with refused("trainer.clients_per_step=4", "fl_lightning.vectorized", "auto"):
        small_trainer(tmp_path, clients_per_step=4).fit(small_model(), small_data())
