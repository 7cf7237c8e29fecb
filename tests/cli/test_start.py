"""The program imports no more than a command needs."""

import ast
import signal
import subprocess
import sys
from types import ModuleType

import pytest
from helpers.errors import assert_names

import fl_lightning
from fl_lightning import cli
from fl_lightning.cli import start
from fl_lightning.cli.arguments import COMMANDS
from fl_lightning.trainer import FederatedTrainer

CHECK = """
import sys
import fl_lightning, fl_lightning.bench, fl_lightning.bench.driver, fl_lightning.bench.runner, fl_lightning.cli.bench
from fl_lightning.cli import main
try:
    main(["bench", "nowhere.yaml"])
except SystemExit as ended:
    assert ended.code == 2
print([name for name in ("torch", "lightning", "torchvision") if name in sys.modules], fl_lightning.__version__)
"""


def test_bench_never_imports_torch():
    """In a process that has imported it, the heartbeat's thread and the database's connections would be forked."""
    ended = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True, timeout=1800)
    assert ended.stdout.strip() == "[] 0.1.0"
    assert_names(ended.stderr.strip(), "error: nowhere.yaml")


@pytest.mark.parametrize("name", fl_lightning.__all__)
def test_the_names_of_the_package_are_imported_when_they_are_used(name):
    assert getattr(fl_lightning, name).__name__ == name and name in dir(fl_lightning)


def test_the_parts_of_the_package_are_imported_when_they_are_used():
    assert fl_lightning.methods.FedProx.__name__ == "FedProx"
    assert cli.FederatedCLI.__name__ == "FederatedCLI"
    for module in (fl_lightning, cli):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            module.nothing  # noqa: B018


HELP = """
import sys
from fl_lightning.cli import main
try:
    main(["--help"])
except SystemExit as ended:
    assert not ended.code
print([name for name in ("torch", "lightning", "numpy", "jsonargparse") if name in sys.modules], file=sys.stderr)
"""
# what a command on a config imports beyond Lightning's own command line
CONFIG = """
import sys
import lightning.pytorch.cli
before = {name.partition(".")[0] for name in sys.modules}
from fl_lightning.cli import main
sys.argv = ["cli.py"]
try:
    main(["fit", "--config", "experiments/smoke/fedavg.yaml", *REST])
except SystemExit as ended:
    print(sorted({name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))
"""


def ended_program(code, request):
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=request.config.rootpath, timeout=1800
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def test_the_help_lists_all_commands_and_imports_no_library(request):
    ended = ended_program(HELP, request)
    assert ended.stderr == "[]\n"
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [line[0] for line in lines if line and line[0] in COMMANDS] == list(COMMANDS)


@pytest.mark.parametrize(("rest", "status"), [(["--print_config"], 0), (["--trainer.max_round", "3"], 2)])
def test_a_config_is_printed_or_refused_without_the_libraries_that_training_needs(request, rest, status):
    """Lightning itself imports torchvision, SciPy and Matplotlib where they are installed."""
    ended = ended_program(CONFIG.replace("REST", repr(rest)), request)
    assert ("max_round" in ended.stderr) == (status == 2)
    imported = ast.literal_eval(ended.stdout.splitlines()[-1])
    # small ones, for a data set and a bar of progress
    assert set(imported) <= {"fl_lightning", "attr", "attrs", "ijson", "tqdm"}, imported


def test_the_commands_are_those_of_the_trainer_and_of_suites_and_reports():
    assert set(COMMANDS) == {*FederatedTrainer.commands, *start.APART}


def refused(capsys, monkeypatch, *words):
    monkeypatch.setattr(start, "import_module", lambda name: pytest.fail(f"it imports {name}"))
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("typed", "meant"), [("fti", "fit"), ("becnh", "bench"), ("tunee", "tune"), ("Report", "report")]
)
def test_a_mistyped_command_is_told_the_nearest_of_all(capsys, monkeypatch, typed, meant):
    line = refused(capsys, monkeypatch, typed, "--config", "x.yaml")
    assert_names(line, f"error: {typed}", *COMMANDS)
    assert line.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("words", [[], ["x.yaml"], ["--config", "x.yaml"]])
def test_a_command_that_is_left_out_is_named_with_the_line_that_has_it(capsys, monkeypatch, words):
    assert_names(refused(capsys, monkeypatch, *words), "error: ", "fit --config", words[-1] if words else "FILE")


def test_the_version_is_printed(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"{fl_lightning.__version__}\n"


def pressed(monkeypatch, meanwhile):
    """Ctrl-C is pressed during an import, which ``meanwhile`` goes on with; returns the handler of then."""
    handlers = []

    def import_module(name):
        handlers.append(signal.getsignal(signal.SIGINT))
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            meanwhile()
        return ModuleType(name)

    monkeypatch.setattr(start, "import_module", import_module)
    return handlers


def as_an_extension():
    raise ImportError("numpy.core.multiarray failed to import")


def as_python():
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C interrupts, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("meanwhile", [as_python, as_an_extension, lambda: None])
@pytest.mark.parametrize("command", ["fit", "bench", "tune", "report"])
def test_ctrl_c_during_an_import_is_one_line(monkeypatch, capsys, command, meanwhile):
    before = signal.getsignal(signal.SIGINT)
    pressed(monkeypatch, meanwhile)
    with pytest.raises(SystemExit) as ended:
        cli.main([command])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_import_that_fails_keeps_its_traceback_and_an_ignored_signal_stays_ignored(monkeypatch):
    monkeypatch.setattr(start, "import_module", lambda name: as_an_extension())
    with pytest.raises(ImportError, match="numpy"):
        cli.main(["fit"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        handlers = pressed(monkeypatch, as_python)
        assert start.imported("fl_lightning.cli.bench").__name__ == "fl_lightning.cli.bench"
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.SIG_IGN]


# the first import of torch is where most of the seconds go
WHILE_IMPORTING = """
import signal, sys

class Press:
    def find_spec(self, name, *rest):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Press())
sys.argv = ["cli.py", "fit", "--config", "nowhere.yaml"]
import runpy
runpy.run_path("cli.py", run_name="__main__")
"""


def test_ctrl_c_while_torch_is_imported_is_one_line(request):
    ended = subprocess.run(
        [sys.executable, "-c", WHILE_IMPORTING],
        capture_output=True,
        text=True,
        cwd=request.config.rootpath,
        timeout=1800,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")
