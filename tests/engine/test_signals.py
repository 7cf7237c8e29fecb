"""Signals stop a fit: files, resumed runs, leftovers and messages."""

import os
import shlex
import signal
import sys
import threading
from pathlib import Path

import pytest
from helpers.errors import assert_names, warned
from helpers.runs import assert_same_bits, history, plain_sgd_model, sends, small_data, small_trainer
from helpers.tiny import variant

from fl_lightning import Method
from fl_lightning.callbacks import Callback
from fl_lightning.cli import main
from fl_lightning.distributed import signals
from fl_lightning.methods import SCAFFOLD
from fl_lightning.utilities.errors import Interrupted, Terminated

ROOT = Path(__file__).parents[2]
KINDS = {signal.SIGINT: Interrupted, signal.SIGTERM: Terminated, signal.SIGUSR1: Terminated}


class Sends(Method):
    """Sends signals to this process in the second round, when a client begins to train."""

    def __init__(self, *numbers):
        # an iterator, so that each worker sends them once
        self.numbers, self.round = iter(numbers), -1

    def on_round_start(self, server):
        self.round = server.round

    def on_client_start(self, client):
        for number in self.numbers if self.round == 1 else ():
            os.kill(os.getpid(), number)


def fit(tmp_path, *methods, name="run", ckpt_path=None, **kwargs):
    """Three rounds of SCAFFOLD, whose clients' memories lie on disk; returns the trainer and what stopped the fit."""
    given = {"max_rounds": 3, "client_memory": 0.0, "threads_per_worker": 1, "name": name, **kwargs}
    trainer = small_trainer(tmp_path, **given)
    try:
        trainer.fit(plain_sgd_model(), small_data(), [SCAFFOLD(), *methods], ckpt_path)
    except (KeyboardInterrupt, SystemExit) as stopped:
        return trainer, stopped
    return trainer, None


