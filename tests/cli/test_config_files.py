"""A file that is the value of a key is read with the same checks as a config, and so is a value of a command line."""

import sys

import pytest
from helpers.bad_input import BASE
from helpers.errors import assert_names, refused

from fl_lightning.cli import main
from fl_lightning.cli.program import began_as

TWICE = "class_path: Dirichlet\nclass_path: IID\n"


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path, one_parser):
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "names.yaml").write_text("data: {init_args: {partitioner: inner.yaml}}\n")


def line_of(capsys, *args):
    """The line with which a fit is refused."""
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "base.yaml", *args])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    return next(line for line in said.splitlines() if line.startswith("error: ")).removeprefix("error: ")


@pytest.mark.parametrize(
    ("args", "content"),
    [
        (["--config", "names.yaml"], TWICE),
        (["--trainer", "inner.yaml"], "name: a\n\tmax_rounds: 1\n"),
        (["--model.optimizer", "inner.yaml"], "class_path: torch.optim.SGD\ninit_args: {lr: 010}"),
        (["--trainer.callbacks+", "inner.yaml"], "- class_path: CCVR\n  class_path: CCVR"),
    ],
)
def test_a_damaged_file_that_is_the_value_of_a_key_is_refused_with_its_place(capsys, tmp_path, args, content):
    (tmp_path / "inner.yaml").write_text(content)
    assert line_of(capsys, *args).startswith("inner.yaml, line 2, column ")


def test_a_sound_file_that_is_the_value_of_a_key_is_read(capsys, tmp_path):
    (tmp_path / "inner.yaml").write_bytes("\ufeffclass_path: Dirichlet\ninit_args: {alpha: 1e-1}\n".encode())
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "base.yaml", "--config", "names.yaml", "--print_config"])
    assert "alpha: 0.1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.partitioner", "{class_path: IID, class_path: Dirichlet}"),
        ("config", "{trainer: {name: a}, trainer: {name: b}}"),
        ("data.mean", "[010]"),
    ],
)
def test_a_value_of_which_something_would_be_lost_is_refused_with_its_key(capsys, key, value):
    assert_names(line_of(capsys, f"--{key}", value), f"{key.partition('.')[0]}: ", "line 1, column")


def test_a_text_need_not_be_yaml(capsys):
    for name in ("1:30", "{a: 1, a: 2}"):
        with pytest.raises(SystemExit, match="0"):
            main(["fit", "--config", "base.yaml", f"--trainer.name={name}", "--data.num_clients=010", "--print_config"])
        config = capsys.readouterr().out
        assert f"name: {name}\n" in config.replace("'", "") and "num_clients: 10\n" in config


def test_a_run_does_not_resume_beside_a_damaged_config(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\na: 2\n")
    with refused("config.yaml"):
        began_as({}, tmp_path / "config.yaml")
