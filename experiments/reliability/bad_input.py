"""Makes the table of bad inputs, with the line that each gets, from the cases of the tests.

python experiments/reliability/bad_input.py > experiments/reliability/BAD_INPUT.md
python experiments/reliability/bad_input.py "mu null" "rounds below 0"   # these cases alone
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def line_of(given: str) -> str:
    """The line that an input gets."""
    from helpers.bad_input import arguments

    from fl_lightning.cli import main

    said = io.StringIO()
    quiet = (contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit))
    with tempfile.TemporaryDirectory() as folder, quiet[0], quiet[1], quiet[2]:
        main(arguments(given, Path(folder)))
    _, *lines = re.split("^error: ", said.getvalue(), flags=re.MULTILINE)
    return " ".join(lines[-1].replace(f"{folder}/", "").replace(f"{ROOT}/", "").split()) if lines else "(none)"


def print_table(cases: list[str]) -> None:
    """Print some inputs, by default all."""
    from helpers.bad_input import BAD, BASE, cell

    sys.argv = ["cli.py"]
    print("# Bad input, and the line that it gets\n")
    print(
        "Made by `python experiments/reliability/bad_input.py`; `tests/cli/test_bad_input.py` checks each. Every input"
    )
    print("ends with status 2, and nothing is written. It is an option, or a second config, in addition to this one:\n")
    print(f"```yaml\n{BASE}```\n\n| input | line |\n|---|---|")
    for given, _ in (BAD[name] for name in cases or BAD):
        print(f"| {cell(given)} | {cell(line_of(given))} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names in tests/helpers/bad_input.py; default: all")
    print_table(parser.parse_args().cases)
