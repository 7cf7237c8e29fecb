"""Mutated configs: each one runs, or is refused by one line with nothing written.

python experiments/reliability/fuzz.py [--number 1000] [--seed 0] [--jobs 2] [--output fuzz.jsonl] [--only N]

A case is a smoke config, or a data, a model and a method fragment together, resolved with all defaults, in which one
or two places are changed: a value, a key, a class, a list. In a third of the cases it is the text of the file that is
changed: its encoding, a character, an indentation, a key that stands twice, a tag, an alias. Each case is run in a
process forked from this one. Allowed are a run that ends well with finite metrics, a refusal (status 2: one line under
300 characters with key and remedy, and no folder), and a client that fails in a round (status 1, one line). Anything
else is listed with the case.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import functools
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT.parent))
LONGEST, SECONDS, GIBIBYTES = 300, 120, 8

# replacements for any value
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    10**12,
    2**63,
    2**64,
    0.5,
    -0.5,
    1.5,
    1e30,
    1e-30,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "abc",
    "null",
    "1e3x",
    "../..",
    "last",
    "auto",
    "cuda",
    [],
    [1],
    [None],
    [[]],
    ["abc"],
    {},
    {"a": 1},
    {"class_path": "Nothing"},
    {"class_path": "FedProx"},
    {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
]
CLASSES = [
    *("FedProx", "SCAFFOLD", "MOON", "FedUV", "FedBABU", "Local", "Method", "FedNova", "FedProto", "FedLC"),
    *("Digits", "Synthetic", "NpyImages", "MNIST", "FederatedDataModule", "Partitioned"),
    *("IID", "Dirichlet", "Shards", "Pooled", "ByDomain", "Natural", "ClassesPerClient", "Partitioner"),
    *("ImageClassifier", "MLP", "Logistic", "FedUVCNN", "FedCKACNN", "Encoder", "Projector", "ProjectionHead"),
    *("torch.optim.SGD", "torch.optim.Adam", "torch.optim.LBFGS", "torch.optim.SparseAdam", "torch.optim.Rprop"),
    *("FedAdam", "FedAvgM", "torch.optim.lr_scheduler.StepLR", "torch.optim.lr_scheduler.CosineAnnealingLR"),
    *("SpectrumMonitor", "EarlyStopping", "CCVR", "lightning.pytorch.callbacks.ModelCheckpoint"),
    *("torch.nn.Linear", "collections.Counter", "nowhere.Class", "ImageClasifier", "Dirichet", "os.system"),
]
# classes of the data sets that have not 10
CLASSES_OF = {"CIFAR100": 100, "TinyImageNet": 200, "ImageFolderImages": 12, "OfficeHome": 65, "FEMNIST": 62}
CLASSES_OF |= {"PACS": 7, "HAM10000": 7}
# arguments that are added where a class or the trainer may take them
MORE = {
    "trainer": {
        "server_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}},
        "client_lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}},
        "taps": {"representation": "encoder"},
        "cohort_size": 2,
        "local_steps": 2,
        "gradient_clip_val": 1.0,
        "threads_per_worker": 1,
        "callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "test/accuracy"}}],
    },
    "data.init_args": {"augment": [{"class_path": "RandomCrop"}], "val_fraction": 0.1, "test_size": 20, "mean": [0.5]},
}
# replacements for the value of a key in the text of a file
TEXTS = [
    *("[1", "{a: 1", "'a", '"a', "a: b", "*nowhere", "&a [*a]", "&a {b: *a}", "? a", "- a", "@a", "%a", "`a", "|", ">"),
    *("!!python/object/apply:os.system [id]", "!!python/name:os.system", "!mine a", "!!binary YQ==", "!!set {a}"),
    *("!!int a", "!!float 1", "!!str 1", "010", "-017", "1:30", "1:30.5", "0x10", "0b11", "0o10", "08", "1_0", "1e-1"),
    *("yes", "off", "~", "=", "2024-01-01", "2024-13-45", "{3: 4}", "{[a]: b}", "{a: 1, a: 2}", "9" * 5000),
    *("{<<: {a: 1}, <<: {b: 1}}", "{<<: {a: 1}, a: 2}", "{<<: 3}", "\t1", "1 # \t", "1\t"),
    *('"\\q"', '"\\ud800"', '"\\0"'),
    *("[" * 2000, "[" * 60 + "]" * 60, "{a: " * 2000 + "1" + "}" * 2000, "x" * 100_000, "[" + "1, " * 300_000 + "]"),
    "[&a [0, 0, 0, 0], &b [*a, *a, *a, *a], &c [*b, *b, *b, *b], &d [*c, *c, *c, *c], &e [*d, *d, *d, *d], "
    "&f [*e, *e, *e, *e], &g [*f, *f, *f, *f], &h [*g, *g, *g, *g], &i [*h, *h, *h, *h], &j [*i, *i, *i, *i]]",
]
REMEDY = re.compile(
    r"\b(give|pass|choose|set|keep|take|takes|add|use|return|remove|define|wrap|there are|one of|did you mean|make|"
    r"free|needs?|must|lists|Allowed|Available|build|bind|put|evaluation data is|train(s)? in|"
    r"write|save|indent|close|correct|quote)\b"
)


@functools.cache
def bases() -> dict[str, list[Path]]:
    """The configs that are mutated: every smoke config, and fragments of data, model and method together."""
    named = {path.stem: [path] for path in sorted((ROOT / "smoke").glob("*.yaml"))}
    fragment = {kind: sorted((ROOT / kind).glob("*.yaml")) for kind in ("data", "models", "methods")}
    rng = random.Random(0)
    for data in fragment["data"]:
        grey = "mnist" in data.stem
        model = "logistic" if data.stem == "synthetic" else "feduvcnn_small_grey" if grey else "feduvcnn_small"
        parts = [data, ROOT / "models" / f"{model}.yaml", rng.choice(fragment["methods"])]
        named["+".join(part.stem for part in parts)] = parts
    for model in fragment["models"]:
        if "resnet" not in model.stem and "mobile" not in model.stem and "torchvision" not in model.stem:
            parts = [ROOT / "data" / "digits.yaml", model, rng.choice(fragment["methods"])]
            named["+".join(part.stem for part in parts)] = parts
    return named


@functools.cache
def resolved(base: str) -> dict[str, Any]:
    """A config with all defaults, small enough for a quick run."""
    import yaml

    from fl_lightning.cli import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["fit", *(f"--config={part}" for part in bases()[base]), "--print_config"])
    config = yaml.safe_load(text.getvalue())
    data = config["data"]["init_args"]
    config["trainer"] |= {"max_rounds": 1, "logger": False, "enable_progress_bar": False, "callbacks": None}
    config["trainer"] |= {"local_epochs": 1, "default_root_dir": "runs"}
    kind, dealt = config["data"]["class_path"].rsplit(".", 1)[-1], json.dumps(data.get("partitioner"))
    number = 1 if "Pooled" in dealt else 4 if "ByDomain" in dealt else 2
    small = {"offline": True, "train_size": 80, "test_size": 30, "num_clients": number, "largest": 60}
    data |= {key: value for key, value in small.items() if key in data}
    model = config["model"]["init_args"]
    model = model["module"]["init_args"] if "module" in model else model  # of with_group_norm
    model["num_classes"] = CLASSES_OF.get(kind, 10)
    if model["encoder"]["class_path"].endswith("Logistic") and data.get("channels") == 3:
        model["encoder"]["init_args"]["in_features"] = 3 * data["image_size"] ** 2
    return config


def places(config: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all entries of a config."""
    entries = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def get(config: Any, path: tuple) -> Any:
    """The entry at a path."""
    for key in path:
        config = config[key]
    return config


