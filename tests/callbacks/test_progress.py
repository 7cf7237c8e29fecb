"""What a run says on the console."""

import io
import json
import re
import sys
from functools import partial
from urllib.parse import parse_qs, urlsplit

import pytest
from helpers.runs import fitted, small_data, small_model, small_trainer
from helpers.tiny import variant
from tqdm import tqdm

from fl_lightning.callbacks import Callback, SpectrumMonitor, progress
from fl_lightning.callbacks.progress import round_line
from fl_lightning.core.clock import Clock
from fl_lightning.data import IID
from fl_lightning.engine import cohort_training

fit = partial(fitted, data=partial(small_data, train_size=100), local_steps=1, name="run")


Terminal = variant(io.StringIO, isatty=lambda self: True)


class Fails(Callback):
    def on_client_end(self, trainer, client):
        if trainer.server.round == 1:
            raise RuntimeError("mine")


def test_without_a_terminal_there_is_one_short_line_an_evaluation_and_a_table_at_the_end(tmp_path, capsys):
    trainer = fit(tmp_path, max_rounds=4, eval_every_n_rounds=2)
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line.startswith("round ")]
    assert [line.split(":")[0] for line in lines] == ["round 1/3", "round 3/3"]
    accuracy = f"test/accuracy {100 * trainer.metrics['test/accuracy']:.2f} %"
    assert accuracy in lines[1] and " left" in lines[0] and " left" not in lines[1]
    assert max(map(len, lines)) < 120
    assert "\r" not in said.err and "\x1b" not in said.err
    table = said.err.partition("round 3/3")[2]
    assert re.search(r"test/accuracy +\d+\.\d\d % +[13] +\d+\.\d\d %\n", table)
    assert f"{tmp_path}/run/version_0: " in table


def test_the_first_line_has_the_address_at_which_tensorboard_shows_the_accuracy_first_and_unsmoothed(tmp_path, capsys):
    fit(tmp_path, logger=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "http" in line]
    assert f"tensorboard --logdir {tmp_path}," in line
    asked = parse_qs(urlsplit(line.split()[-1]).query)
    assert asked["smoothing"] == ["0"]
    assert json.loads(asked["pinnedCards"][0]) == [{"plugin": "scalars", "tag": "test/accuracy"}]


@pytest.mark.parametrize("shown", [True, False])
def test_of_several_workers_one_speaks_unless_the_run_is_quiet(tmp_path, capfd, shown):
    fit(tmp_path, devices=2, enable_progress_bar=shown)
    assert capfd.readouterr().err.count("round 1/1: ") == shown


def test_a_terminal_has_bars_too_and_they_are_removed(tmp_path, monkeypatch):
    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, mininterval=0, **kwargs)

    monkeypatch.setattr(progress, "LONG", 0)
    monkeypatch.setattr(progress, "tqdm", Bar)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    fit(tmp_path)
    said = terminal.getvalue()
    assert re.search(r"rounds: 100%.*2/2", said)
    assert re.search(r"round 0: .*[1-4]/4 \[", said)
    assert "round 1/1: test/accuracy" in said
    assert not tqdm._instances


def test_a_run_that_fails_has_no_table_and_leaves_no_bar(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with pytest.raises(RuntimeError, match="mine"):
        fit(tmp_path, callbacks=[Fails()])
    assert "best" not in terminal.getvalue()
    assert not tqdm._instances


def test_a_line_has_what_there_is_of_other_modules():
    metrics = {"round": 1, "lr": 0.1, "val_f1": 0.5, "train/loss": 2e-5, "time/round": 1.0}
    assert round_line(metrics, 1, 10, 1.5) == "round 1/9: val_f1 50.00 %, train/loss 2e-05, 1.5 s a round, 00:12 left"


def test_a_run_of_simulated_seconds_says_how_many_of_them_are_over(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    fit(tmp_path, max_rounds=1000, max_seconds=7.0, clock=Clock(step_seconds=0.0, latency=2.0))
    heading, *lines = re.split("[\r\n]+", terminal.getvalue())
    assert "3 rounds in 7 simulated seconds" in heading and "1000" not in terminal.getvalue()
    texts = [re.sub(r": .*round", "", line) for line in lines if line.startswith("round ") and ": test/" in line]
    assert [text.split(",")[:2] for text in texts] == [
        ["round 0/2", " 2 simulated seconds"],
        ["round 1/2", " 4 simulated seconds"],
        ["round 2/2", " 6 simulated seconds"],
    ]
    assert [" left" in text for text in texts] == [True, True, False]
    assert re.search(r"rounds: 100%.*3/3", terminal.getvalue())


@pytest.mark.vectorized
def test_the_bar_does_not_slow_down_clients_side_by_side(tmp_path, monkeypatch):
    """Clients that nothing observes one by one send their updates at once; the bar only counts them."""
    groups, add_rows = [], cohort_training.add_rows
    monkeypatch.setattr(
        cohort_training, "add_rows", lambda run, rows, *how: (groups.append(rows.clients), add_rows(run, rows, *how))
    )
    trainer = small_trainer(tmp_path, max_rounds=1, clients_per_step=4, callbacks=[SpectrumMonitor()])
    trainer.fit(small_model(), small_data(partitioner=IID()))
    assert [*map(list, groups)] == [[0, 1, 2, 3]]
