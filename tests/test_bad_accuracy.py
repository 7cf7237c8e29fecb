"""The page on bad accuracy: its commands run, and measure what it says."""

import re
import shlex
from pathlib import Path

import pytest

from fl_lightning import load_run
from fl_lightning.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "bad_accuracy.md").read_text()
# each block of commands, and what the line below it says that its last one measures
BLOCKS = [
    (
        [shlex.split(line)[2:] for line in block.replace("\\\n", " ").splitlines()],
        re.findall(r"`(\S+)` (-?[\d.]+\d)", said),
    )
    for block, said in re.findall(r"```bash\n([^`]*)```\n\n(Measured: [^\n]*)?", PAGE)
]
FEW = ["--trainer.max_rounds=1", "--data.train_size=200", "--data.test_size=100"]


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path, capsys, one_parser, undrawn):
    """Work in a folder with the config that the first command prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    (first, _), _ = BLOCKS[0]
    assert first[-2:] == [">", "bad.yaml"]
    with pytest.raises(SystemExit, match="0"):
        main(first[:-2])
    (tmp_path / "bad.yaml").write_text(capsys.readouterr().out)


def test_every_block_of_commands_trains_or_describes_the_config():
    assert len(BLOCKS) == PAGE.count("```bash")
    for commands, measured in BLOCKS:
        assert commands[-1][1:3] == ["--config", "bad.yaml"] and bool(measured) == (commands[-1][0] == "fit")


def test_its_callbacks_run_together_and_log_what_it_names():
    callbacks = dict.fromkeys(re.findall(r"--trainer\.callbacks\+=\w+(?: --trainer\.callbacks\.\w+ \d+)?", PAGE))
    main(["fit", "--config", "bad.yaml", *shlex.split(" ".join(callbacks)), *FEW])
    metrics = load_run("runs/fedavg/version_0").metrics
    assert {tag for _, measured in BLOCKS for tag, _ in measured} <= metrics.keys()


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_command_measures_what_the_page_says(number):
    commands, measured = BLOCKS[number]
    for words in commands[1:] if number == 0 else commands:
        main(words)
    metrics = load_run("runs/fedavg/version_0").metrics if measured else {}
    for tag, value in measured:
        assert metrics[tag] == pytest.approx(float(value), rel=0.2, abs=0.1), tag
