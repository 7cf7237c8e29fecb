"""Kills one of two processes that share a suite, and measures the overhead of a suite over the training.

    python experiments/reliability/bench_kill.py             # about 5 minutes, on a quiet machine
    python experiments/reliability/bench_kill.py --seeds 1   # a quarter of the cells
    python experiments/reliability/bench_kill.py --rounds 40 # longer, more typical cells show the gain of a second job
    python experiments/reliability/bench_kill.py --parts 1   # only the first of these parts

1. A bench of 60 small cells with one job: seconds a cell beyond the training itself.
2. The same with two jobs: the speed-up.
3. The same by two processes; one is killed during a cell: no cell is lost or finished twice, and the cells have the
   bits of the first bench.
"""

import argparse
import collections
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from optuna.trial import TrialState

from fl_lightning.bench import load_suite
from fl_lightning.bench.study import SQLITE, find_study, open_database, results_of

ROOT = Path(__file__).resolve().parents[2]
PARTS = (1, 2, 3)
SUITE = """
title: Small cells
base:
  model:
    class_path: ImageClassifier
    init_args:
      num_classes: 10
      encoder: {class_path: MLP, init_args: {in_features: 64, hidden: [64]}}
      projector: {class_path: Projector, init_args: {width: 32}}
      optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05, momentum: 0.9}}
  data: {class_path: Digits, init_args: {num_clients: 5, batch_size: 32, partitioner: {class_path: Dirichlet}}}
  trainer: {max_rounds: ROUNDS}
axes:
  method:
    FedAvg: {}
    FedProx: {method: [{class_path: FedProx, init_args: {mu: 0.01}}]}
    MOON: {method: [{class_path: MOON}]}
    FedUV: {method: [{class_path: FedUV, init_args: {mu: 0.1}}]}
    FedDecorr: {method: [{class_path: FedDecorr, init_args: {beta: 0.1}}]}
  alpha: {key: data.init_args.partitioner.init_args.alpha, values: ALPHAS}
"""


class Bench:
    """A bench in a folder.

    Args:
        suite: file of the suite.
        folder: output folder.
        seeds: number of seeds.
    """

    def __init__(self, suite, folder, seeds):
        self.suite, self.folder, self.args = load_suite(suite), folder, ["--seeds", str(seeds), "--output", str(folder)]
        self.cells = self.suite.cells(seeds=range(seeds))

    def start(self, *args):
        """Start a process that works on it."""
        command = [sys.executable, str(ROOT / "cli.py"), "bench", str(self.suite.path), *self.args, *args]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def run(self, *args):
        """Run it to its end, and return the seconds."""
        began = time.monotonic()
        assert self.start(*args).wait() == 0
        return time.monotonic() - began

    def study(self):
        """Its study."""
        (self.folder).mkdir(exist_ok=True)
        return find_study(self.suite, open_database(f"{SQLITE}{self.folder / 'study.db'}"))

    def bits(self):
        """Return the results of each cell, without seconds."""
        found = results_of(self.study(), self.cells)
        return {digest: (one.state, dict(one.values), one.plan) for digest, one in found.items()}

    def seconds_a_cell(self, jobs):
        """Seconds from one finished cell to the next, after the first of each job."""
        ends = sorted(one.datetime_complete for one in self.study().get_trials(states=(TrialState.COMPLETE,)))
        return (ends[-1] - ends[jobs - 1]).total_seconds() / (len(ends) - jobs)

    def training(self):
        """Seconds of all rounds of all cells."""
        tables = self.folder.glob("*/version_0/metrics.csv")
        return sum(float(row["time/round"]) for path in tables for row in csv.DictReader(path.open()))


def running_of(study, process):
    """The cell that a process runs, None where it is between two."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.user_attrs.get("process", "").split(" ")[0] == str(process.pid):
            return trial
    return None


def killed(bench):
    """Let two processes work on a bench, kill one in mid-cell, and return its cell when all is done."""
    victim = bench.start()
    while not list(bench.folder.glob("*/version_0")):
        time.sleep(0.1)
    other, study, done = bench.start(), bench.study(), len(bench.cells) // 4
    while (trial := running_of(study, victim)) is None or trial.number < done:
        assert victim.poll() is None, "it was not killed before its last cell; try again with more cells"
        time.sleep(0.02)
    victim.kill()
    victim.wait()
    assert other.wait() == 0
    trials = study.get_trials()
    assert trials[trial.number].state == TrialState.FAIL, "it was not killed in mid-cell; try again"
    completed = collections.Counter(one.user_attrs["digest"] for one in trials if one.state == TrialState.COMPLETE)
    assert set(completed) == {cell.digest for cell in bench.cells}, completed
    assert set(completed.values()) == {1}, completed
    return trial.user_attrs["cell"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a cell")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.5, 1.0])
    parser.add_argument(
        "--parts", type=int, nargs="+", choices=PARTS, default=PARTS, help="of the three; the first is always run"
    )
    given = parser.parse_args()
    seeds = given.seeds
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "small.yaml"
        suite.write_text(SUITE.replace("ROUNDS", str(given.rounds)).replace("ALPHAS", str(given.alphas)))
        one, two, both = (Bench(suite, Path(folder) / name, seeds) for name in ("one", "two", "both"))
        number = len(one.cells)
        whole, training = one.run(), one.training() / number
        each = one.seconds_a_cell(1)
        print(f"{number} cells, one job: {each:.2f} s a cell: {training:.2f} s of training ", end="")
        print(f"and {each - training:.2f} s of overhead; {whole:.1f} s with the start of the processes", flush=True)
        if 2 in given.parts:
            shared, both_jobs = two.run("--jobs", "2"), two.seconds_a_cell(2)
            print(f"two jobs: {both_jobs:.2f} s a cell, {each / both_jobs:.2f} times as fast; ", end="")
            print(f"{shared:.1f} s with the start, {whole / shared:.2f} times", flush=True)
            assert two.bits() == one.bits()
        if 3 in given.parts:
            cell = killed(both)
            assert both.bits() == one.bits()
            print(f"two processes, one killed in {cell}: no cell lost, none finished twice, the same bits")


if __name__ == "__main__":
    main()
