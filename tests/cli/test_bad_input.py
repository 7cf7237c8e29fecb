"""A bad input ends with one line that names the key, and writes nothing."""

from pathlib import Path

import pytest
from helpers.bad_input import BAD, arguments, cell
from helpers.errors import missing

from fl_lightning.cli import main

LONGEST = 300
TABLE = Path(__file__).resolve().parents[2] / "experiments" / "reliability" / "BAD_INPUT.md"
# one for each kind of check
USUAL = [
    "max_rounds null",
    "rounds below 0",
    "more clients than examples",
    "lr below 0",
    "server lr below 0",
    "alhpa",
    "Dirichet",
    "a class of another kind",
    "a method twice",
    "local_steps 1.5",
    "a section twice",
    "too few classes",
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch, request, one_parser):
    monkeypatch.chdir(request.config.rootpath)


def line_of(capsys, folder, given):
    """The one line that an input gets; nothing else may come of it."""
    folder.mkdir()
    args = arguments(given, folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    assert sorted(folder.rglob("*")) == before
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(line) < LONGEST
    return line.replace(f"{folder}/", "")


@pytest.mark.parametrize("case", USUAL)
def test_a_bad_input_is_one_line(capsys, tmp_path, case):
    given, named = BAD[case]
    assert missing(line_of(capsys, tmp_path / "given", given), named) is None


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:You passed .Fabric")  # Fabric says so of 16-mixed on a CPU before it is refused
def test_all_bad_inputs_are_one_line(capsys, tmp_path):
    lines = {case: line_of(capsys, tmp_path / case.replace("/", " "), given) for case, (given, _) in BAD.items()}
    assert {case: line for case, line in lines.items() if missing(line, BAD[case][1])} == {}


def test_the_table_has_all_inputs():
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    told = {given.removeprefix("| "): line.removesuffix(" |") for given, line in rows}
    assert [given for given, named in BAD.values() if missing(told[cell(given)], named)] == []