def misspelt(word: str, rng: random.Random) -> str:
    """A word with two letters exchanged, or one left out or doubled."""
    if len(word) < 2:
        return word + "x"
    i = rng.randrange(len(word) - 1)
    return rng.choice([word[:i] + word[i + 1] + word[i] + word[i + 2 :], word[:i] + word[i + 1 :], word[:i] + word[i:]])


def mutate(config: dict[str, Any], rng: random.Random) -> str:
    """Change one place of a config, in place; return a description of the change."""
    path = rng.choice([p for p in places(config) if p[:2] != ("trainer", "default_root_dir")])
    parent, key = get(config, path[:-1]), path[-1]
    where, old = ".".join(map(str, path)), get(config, path)
    kinds = ["value"] * 6 + ["key", "delete", "add", "unknown"]
    kinds += ["class"] * 4 if key == "class_path" else []
    kinds += ["number"] * 4 if isinstance(old, (int, float)) and not isinstance(old, bool) else []
    kinds += ["list"] * 3 if isinstance(old, list) else []
    kind = rng.choice(kinds)
    if kind == "value":
        parent[key] = copy.deepcopy(rng.choice(VALUES))
        return f"{where}={parent[key]!r}"
    if kind == "number":
        parent[key] = rng.choice([-old, old * 1000, old / 1000, old + 0.5, str(old), [old], old * 10**9])
        return f"{where}={parent[key]!r}"
    if kind == "class":
        short = old.rsplit(".", 1)[-1]
        parent[key] = rng.choice([*CLASSES, misspelt(short, rng), misspelt(old, rng)])
        if rng.random() < 0.5:
            parent["init_args"] = {}
        return f"{where}={parent[key]!r}"
    if kind == "list":
        parent[key] = rng.choice([old + old, old[:1], old[::-1], [old], {"0": old}, [*old, None]])
        return f"{where} as {json.dumps(parent[key], default=str)[:80]}"
    if kind == "key" and isinstance(key, str):
        new = misspelt(key, rng)
        parent[new] = parent.pop(key)
        return f"{where} named {new}"
    if kind == "add":
        part = rng.choice(list(MORE))
        name, value = rng.choice(list(MORE[part].items()))
        target = config
        for step in part.split("."):
            target = target.get(step, {}) if isinstance(target, dict) else {}
        if isinstance(target, dict):
            target[name] = copy.deepcopy(value)
        return f"{part}.{name} added"
    if kind == "delete":
        parent.pop(key)
        return f"{where} deleted"
    if isinstance(parent, dict):
        added = rng.choice(["unknown", "lr", "momentum", "weight_decay", "alpha"])
        parent[added] = rng.choice([-1, math.nan, 0.1, "x"])
    return f"an unknown key next to {where}"


