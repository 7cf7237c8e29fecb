"""The commands and the program of the README and of the guide's first pages run."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fl_lightning import data, methods, models, optim
from fl_lightning.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
NAMES = ("first_run", "composing", "data", "own", "pictures", "workers", "reproducing", "speed")
PAGES = {ROOT / "README.md": README} | {
    path: path.read_text() for path in (ROOT / "docs" / f"{one}.md" for one in NAMES)
}
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)]
# a line that two pages have is run once
LINES = list(dict.fromkeys(line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()))


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path, one_parser, undrawn):
    """Run in an empty folder that sees the repository's configs."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)


def command(text):
    """The arguments of the program in the line that holds ``text``."""
    (line,) = (line for line in LINES if text in line)
    return shlex.split(re.split("cli.py |fl-lightning ", line)[-1])


def test_every_command_is_known_to_a_test():
    known = ["smoke/feduv.yaml", "--config smoke/feduv", ".[test]", ".[speed]", "tensorboard"]
    known += ["--method+=", "CCVR", "EarlyStopping", "protocols/short.yaml", "cifar10.yaml", "--weights", "torchrun"]
    known += ["cli.py test", "cli.py predict", "cli.py doctor", "cli.py partition", "--ckpt_path last"]
    known += ["--trainer.devices auto", "scaled/seconds.yaml", "--scale 0.02", "download.pytorch.org", "ExponentialLR"]
    known += ["fl-lightning bench", "fl-lightning completion", "cuda-mps-control", "--trainer.workers_per_device"]
    assert [line for line in LINES if not any(text in line for text in known)] == []


FEW = ["--data.train_size=200", "--data.test_size=100"]
ONCE = [*FEW, "--trainer.max_rounds=1"]


def test_the_main_job_and_the_evaluation_of_its_checkpoint(capsys):
    main([*command("-r requirements.txt "), *FEW])
    said = capsys.readouterr()
    lines = [*said.err.splitlines()[-3:], *said.out.splitlines()]
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    shown = shown.replace("figures, ", "")  # which the fixture leaves out
    assert [re.sub(r"[\d.:]+", "", line) for line in lines] == re.sub(r"[\d.:]+", "", shown).splitlines()
    main([*command("cli.py test"), *FEW])
    assert said.out.split("test/accuracy ")[1].split(",")[0] in capsys.readouterr().out
    main([*command("cli.py predict"), *FEW])
    assert "runs/feduv/version_0/predictions.pt" in capsys.readouterr().out
    main([*command("--weights"), *FEW, "--trainer.max_rounds", "0"])
    assert "0 rounds" in capsys.readouterr().out


STATUS = ["--status", "--output", "out"]
# part of a command, additional arguments, and its output
SAID = [
    *((text, ONCE, "1 round, test/accuracy") for text in ("--method+=", "ExponentialLR", "CCVR", "protocols/short")),
    ("EarlyStopping", [*FEW, "--trainer.callbacks.patience=0", "--trainer.max_rounds=3"], "rounds, test/accuracy"),
    ("scaled/seconds.yaml", STATUS, "32 cells: 32 waiting"),
    ("--scale 0.02", STATUS, "15 cells: 15 waiting"),
    ("cli.py doctor", [], "FedUV(mu=0.5"),
    ("partition", [], "10 clients"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("text", "more", "said"), SAID)
def test_a_command_says_what_it_has_done(text, more, said, capsys):
    main([*command(text), *more])
    assert said in capsys.readouterr().out


@pytest.mark.thorough
def test_a_run_goes_on_to_more_rounds(capsys):
    more = [*command("--ckpt_path last"), *FEW]
    main([*more, "--ckpt_path=null", "--trainer.max_rounds=1"])
    main(more)
    said = capsys.readouterr().out
    assert "10 rounds, test/accuracy" in said
    assert "version_1" not in said


@pytest.mark.thorough
def test_the_commands_for_many_workers_run(capsys):
    main([*command("--trainer.devices auto"), *ONCE])
    main([*command("torchrun"), *ONCE])  # by one worker; test_workers.py has torchrun itself
    assert capsys.readouterr().out.count("test/accuracy") == 2


@pytest.mark.parametrize("page", ["README.md", "docs/own.md"])
def test_the_program_of_a_page_ends_at_the_accuracy_that_it_states(page, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", PAGES[ROOT / page], re.DOTALL)
    exec(compile(program, page, "exec"), {"__name__": "readme"})
    accuracy, stated = float(capsys.readouterr().out.split()[-1]), float(re.search(r"# (0\.\d+)", program)[1])
    assert accuracy > 0.75 and accuracy == pytest.approx(stated, abs=0.05)


def test_each_tick_of_the_table_of_features_has_its_file():
    features = yaml.safe_load((ROOT / "docs" / "libraries.yaml").read_text())["features"]
    lines = re.findall(r"^\|(.*)\|$", README.partition("## Why not")[2], re.MULTILINE)
    (_, *names), _, *rows = (line.split("|") for line in lines)
    ticks = {feature: {name for name, cell in zip(names, cells, strict=True) if cell} for feature, *cells in rows}
    assert ticks == {feature: set(files) for feature, files in features.items()}


def test_the_readme_is_short():
    assert len(README.split()) <= 800


def test_the_files_that_pages_name_are_there():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for path in re.findall(r"\]\((?!http|#)([^)]+)\)", page.read_text()):
            assert (page.parent / path.split("#")[0]).exists(), (page.name, path)


def test_the_loggers_of_the_first_run_are_parsed(capsys, tmp_path):
    texts = re.findall(r"```yaml\n(.*?)```", PAGES[ROOT / "docs" / "first_run.md"], re.DOTALL)
    for text, name in zip(texts, ("WandbLogger", "MLFlowLogger"), strict=True):
        (tmp_path / "loggers.yaml").write_text(text)
        with pytest.raises(SystemExit, match="0"):
            main(["fit", "--config", "smoke/feduv", "--config", "loggers.yaml", "--print_config"])
        assert name in capsys.readouterr().out


def test_every_method_optimizer_data_set_and_network_is_named():
    for name in (*methods.__all__, *optim.__all__):
        assert re.search(rf"\b{name}\b", README), name
        assert re.search(rf"`{name}\b", PAGES[ROOT / "docs" / "composing.md"]), name
    bases = (data.FederatedDataModule, data.ImageDataModule, data.Partitioner, models.Encoder)
    for kind in (getattr(part, name) for part in (data, models) for name in part.__all__):
        if isinstance(kind, type) and issubclass(kind, bases) and kind not in bases:
            assert re.search(rf"`{kind.__name__}\b", PAGES[ROOT / "docs" / "data.md"]), kind
