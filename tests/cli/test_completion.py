"""The script of completion: what bash offers for the beginning of a word, and for each class that a key takes."""

import subprocess

import pytest
from helpers.errors import refused

from fl_lightning.cli.completion import completion_parser, print_script

# each line of the input is a command line, whose last word is to be completed
ASK = """
source "$0"
while read -r line; do
    COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _shtab_fl_lightning
    echo ${COMPREPLY[*]}
done
"""
OFFERED = {
    "f": "fit federate",
    "report --bas": "--baseline",
    "fit --method FedP": "FedPer FedProto FedProx",
    "fit --method+ MO": "MOON",
    "fit --method.bet": "--method.beta",
    "fit --config a.yaml --data Site": "SiteImageFolders",
    "fit --data.partitioner Dir": "Dirichlet",
    "fit --trainer.clock C": "Clock",
    "fit --trainer.clock.dead": "--trainer.clock.deadline",
    "fit --trainer.server_optimizer.p": "",
}


def test_bash_completes_commands_options_and_classes(tmp_path, capsys):
    pytest.importorskip("shtab")
    print_script("bash")
    (tmp_path / "script").write_text(capsys.readouterr().out)
    lines = "".join(f"fl-lightning {words}\n" for words in OFFERED)
    asked = ["bash", "-c", ASK, str(tmp_path / "script")]
    ended = subprocess.run(asked, input=lines, capture_output=True, text=True, check=True, timeout=600)
    assert dict(zip(OFFERED, ended.stdout.splitlines(), strict=True)) == OFFERED


def test_a_shell_that_is_not_known_is_refused():
    with refused("bash", "zsh"):
        completion_parser().parse_args(["fish"])