@pytest.fixture(autouse=True)
def _interruptible():
    """Processes that a shell starts in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "0")
        return fit(tmp_path_factory.mktemp("whole"), Sends())[0]


def goes_on(tmp_path, whole, stopped, **kwargs):
    trainer, again = fit(tmp_path, Sends(), ckpt_path=stopped.checkpoint, **kwargs)
    assert again is None
    assert_same_bits(trainer.server.state, whole.server.state)
    assert history(trainer) == history(whole)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]


@pytest.mark.parametrize("number", KINDS)
def test_a_signal_gives_the_round_up_and_the_run_goes_on_to_the_same_bits(tmp_path, whole, number, capfd):
    before = signal.getsignal(number)
    trainer, stopped = fit(tmp_path, Sends(number))
    assert (type(stopped), stopped.status, len(trainer.history)) == (KINDS[number], 128 + number, 1)
    assert signal.getsignal(number) is before
    assert_names(str(stopped), number.name, "round 1", str(stopped.checkpoint))
    # Python says by itself what stopped it where that is a KeyboardInterrupt, and nothing where it is a SystemExit
    assert (str(stopped) in capfd.readouterr().err) == (number != signal.SIGINT)
    goes_on(tmp_path, whole, stopped)


def test_a_run_that_took_the_previous_checkpoint_names_the_one_that_is_there(tmp_path, whole):
    fit(tmp_path, Sends(), max_rounds=2)
    (tmp_path / "run/version_0/checkpoints/last.ckpt").unlink()
    with warned("ckpt_path=", "previous.ckpt"):
        _, stopped = fit(tmp_path, Sends(signal.SIGTERM), ckpt_path="last", devices=2)
    assert stopped.checkpoint.is_file()
    goes_on(tmp_path, whole, stopped)


def test_a_round_is_finished_where_earlier_ones_are_not_saved(tmp_path, whole, capfd):
    how = {"checkpoint_every_n_rounds": 3, "devices": 2}
    trainer, stopped = fit(tmp_path, Sends(), callbacks=[sends(signal.SIGTERM, 0)], **how)
    assert isinstance(stopped, Terminated)
    assert len(trainer.history) == 2
    assert_names(capfd.readouterr().err, "SIGTERM", "round 1")
    goes_on(tmp_path, whole, stopped, **how)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("rank", [1, None])
def test_two_workers_stop_and_leave_nothing(tmp_path, whole, rank, number):
    # SLURM and a terminal tell all of them
    everyone = Sends(*[number] * (rank is None))
    one = [] if rank is None else [sends(number, rank)]
    trainer, stopped = fit(tmp_path, everyone, devices=2, callbacks=one)
    assert type(stopped) is KINDS[number]
    assert len(trainer.history) == 1
    goes_on(tmp_path, whole, stopped, devices=2)


@pytest.mark.parametrize(("once", "rounds"), [(0.0, 1), (300.0, 2)])
def test_a_second_signal_ends_the_run_at_once_unless_it_is_the_same_one_told_twice(tmp_path, monkeypatch, once, rounds):
    monkeypatch.setattr(signals, "ONCE", once)
    trainer, stopped = fit(tmp_path, Sends(signal.SIGTERM, signal.SIGTERM), checkpoint_every_n_rounds=3)
    assert isinstance(stopped, Terminated)
    assert (len(trainer.history), stopped.checkpoint is None) == (rounds, rounds == 1)


def test_a_signal_after_the_last_round_stops_the_program_and_the_run_is_whole(tmp_path):
    at_the_end = variant(Callback, on_fit_end=lambda self, trainer: os.kill(os.getpid(), signal.SIGTERM))()

    trainer, stopped = fit(tmp_path, callbacks=[at_the_end])
    assert isinstance(stopped, Terminated)
    assert (trainer.run_dir / "checkpoints/model.ckpt").is_file()


# ---------------------------------------------------------------------- handlers of the user's


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_handler_of_the_users_is_called_and_given_back(tmp_path, monkeypatch, number):
    calls = []

    def own(number, frame):
        calls.append(number)

    before = signal.signal(number, own)
    try:
        stopped = fit(tmp_path, Sends(number))[1]
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)
    assert calls == [number]
    # SIGUSR1 has the meaning that the user gives it
    assert isinstance(stopped, Terminated) == (number == signal.SIGTERM)


def test_a_fit_in_another_thread_has_no_handlers(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(fit(tmp_path, Sends(), max_rounds=1)[1]))
    thread.start()
    thread.join()
    assert found == [None]


# ---------------------------------------------------------------------- the command line


@pytest.mark.usefixtures("undrawn", "one_parser")
def test_the_line_has_the_command_that_goes_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "sends.py").write_text(SENDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED")
    config = ROOT / "experiments/smoke/scaffold.yaml"
    size = ["--trainer.max_rounds=3", "--data.train_size=200", f"--trainer.default_root_dir={tmp_path / 'runs'}"]
    arguments = ["fit", "--config", str(config), *size, "--trainer.callbacks+=sends.SendsOnce"]
    monkeypatch.setattr(sys, "argv", ["cli.py", *arguments])
    monkeypatch.setattr(sys, "orig_argv", ["python", "cli.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 143
    line = capsys.readouterr().err.splitlines()[-1]
    checkpoint = tmp_path / "runs/scaffold/version_0/checkpoints/last.ckpt"
    assert_names(line, "SIGTERM", "round 1", str(checkpoint))
    command = shlex.split(line.split("resume: ")[1])
    assert command == ["python", "cli.py", *arguments, "--ckpt_path", str(checkpoint)]
    main(command[2:])
    assert "3 rounds" in capsys.readouterr().out


SENDS = """
import os, signal
from fl_lightning.callbacks import Callback

class SendsOnce(Callback):
    def on_client_end(self, trainer, client):
        if trainer.server.round == 1 and not trainer.resumed:
            os.kill(os.getpid(), signal.SIGTERM)
"""