def damage(text: str, rng: random.Random) -> tuple[bytes, str]:
    """Return the text of a config, changed in one place, as bytes, and a description of the change."""
    lines = text.splitlines()
    valued = [number for number, line in enumerate(lines) if re.match(r"\s*(?:- )?\w+: \S", line)]
    number = rng.choice(valued)
    kind = rng.choice(["value"] * 12 + ["encoding"] * 3 + ["character"] * 3 + ["twice"] * 3 + ["line"] * 3 + ["whole"])
    if kind == "value":
        key, new = lines[number].partition(": ")[0], rng.choice(TEXTS)
        lines[number] = f"{key}: {new}"
        done = f"{key.strip()} as {new[:60]}"
    elif kind == "encoding":
        encoding = rng.choice(["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp500", "utf-7"])
        return f"# é ü\n{text}".encode(encoding), f"as {encoding}"
    elif kind == "character":
        place, codes = rng.randrange(len(text)), [*range(32), *b"'\"{}[]&*!|>%@`:,#-?\\", *range(127, 256)]
        new = bytes([rng.choice(codes)])
        content = text.encode()
        return content[:place] + new + content[place + rng.choice([0, 1]) :], f"{new!r} at {place}"
    elif kind == "twice":
        first = rng.choice([number, *(n for n, line in enumerate(lines) if re.match(r"\w", line))])
        lines.insert(rng.choice([first, first + 1, len(lines)]), lines[first])
        done = f"{lines[first].strip()[:60]} twice"
    elif kind == "line":
        new = rng.choice(["\t", " ", "  ", "- ", "3: 4\n", "? [a]\n: b\n", "---\n", "...\n", "%YAML 3.0\n", "<<: {}\n"])
        lines[number] = new + (lines[number].lstrip() if new == "\t" else lines[number])
        done = f"{new!r} before {lines[number].strip()[:60]}"
    else:
        whole = ["", "# a", "a", "3", "- a", "~", "{}", f"{text}---\n{text}", text[: rng.randrange(len(text))]]
        new = rng.choice(whole)
        return new.encode(), f"the whole as {new[:20]!r}, {len(new)} characters"
    return "\n".join([*lines, ""]).encode(), done


def case(number: int, seed: int) -> tuple[bytes, dict[str, Any]]:
    """The config of a case as the bytes of its file, and its record."""
    import yaml

    rng, of_text = random.Random(f"{seed}/{number}"), random.Random(f"{seed}/{number}/text")
    name = rng.choice(list(bases()))
    config = copy.deepcopy(resolved(name))
    if of_text.random() < 1 / 3:
        content, done = damage(yaml.safe_dump(config), of_text)
        return content, {"case": number, "base": name, "changes": [f"text: {done}"]}
    changes = [mutate(config, rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    return yaml.safe_dump(config).encode(), {"case": number, "base": name, "changes": changes}


def work(folder: Path, content: bytes) -> None:
    """Run a case in a forked process; it does not return."""
    from fl_lightning.cli import main

    os.setsid()
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (GIBIBYTES * 2**30,) * 2)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    status: Any = 0
    try:
        (folder / "config.yaml").write_bytes(content)
        main(["fit", "--config", "config.yaml"])
    except SystemExit as error:
        status = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 71)


