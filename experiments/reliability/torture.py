"""Kills runs at random moments and damages their checkpoints; resumed runs must end with the bits of a whole run.

    python experiments/reliability/torture.py --kills 100 --corruptions 300

Each run is forked from this process, which has imported torch. Some are killed after a random time, the others at a
random call that writes a checkpoint; half of them are killed a second time, and half of the cases have two workers.
"""

import argparse
import collections
import contextlib
import csv
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

import matplotlib.figure  # noqa: F401  imported here for all that is forked
import scipy.spatial.distance  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
from torch.optim import SGD, Adam

from fl_lightning import FederatedTrainer
from fl_lightning.callbacks import BestCheckpoint, Callback, SpectrumMonitor
from fl_lightning.data import Digits, Dirichlet
from fl_lightning.distributed.launcher import gc_disabled, init_forked_process
from fl_lightning.methods import MOON, SCAFFOLD, FedBN
from fl_lightning.models import MLP, ImageClassifier, Projector
from fl_lightning.storage.checkpoint import unpack_rows, valid_checkpoint
from fl_lightning.utilities.errors import ClientError, UsageError

ROUNDS = 4
CASES = {
    "SCAFFOLD": {"methods": lambda: [SCAFFOLD()], "devices": 1},
    "MOON, 2 workers": {"methods": lambda: [MOON()], "devices": 2},
    "FedAdam": {"methods": list, "devices": 1, "server_optimizer": lambda p: Adam(p, lr=0.05)},
    "FedBN, 2 workers": {"methods": lambda: [FedBN()], "devices": 2},
}


# ---------------------------------------------------------------------- one run, in a separate process
class Stops(Callback):
    """Ends the process before a round."""

    def __init__(self, round_):
        self.round = round_

    def on_round_start(self, trainer):
        if trainer.server.round == self.round:
            os.killpg(os.getpgid(0), signal.SIGKILL)


def fit(case, folder, callbacks=()):
    """Run a case in ``folder``, or resume it there."""
    given = {key: value for key, value in CASES[case].items() if key != "methods"}
    torch.manual_seed(0)
    model = ImageClassifier(MLP(64, [12]), Projector(8), optimizer=partial(SGD, lr=0.1))
    data = Digits(num_clients=5, batch_size=32, train_size=150, partitioner=Dirichlet(0.5))
    trainer = FederatedTrainer(
        max_rounds=ROUNDS,
        participation=0.6,
        accelerator="cpu",
        threads_per_worker=1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        name="run",
        callbacks=[SpectrumMonitor(), BestCheckpoint("test/accuracy", "max"), *callbacks],
        **given,
    )
    trainer.fit(model, data, CASES[case]["methods"](), ckpt_path="last" if any(folder.glob("run/*")) else None)


def forked(work, log):
    """Start a process in a new process group, with its output in ``log``; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    with gc_disabled():
        process = os.fork()
        if process:
            return process
        init_forked_process()
    status = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        work()
        status = 0
    except (UsageError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(process, seconds=120.0):
    """Wait for a process, and end its group; returns its status, negative for a signal."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            end_group(process)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    end_group(process)
    os.waitpid(process, 0)
    return "hung"


def end_group(process):
    """Kill a process and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


# ---------------------------------------------------------------------- results of a run
def outcome(folder):
    """Return all that must be equal bit for bit, from the newest version: weights, states, memories, metrics."""
    versions = sorted((folder / "run").glob("version_*"), key=lambda path: int(path.name[8:]))
    checkpoints = versions[-1] / "checkpoints"
    state = torch.load(checkpoints / "last.ckpt", weights_only=True)
    state["clients"] = {
        k: torch.load(checkpoints / "clients" / name, weights_only=True)
        for k, (name, _) in sorted(state["clients"].items())
    }
    state["model"] = torch.load(checkpoints / "model.ckpt", weights_only=True)["state_dict"]
    with (versions[-1] / "metrics.csv").open(newline="") as file:
        state["metrics"] = [timeless(row) for row in csv.DictReader(file)]
    state["history"] = [timeless(row) for row in unpack_rows(state["history"])]
    try:
        best = valid_checkpoint(checkpoints / "best.ckpt", print)
        state["best"] = torch.load(best, weights_only=True)["state_dict"]
    except UsageError:
        state["best"] = "named as damaged"
    return state


def timeless(row):
    """A row of metrics without seconds, and without what says which worker trained whom."""
    return {tag: value for tag, value in row.items() if not tag.startswith(("time/", "placed/"))}


def differences(first, second, where=""):
    """Where two nested containers differ."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
        return [] if same or (first.isnan() & second.isnan()).all() else [where]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [one for key in first for one in differences(first[key], second[key], f"{where}/{key}")]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [one for i, (a, b) in pairs for one in differences(a, b, f"{where}/{i}")]
    return [] if first == second or (first != first and second != second) else [where]


