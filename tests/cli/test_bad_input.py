"""Every bad input of the table is one line that names key and remedy, and leaves nothing behind."""

import sys
from pathlib import Path

import pytest
from helpers.bad_input import BAD, arguments, cell

from fl_lightning.cli import main

LONGEST = 300
TABLE = Path(__file__).resolve().parents[2] / "experiments" / "reliability" / "BAD_INPUT.md"


@pytest.fixture(autouse=True)
def _alone(monkeypatch, request, one_parser):
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    monkeypatch.chdir(request.config.rootpath)


def refused(capsys, tmp_path, given):
    """The one line that an input gets; nothing else may come of it."""
    args = arguments(given, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Traceback" not in said
    assert sorted(tmp_path.rglob("*")) == before
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and len(lines[0]) < LONGEST
    return lines[0].removeprefix("error: ").replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_is_one_line(capsys, tmp_path, case):
    given, begins = BAD[case]
    assert refused(capsys, tmp_path, given).startswith(begins)


def test_the_table_has_all_inputs_with_the_beginnings_of_their_lines():
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    told = {given.removeprefix("| "): line.removesuffix(" |") for given, line in rows}
    assert len(told) >= 80
    assert told.keys() == {cell(given) for given, _ in BAD.values()}
    assert all(told[cell(given)].startswith(cell(begins)[:-1]) for given, begins in BAD.values())
