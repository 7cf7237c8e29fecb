"""Every program outside the package runs in a tiny form, through its own command line and without mocks."""

import importlib.util
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from helpers.tiers import sample

ROOT = Path(__file__).resolve().parent.parent
# parts of the programs, the method of a guide, programs that need other libraries, modules of suites, the settings and
# examples of the site, and what runs its notebooks, which test_notebooks.py does
NO_PROGRAMS = (
    "experiments/gpu/parts.py",
    "experiments/gpu/smoke_runs.py",
    "experiments/speed/sides/",
    "experiments/own_method/",
    "experiments/libraries/",
    "experiments/papers/fedcka/",
    "experiments/papers/fedlc/",
    "experiments/papers/programs/protocol_variants.py",
    "experiments/papers/programs/quotes.py",
    "experiments/papers/scaled/",
    "docs/conf.py",
    "docs/class_examples.py",
    "docs/make_notebooks.py",
)
FILES = [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "docs").glob("*.py")]
PROGRAMS = [name for path in sorted(FILES) if not (name := str(path.relative_to(ROOT))).startswith(NO_PROGRAMS)]
SMALL = "--images 64 --test 64"
ON_CPU = "--device cpu --tiny --seconds 1800 --output FOLDER"
# installed frameworks, and one that is reported as missing
INSTALLED = [peer for peer, package in (("flower", "flwr"), ("pfl-2", "pfl")) if importlib.util.find_spec(package)]
PEERS = " ".join(["bare-2", *INSTALLED, "fluke"])
# the arguments of one or several runs of each; FOLDER is a folder that has nothing but the page of the figures
TINY = {
    "docs/make_asynchronous.py": ["--output FOLDER"],
    "docs/make_front.py": ["--output FOLDER"],
    "docs/make_leaderboard.py": ["--output FOLDER"],
    "docs/make_lightning_page.py": ["--output FOLDER"],
    "docs/make_methods.py": ["--output FOLDER"],
    "docs/make_pictures.py": ["--output FOLDER"],
    "docs/make_screenshot.py": ["--browser nowhere"],
    "experiments/gpu/check.py": ["--list", f"{ON_CPU} --jobs 2 --slow 10"],
    "experiments/gpu/evidence.py": [f"{ON_CPU} --only method=FedAvg"],
    "experiments/gpu/speed.py": ["--list", f"{ON_CPU} --slow 10"],
    "experiments/papers/programs/make_figures.py": ["--docs FOLDER"],
    "experiments/papers/programs/make_results.py": ["--output FOLDER"],
    "experiments/papers/programs/pretrain.py": ["--offline --epochs 1 --output FOLDER/pretrained.pt"],
    "experiments/reliability/bad_input.py": ["'mu null'"],
    "experiments/reliability/bench_kill.py": ["--seeds 1 --alphas 0.1 --parts 1"],
    "experiments/reliability/endurance.py": ["--rounds 4 --clients 5"],
    "experiments/reliability/fuzz.py": ["--only 0 8 --jobs 1"],
    "experiments/reliability/torture.py": ["--kills 2 --corruptions 2 --seed 3 --cases SCAFFOLD"],
    "experiments/speed/callbacks.py": [
        "--clients 2 --images 128 --test 64 --width 1 --callbacks CostLedger LocalLosses"
    ],
    "experiments/speed/calls.py": ["--list"],
    "experiments/speed/data.py": ["--batches 2 --rounds 1"],
    "experiments/speed/federation.py": [f"--show {ROOT}/experiments/speed/federation.json"],
    "experiments/speed/groups.py": ["--models Logistic --sizes 1 8 --turns 1 --rounds 2 --output FOLDER/groups.csv"],
    "experiments/speed/limit.py": [f"--pairs 1 {SMALL}"],
    "experiments/speed/footprint.py": ["--methods FedUV --width 64 --clients 1 --places"],
    "experiments/speed/methods.py": ["--methods MOON --cycles 1 --model FedCKACNN --images 64"],
    "experiments/speed/overhead.py": [f"--pairs 1 {SMALL}"],
    "experiments/speed/peers.py": [
        f"--turns 1 --peers {PEERS} --ours 'float32, channels_last' {SMALL}",
        "--case synthetic --clients 3 --turns 1 --sides loop-1 fedjax-pmap --output FOLDER/results.json",
        "--case femnist --clients 4 --cohort 2 --turns 1 --sides vmap-1 fedjax-1",
        "--show FOLDER/results.json",
    ],
    "experiments/speed/report.py": ["--runs 2 --rounds 3 --clients 2 --turns 1"],
    "experiments/speed/scaling.py": [
        f"workers --pairs 1 --counts 1 2 {SMALL}",
        "clients --numbers 3 --rounds 1",
        "memory --rounds 4 --cohorts 2",
    ],
    "experiments/theory/label_margins.py": ["--draws 1"],
    "experiments/theory/neural_collapse.py": ["--output FOLDER/figure.png"],
    "experiments/theory/singular_values.py": ["--steps 60 --output FOLDER/figure.png"],
}
# two that make a page, one that measures, and one that shares its cases with a test
USUAL = (
    "docs/make_lightning_page.py",
    "docs/make_methods.py",
    "experiments/reliability/bad_input.py",
    "experiments/speed/overhead.py",
)
# the files that a program must reproduce
STORED = {
    "docs/make_asynchronous.py": ["docs/asynchronous.md"],
    "docs/make_leaderboard.py": ["docs/leaderboard.md"],
    "docs/make_lightning_page.py": ["docs/coming_from_lightning.md"],
    "docs/make_methods.py": [
        "docs/libraries.md",
        *(f"docs/{path.name}" for path in (ROOT / "docs").glob("methods*.md")),
    ],
    "experiments/papers/programs/make_figures.py": ["docs/paper_figures.md"],
    "experiments/papers/programs/make_results.py": [
        *("experiments/papers/RESULTS.md", "docs/findings.md"),
        *(f"docs/papers/{paper}.md" for paper in ("fedcka", "feddecorr", "fedlc", "feduv")),
        *(f"experiments/papers/results/{path.name}" for path in (ROOT / "experiments/papers/results").glob("*.md")),
    ],
}


def test_every_program_has_a_tiny_form():
    assert TINY.keys() == set(PROGRAMS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", sample(TINY, *USUAL))
def test_a_program_runs_in_its_tiny_form(program, monkeypatch, tmp_path, capfd, one_parser):
    shutil.copy(ROOT / "docs" / "paper_figures.md", tmp_path)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / Path(program).parent)
    for arguments in TINY[program]:
        monkeypatch.setattr(sys, "argv", [program, *shlex.split(arguments.replace("FOLDER", str(tmp_path)))])
        status = None
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as ended:
            status = ended.code
        said = capfd.readouterr()
        if program.endswith("screenshot.py"):
            assert "--browser" in status and said.out == ""  # the tests need no browser
        else:
            assert not status, said.err
            assert said.out or len(list(tmp_path.iterdir())) > 1
    for stored in STORED.get(program, ()):
        assert (tmp_path / Path(stored).name).read_text() == (ROOT / stored).read_text(), f"run python {program}"
