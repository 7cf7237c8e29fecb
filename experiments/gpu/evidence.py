"""Run cells of a paper's suite at full size for a limited time; a later call resumes them.

python experiments/gpu/evidence.py [--output FOLDER] [--seconds 300] [--data FOLDER] [--precision bf16-mixed] [--jobs 3]
                                   [--suite experiments/papers/feduv/supplement_table2.yaml]
                                   [--only method=FedAvg "method=FedUV (mu 0.5, lambda C/4)"]
python experiments/gpu/evidence.py --plan
python experiments/gpu/evidence.py --device cpu --tiny

Run it in the root of the repository. It calls `bench` with one seed, in as many jobs as there are cells, over NVIDIA's
Multi-Process Service where that is installed, and stops it in time, after a round of each cell. FOLDER/evidence.jsonl
has the metrics of each run by round; FOLDER/SUITE has the runs, by which the same command resumes, and the tables.

By default these are three methods of FedUV's experiment on CIFAR-10: ten clients with label skew, 100 rounds of ten
epochs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from parts import Program, arguments, mps, open_program  # next to this file

CELLS = ("method=FedAvg", "method=FedProx (mu 0.01)", "method=FedUV (mu 0.5, lambda C/4)")
METRICS = ("test/accuracy", "val/accuracy", "train/loss", "time/train", "time/evaluation")
# seconds that a bench has to stop, and that its output and results take
STOP = 30.0


def config(args: argparse.Namespace) -> dict[str, Any]:
    """The last config of all cells."""
    trainer = {"accelerator": "gpu" if args.device == "cuda" else "cpu", "devices": 1, "precision": args.precision}
    if args.data is None:
        return {"trainer": trainer}
    return {"trainer": trainer, "data": {"class_path": "NpyImages", "init_args": {"root": str(args.data.resolve())}}}


def command(args: argparse.Namespace, folder: Path) -> list[str]:
    """The bench of the cells."""
    jobs = args.jobs or min(len(args.only), os.cpu_count() or 1)
    options = ["--output", folder, "--seeds", 1, "--jobs", jobs, "--only", *args.only]
    return [sys.executable, "cli.py", "bench", str(args.suite), *map(str, options), *["--offline"] * args.tiny]


def run(program: Program, bench: list[str]) -> None:
    """Run the bench, and stop it in time."""
    log = program.scratch / "bench.log"
    with log.open("w") as output, mps(program):
        process = subprocess.Popen(bench, stdout=output, stderr=output, start_new_session=True)
        try:
            for seconds in (program.seconds_left - STOP, 0.7 * STOP, 0.1 * STOP):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(1.0, seconds))
                    break
                process.terminate()  # after the present round, and the second time at once
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    ended = "in time" if status == 128 + signal.SIGTERM else status
    program.record_end("bench", ended, log, ended in (0, "in time"))


def results(program: Program, folder: Path) -> None:
    """Record the metrics of all runs by round, with the machine and the versions."""
    for path in sorted(folder.glob("*/version_*/metrics.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        environment = json.loads((path.parent / "environment.json").read_text())
        values = {key: [float(row[key]) for row in rows if row.get(key)] for key in METRICS}
        program.part = "result"
        program.record(run=path.parent.parent.name, rounds=len(rows), **values, environment=environment)


def main() -> None:
    parser = arguments(__doc__, 300)
    parser.add_argument("--suite", type=Path, default=Path("experiments/papers/feduv/supplement_table2.yaml"))
    parser.add_argument("--only", nargs="+", default=CELLS, metavar="PATTERN", help="cells, as for bench")
    parser.add_argument("--jobs", type=int, help="cells that train at the same time; by default all")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="arrays for NpyImages, not the suite's data")
    parser.add_argument("--plan", action="store_true", help="print the cells that are left, and run nothing")
    args = parser.parse_args()
    folder = args.output / args.suite.stem
    if args.plan:
        sys.exit(subprocess.run([*command(args, folder), "--dry-run"]).returncode)
    with open_program(__file__, args) as program:
        last = program.scratch / "config.yaml"
        last.write_text(json.dumps(config(args)))  # which is YAML, too
        run(program, [*command(args, folder), "--config", str(last)])
        results(program, folder)


if __name__ == "__main__":
    main()
