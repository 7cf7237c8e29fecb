"""The program imports no more than a command needs, and ends with one line where Ctrl-C is pressed meanwhile."""

import json
import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import helpers
import pytest
from helpers.bad_input import WITHOUT_TORCH
from helpers.errors import assert_names
from helpers.reports import write_run

import fl_lightning
from fl_lightning import cli
from fl_lightning.cli import entry_point
from fl_lightning.cli.config_files import keys_of
from fl_lightning.cli.entry_point import COMMANDS
from fl_lightning.trainer import FederatedTrainer

PATH = os.pathsep.join(filter(None, [str(Path(helpers.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
# a step after another in one process; of each, what it imports beside the standard library
STEPS = """
import contextlib, io, json, sys

def modules():
    return {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__mp_main__"}

def step(*words):
    before, said = modules(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main(list(words))
    told.append([sorted(modules() - before), said.getvalue()])

args, sys.argv = sys.argv[1:], ["cli.py"]
told, before = [], modules()
from fl_lightning.cli import main
assert modules() - before == {"fl_lightning"}, modules() - before
"""
APART = """
step("--help")
import fl_lightning
assert len(fl_lightning.load_runs(args[0])) == 1
step("report", args[0], "--output", args[1])
import fl_lightning.bench.scheduler, fl_lightning.bench.worker_client
step("bench", "nowhere.yaml")
from helpers.bad_input import WITHOUT_TORCH
for words, _, text in WITHOUT_TORCH:
    with open(args[2], "w") as file:
        file.write(text)
    step(*(word.format(file=args[2]) for word in words))
"""
TRAINER = """
import lightning.pytorch.cli
config = ["fit", "--config", "experiments/smoke/fedavg.yaml"]
step(*config, "--trainer.max_round", "3")
step(*config, "--print_config")
import fl_lightning.data
"""
TOLD = "print(json.dumps([told, sorted(modules())]))"


def steps(folder, code, *args):
    """Run a program in a folder; return the imports and the output of each step, and all imports."""
    given = [sys.executable, "-c", STEPS + code + TOLD, *map(str, args)]
    how = {
        "cwd": folder,
        "env": {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": PATH},
        "timeout": 1800,
        "check": False,
    }
    ended = subprocess.run(given, capture_output=True, text=True, **how)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def apart(request, tmp_path_factory):
    """The folder of a run and its report, and what the program told that made the report."""
    folder = tmp_path_factory.mktemp("apart")
    write_run(folder / "runs" / "fedavg" / "version_0", rounds=3, measured=False)
    where = (folder / "runs", folder / "page.html", folder / "given.yaml")
    return folder, steps(request.config.rootpath, APART, *where)


def test_help_runs_reports_and_suites_need_no_torch(apart):
    """In a process that has imported it, the heartbeat's thread and the database's connections would be forked."""
    (help_, report, bench, *_), imported = apart[1]
    assert help_[0] == []
    lines = [line.split() for line in help_[1].splitlines()]
    assert [line[0] for line in lines if line and line[0] in COMMANDS] == list(COMMANDS)
    assert "1 run: " in report[1] and "optuna" not in report[0]
    assert_names(bench[1], "error: SUITE='nowhere.yaml'")
    assert not {"torch", "lightning", "torchvision"} & set(imported)


def test_a_bad_file_or_key_is_refused_without_torch(apart):
    told, imported = apart[1]
    lines = [said for _, said in told[-len(WITHOUT_TORCH) :]]
    for line, (_, names, _) in zip(lines, WITHOUT_TORCH, strict=True):
        assert line.startswith("error: ") and line.count("\n") == 1
        assert_names(line, *names)
    assert not {"torch", "lightning"} & set(imported)


@pytest.mark.parametrize("command", FederatedTrainer.commands)
def test_the_keys_that_are_read_from_the_source_are_those_of_the_trainer(command):
    of_command = signature(getattr(FederatedTrainer, command)).parameters
    assert {*of_command} - {"self", "model", "datamodule"} <= {*keys_of(command)}
    assert [f"trainer.{name}" for name in signature(FederatedTrainer).parameters] == [
        key for key in keys_of(command) if key.startswith("trainer.")
    ]


def test_a_report_is_the_same_in_every_process_but_for_the_commands_on_it(apart, tmp_path):
    cli.main(["report", str(apart[0] / "runs"), "--output", str(tmp_path / "page.html")])
    pages = [(folder / "page.html").read_text() for folder in (apart[0], tmp_path)]
    first, second = (re.sub("<code>.*?</code>", "", page, flags=re.DOTALL) for page in pages)
    assert first == second


@pytest.mark.thorough
def test_a_config_is_printed_or_refused_without_the_libraries_that_training_needs(request):
    """Lightning itself imports torchvision, SciPy and Matplotlib where they are installed."""
    (refused, printed), _ = steps(request.config.rootpath, TRAINER)
    assert "max_round" in refused[1] and "class_path: ImageClassifier" in printed[1].replace("fl_lightning.models.", "")
    # small ones, for a data set, a bar of progress, and the number of cores
    small = {"fl_lightning", "attr", "attrs", "ijson", "tqdm", "joblib", "cloudpickle", "psutil"}
    imported = {*refused[0], *printed[0]}
    assert imported <= small, imported


def test_the_names_of_the_package_are_imported_when_they_are_used():
    for name in fl_lightning.__all__:
        assert getattr(fl_lightning, name).__name__ == name and name in dir(fl_lightning)
    assert fl_lightning.methods.FedProx.__name__ == "FedProx"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fl_lightning.nothing  # noqa: B018


def test_the_commands_are_those_of_the_trainer_and_of_suites_and_reports():
    assert set(COMMANDS) == {*FederatedTrainer.commands, *entry_point.APART}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["fti", "--config", "x.yaml"], ["error: fti", *COMMANDS, "fit?"]),
        (["Report"], ["error: Report", *COMMANDS, "report?"]),
        (["x.yaml"], ["error: ", "fit --config", "x.yaml"]),
        (["--config", "x.yaml"], ["error: ", "fit --config", "x.yaml"]),
        ([], ["COMMAND", *COMMANDS]),
    ],
)
def test_a_command_that_is_mistyped_or_left_out_is_told_the_commands(capsys, monkeypatch, words, named):
    monkeypatch.setattr(entry_point, "import_module", lambda name: pytest.fail(f"it imports {name}"))
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert_names(capsys.readouterr().err.strip(), *named)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["/opt/venv/bin/python3.11", "cli.py"], "python3.11 cli.py"),
        (["/opt/venv/bin/python", "-m", "fl_lightning.cli"], "python -m fl_lightning.cli"),
        (["/opt/venv/bin/python", "/opt/venv/bin/fl-lightning"], "fl-lightning"),
    ],
)
def test_usage_shows_the_program_without_the_folder_of_the_interpreter(capsys, monkeypatch, given, shown):
    monkeypatch.setattr(sys, "argv", [given[-1], "--help"])
    monkeypatch.setattr(sys, "orig_argv", [*given, "--help"])
    cli.main()
    assert capsys.readouterr().out.startswith(f"usage: {shown} COMMAND")


def test_the_program_has_a_name_after_a_script_has_put_other_arguments_into_argv(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/opt/venv/bin/python", "script.py"])
    monkeypatch.setattr(sys, "argv", ["script.py", "--device", "cpu"])
    assert entry_point.program() == "python"


def test_the_version_is_printed(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"{fl_lightning.__version__}\n"


def test_ctrl_c_during_an_import_is_one_line(monkeypatch, capsys):
    def import_module(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(entry_point, "import_module", import_module)
    for command in ("fit", "bench"):
        with pytest.raises(SystemExit, match="130"):
            cli.main([command])
        assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.thorough
def test_a_command_of_the_trainer_ends_silently_where_its_reader_closes_the_pipe(tmp_path):
    words = f"-u -m fl_lightning.cli partition --config smoke/fedavg --trainer.default_root_dir={tmp_path}"
    given = ["bash", "-o", "pipefail", "-c", f"{sys.executable} {words} | true"]
    ended = subprocess.run(given, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 141 and "error" not in ended.stderr.lower(), ended.stderr