class Reference:
    """The outcome of each case's whole run, and the seconds it took."""

    def __init__(self, root):
        self.root, self._known = root, {}

    def __call__(self, case):
        if case not in self._known:
            folder = self.root / f"whole {case}"
            folder.mkdir()
            began = time.monotonic()
            status = ended(forked(partial(fit, case, folder), folder / "log"))
            assert status == 0, (folder / "log").read_text()
            self._known[case] = outcome(folder), time.monotonic() - began
        return self._known[case]


# ---------------------------------------------------------------------- kills
def dies_in_writing(number):
    """In this process, kill the group at one of the calls that write files."""
    left = [number]

    def counted(function, before):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and not before:
                function(*args, **kwargs)
            if left[0] <= 0:
                os.killpg(os.getpgid(0), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    def half_of(contents, file):
        left[0] -= 1
        if left[0] <= 0:
            buffer = io.BytesIO()
            save(contents, buffer)
            file.write(buffer.getvalue()[: buffer.tell() // 2])
            file.flush()
            os.killpg(os.getpgid(0), signal.SIGKILL)
        return save(contents, file)

    save, torch.save = torch.save, half_of
    for name in ("replace", "fsync", "link", "unlink"):
        setattr(os, name, counted(getattr(os, name), before=number % 2 == 0))


def killed_fit(case, folder, in_writing):
    """A fit that may kill itself while it writes."""
    if in_writing:
        dies_in_writing(in_writing)
    fit(case, folder)


def kill(number, rng, reference, root, cases):
    """One run that is killed, once or twice, and resumed to its end; returns what happened."""
    case = rng.choice(cases)
    whole, seconds = reference(case)
    folder = Path(tempfile.mkdtemp(dir=root, prefix=f"kill{number}-"))
    hits = 0
    for _ in range(2 if number % 2 else 1):
        in_writing = rng.choice([0, rng.randrange(1, 250)])
        process = forked(partial(killed_fit, case, folder, in_writing), folder / "log")
        if not in_writing:
            time.sleep(rng.uniform(0.1, 1.0) * seconds)
            end_group(process)
        hits += ended(process) == -signal.SIGKILL
    status = ended(forked(partial(fit, case, folder), folder / "log"))
    wrong = [f"status {status}"] if status else differences(whole, outcome(folder))
    text = f"killed {hits} times, {'resumed to the same bits' if not wrong else f'WRONG: {wrong[:5]} in {folder}'}"
    print(f"kill {number}: {case}: {text}", flush=True)
    if not wrong:
        shutil.rmtree(folder)
    return f"killed {hits} times" if not wrong else "wrong"


# ---------------------------------------------------------------------- corruptions
def flip(path, rng, others):
    content = bytearray(path.read_bytes())
    position = rng.randrange(len(content) or 1)
    content[position : position + 1] = [one ^ 1 << rng.randrange(8) for one in content[position : position + 1]]
    path.write_bytes(content)
    return f"bit flipped at {position}"


def truncate(path, rng, others):
    size = rng.randrange(path.stat().st_size or 1)
    os.truncate(path, size)
    return f"cut to {size} bytes"


def delete(path, rng, others):
    path.unlink()
    return "deleted"


def zero(path, rng, others):
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content) or 1)
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)
    return f"zeros from {start} on"


def swap(path, rng, others):
    like = [one for one in sorted(path.parent.iterdir()) if one.is_file() and one != path and one.suffix == path.suffix]
    other = rng.choice(like or [path])
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return f"swapped with {other.name}"


def foreign(path, rng, others):
    """Replace a file by one of another run."""
    like = [one for one in sorted(others.rglob("*")) if one.is_file() and one.suffix == path.suffix]
    pick = rng.choice(like or [others / "last.ckpt"])
    shutil.copyfile(pick, path)
    return f"replaced by {pick.name} of another run"


