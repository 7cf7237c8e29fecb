"""How far a reader has to walk: the calls of a steady batch and of a visit, and how they jump between files.

python experiments/speed/calls.py [--config experiments/smoke/feduv.yaml] [--list]

It counts the functions of this package that are called in the second round: between two steps in the middle of a visit,
and from the start of a visit to its update. A re-entry is a call into a file that was left before: where a reader
turns back to a page. It also counts how often the user's optimizer is built before round 0. ``--list`` prints the
calls of the batch, indented by their depth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fl_lightning
from fl_lightning.cli import main

PACKAGE = str(Path(fl_lightning.__file__).parent)
SMOKE = Path(__file__).resolve().parents[1] / "smoke" / "feduv.yaml"


class Calls:
    """The calls of this package's functions, in order, each as (depth, file, function)."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, str]] = []
        self.steps: list[int] = []
        self.visits: list[tuple[int, int]] = []
        self.optimizers = 0
        self._depth, self._visit, self._round = 0, 0, -1

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event not in ("call", "return") or not file.startswith(PACKAGE) or name in ("<genexpr>", "<listcomp>"):
            return
        if event == "return":
            self._depth -= 1
            if name == "visit" and file.endswith("local_training.py"):
                self.visits.append((self._visit, len(self.calls)))
            return
        if name == "run_round":
            self._round += 1
        if name == "configure_optimizers" and self._round < 0:
            self.optimizers += 1
        if name == "visit" and file.endswith("local_training.py"):
            self._visit = len(self.calls)
        if name == "training_step" and file.endswith("classifier.py") and self._round == 1:
            self.steps.append(len(self.calls))
        self.calls.append((self._depth, file.removeprefix(PACKAGE + "/"), name))
        self._depth += 1


def described(calls: list[tuple[int, str, str]]) -> str:
    """Return the numbers of calls and files, and how often calls return to an earlier file."""
    files = [file for _, file, _ in calls]
    entered = [file for place, file in enumerate(files) if place == 0 or files[place - 1] != file]
    return f"{len(calls)} calls in {len(set(files))} files, {len(entered) - len(set(files))} re-entries"


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(SMOKE))
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    given = parsed()
    recorded = Calls()
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(recorded)
        try:
            arguments = ["--trainer.max_rounds", "2", "--trainer.default_root_dir", folder, "--trainer.devices", "1"]
            main(["fit", "--config", given.config, *arguments, "--trainer.enable_progress_bar", "false"])
        finally:
            sys.setprofile(None)
    # the shortest way from a step to the next: neither an epoch nor a visit ends in between
    start, end = min(pairwise(recorded.steps), key=lambda pair: pair[1] - pair[0])
    batch = recorded.calls[start:end]
    first, last = recorded.visits[-1]
    print(f"one steady batch:   {described(batch)}")
    print(f"one visit:          {described(recorded.calls[first:last])}")
    print(f"optimizers built before round 0: {recorded.optimizers}")
    for depth, file, name in batch if given.list else ():
        print("  " * (depth - min(d for d, _, _ in batch)), file, name)