def judge(folder: Path, status: int | None, changes: list[str]) -> tuple[str, str]:
    """Return the kind of a case's outcome, and its line, shortened."""
    said = (folder / "err").read_text(errors="replace") if (folder / "err").exists() else ""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name not in KEPT)
    last = (said.strip().splitlines() or [""])[-1]
    if status is None:
        # accepted, and longer than the time of a case
        return ("long run" if LONG.search(" ".join(changes)) and left else "hang"), last
    if status < 0:
        return "killed", f"{signal.Signals(-status).name}: {last}"
    if status == 0:
        bad = [path for path in left if path.endswith("metrics.csv") and not finite(folder / path)]
        return ("nan as success", f"{bad} {last}") if bad else ("success", "")
    if "Traceback" in said or status not in (1, 2) or len(lines) != 1:
        return "traceback", last
    line = lines[0].removeprefix("error: ")
    if len(lines[0]) > LONGEST:
        return "long line", line
    if status == 1:
        return ("failed in a round" if re.match(r"client|round|trainer", line) else "other"), line
    if left:
        return "folder left", f"{left[:3]} {line}"
    if not re.match(r"[\w.,\[\]' ()\"/@-]+[=:]", line):
        return "no key", line
    return ("refused" if REMEDY.search(line) else "no remedy"), line


KEPT = ("out", "err", "config.yaml")
GOOD = ("success", "refused", "failed in a round", "long run")
LONG = re.compile(r"trainer\.(max_rounds|local_epochs|local_steps|accumulate_grad_batches)=\d{3,}")


def finite(table: Path) -> bool:
    """Whether a table of metrics holds neither nan nor infinite values."""
    with open(table) as file:
        cells = [cell for row in csv.DictReader(file) for cell in row.values() if cell]
    return all(math.isfinite(float(cell)) for cell in cells)


def end(pid: int, seconds: float, began: float) -> int | None:
    """The status of a process that has ended; None where it was ended since its time is over, -999 while it runs."""
    done, how = os.waitpid(pid, os.WNOHANG)
    if done:
        return os.waitstatus_to_exitcode(how)
    if time.monotonic() - began < seconds:
        return -999
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def run_all(numbers: list[int], seed: int, jobs: int) -> Iterator[dict[str, Any]]:
    """Run the cases, several at a time, and yield their records."""
    running: dict[int, tuple[Path, dict[str, Any], float]] = {}
    waiting = numbers[::-1]
    while waiting or running:
        while waiting and len(running) < jobs:
            content, record = case(waiting.pop(), seed)
            folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                work(folder, content)
            running[pid] = folder, record, time.monotonic()
        for pid, (folder, record, began) in list(running.items()):
            status = end(pid, SECONDS, began)
            if status == -999:
                continue
            del running[pid]
            kind, line = judge(folder, status, record["changes"])
            yield {**record, "kind": kind, "line": line, "status": status, "seconds": time.monotonic() - began}
            shutil.rmtree(folder)
        time.sleep(0.01)


def main_() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", type=int, nargs="*", help="these cases, each with its config")
    given = parser.parse_args()

    import torch

    import fl_lightning.cli  # noqa: F401

    for name in ("torchvision", "sklearn.datasets", "sklearn.model_selection", "scipy.stats", "scipy.io"):
        __import__(name)  # before the fork, so that it is done once
    torch.set_num_threads(1)
    sys.argv = ["cli.py"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    counts: Counter[str] = Counter()
    for record in run_all(given.only or list(range(given.number)), given.seed, given.jobs):
        counts[record["kind"]] += 1
        if given.output:
            with open(given.output, "a") as file:
                file.write(json.dumps(record, default=str) + "\n")
        if record["kind"] not in GOOD or given.only:
            print(f"{record['case']}: {record['kind']}: {record['changes']}: {record['line'][:400]}", flush=True)
    print(", ".join(f"{kind} {number}" for kind, number in counts.most_common()))
    sys.exit(any(kind not in GOOD for kind in counts))


if __name__ == "__main__":
    main_()