def older(path, rng, others):
    """Put the previous checkpoint in the place of the last."""
    folder = next(one for one in path.parents if one.name.startswith("version_")) / "checkpoints"
    shutil.copyfile(folder / "previous.ckpt", folder / "last.ckpt")
    return "previous.ckpt in the place of the last"


DAMAGES = (flip, flip, truncate, delete, zero, swap, foreign, older)


def stopped(case, root, rounds=ROUNDS - 1):
    """The checkpoints of a run that was stopped before its last round, or earlier, made once."""
    folder = root / f"stopped {case} {rounds}"
    if not folder.exists():
        folder.mkdir()
        status = ended(forked(partial(fit, case, folder, [Stops(rounds)]), folder / "log"))
        assert status == -signal.SIGKILL, (folder / "log").read_text()
    return folder


def corrupt(number, rng, reference, root, cases):
    """Damage one file of a checkpoint folder, and resume; returns what happened."""
    case, other = rng.choice(cases), rng.choice(list(CASES))
    whole, _ = reference(case)
    folder = Path(tempfile.mkdtemp(dir=root, prefix=f"corrupt{number}-"))
    shutil.copytree(stopped(case, root) / "run", folder / "run")
    version = folder / "run/version_0"
    candidates = [one for one in sorted((version / "checkpoints").rglob("*")) if one.is_file()]
    path = rng.choice([*candidates, version / "metrics.csv"])
    before = contents_of(version)
    others = stopped(other, root, rounds=ROUNDS - 2 if other == case else ROUNDS - 1) / "run/version_0/checkpoints"
    what = rng.choice(DAMAGES)(path, rng, others)
    status = ended(forked(partial(fit, case, folder), folder / "log"))
    lines = (folder / "log").read_text().splitlines()
    named = any("ckpt_path=" in line and "instead" in line for line in lines)
    wrong = []
    if status == 0:
        final, result = outcome(folder), "fallen back from" if named else "harmless"
        if final["best"] == "named as damaged" and any(
            "best.ckpt" in line and "cannot be used" in line for line in lines
        ):
            final["best"], result = whole["best"], "best.ckpt named as damaged"
        wrong = differences(whole, final)
    elif status == 2 and both_changed(before, contents_of(version)) and lines[-1].startswith("error: ckpt_path="):
        result = "refused, since it concerns both checkpoints"
    else:
        wrong = [f"status {status}", *lines[-3:]]
    result = f"WRONG: {wrong[:5]} in {folder}" if wrong else result
    print(f"corruption {number}: {case}: {path.name} {what}: {result}", flush=True)
    if not wrong:
        shutil.rmtree(folder)
    return result if not wrong else "wrong"


def contents_of(version):
    """The files of a run by their path."""
    return {str(one.relative_to(version)): one.read_bytes() for one in version.rglob("*") if one.is_file()}


def both_changed(before, after):
    """Whether a file of the last checkpoint has changed and one of the previous."""
    changed = {name for name in before if before[name] != after.get(name)}
    parts = []
    for name in ("last", "previous"):
        contents = torch.load(io.BytesIO(before[f"checkpoints/{name}.ckpt"]), weights_only=True)
        clients = {f"checkpoints/clients/{one}" for one, _ in contents["clients"].values()}
        parts.append({f"checkpoints/{name}.ckpt"} | clients)
    return all(part & changed for part in parts)


# ---------------------------------------------------------------------- all of it
def torture(kills, corruptions, seed, root, cases=tuple(CASES)):
    """Kill and damage runs in the folder ``root``; returns how often each thing happened."""
    torch.set_num_threads(1)  # other threads do not exist in a forked process
    reference, counts = Reference(root), {"kills": collections.Counter(), "corruptions": collections.Counter()}
    for number in range(kills):
        rng = random.Random(f"{seed} kill {number}")
        counts["kills"][kill(number, rng, reference, root, cases)] += 1
    for number in range(corruptions):
        rng = random.Random(f"{seed} corruption {number}")
        counts["corruptions"][corrupt(number, rng, reference, root, cases)] += 1
    return counts


def main():
    """Print a line for each run, and a summary; the status is 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--corruptions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="torture-"))
    counts = torture(given.kills, given.corruptions, given.seed, root, given.cases)
    for what, counted in counts.items():
        print(f"{sum(counted.values())} {what}: {dict(counted)}")
    wrong = any(counted["wrong"] for counted in counts.values())
    if not wrong:
        shutil.rmtree(root)
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
