"""Check the package on a GPU: results that repeat, every method and callback, waits, memory, and workers.

python experiments/gpu/check.py [--output FOLDER] [--seconds 200] [--parts smoke methods waits:FedAvg] [--jobs 10]
python experiments/gpu/check.py --device cpu --tiny

Run it in the root of the repository. FOLDER/check.jsonl has a line for each finding, FOLDER/check.log the output.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from parts import Part, Program, arguments_of_parts, each, mps, run_program  # next to this file

sys.path.insert(0, str(Path.cwd() / "experiments/speed"))

import torch
from footprint import WAITS, footprint  # in experiments/speed
from methods import FEDAVG, METHODS
from overhead import machine
from smoke_runs import compare, fit_command, folder, images, newest, run_here, start

from fl_lightning import callbacks

# of the metrics on the GPU without TF32 and on the CPU
MAX_GAP = 1e-3
MIXED = ("fedavg", "scaffold", "moon", "fedcka")
CONFIGS = sorted(path.stem for path in Path("experiments/smoke").glob("*.yaml") if path.stem != "two_workers")
# without the base classes, and those that need arguments
CALLBACKS = sorted({*callbacks.__all__} - {"Callback", "Measurement", "BestCheckpoint", "EarlyStopping"})


def versions(program: Program) -> None:
    installed = {package.metadata["Name"]: package.version for package in distributions()}
    program.record(machine=machine(), packages=installed, mps=shutil.which("nvidia-cuda-mps-control"))
    if program.on_gpu:
        card = torch.cuda.get_device_properties(0)
        program.record(card=card.name, memory=card.total_memory, capability=torch.cuda.get_device_capability())
        program.record(cudnn=torch.backends.cudnn.version(), cuda=torch.version.cuda)
        subprocess.run(["nvidia-smi"])


# ------------------------------------------------------------------ runs that repeat
def on_images(program: Program, number: int) -> list[str]:
    """Arguments of a run of FedCKA's network on generated images."""
    network = ["--config", "experiments/models/fedckacnn.yaml", "--model.init_args.optimizer.init_args.lr", "0.05"]
    return [*network, "--data.root", str(images(program, number)), "--data.num_clients", "8"]


def smoke(program: Program) -> None:
    repeat(program, "smoke/feduv", [], 2 if program.tiny else 20)


def convolutions(program: Program) -> None:
    repeat(program, "data/npy_images", on_images(program, 512 if program.tiny else 2048), 2)


def batchnorm(program: Program) -> None:
    network = ["--config", "experiments/models/feduvcnn_small.yaml"]
    repeat(program, "data/npy_images", [*on_images(program, 512 if program.tiny else 1024), *network], 2)


def repeat(program: Program, config: str, more: list[str], rounds: int) -> None:
    """Two runs at the same time; on a GPU, compare a run without TF32 with one on the CPU, too."""

    def begin(name: str, accelerator: str = program.accelerator, **env: str) -> None:
        roots[name] = folder(program, name)
        command = fit_command(program, config, roots[name], max_rounds=rounds, accelerator=accelerator)
        processes[name] = start([*command, *more], **env)

    roots: dict[str, Path] = {}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    begin("first")
    begin("second")
    if program.on_gpu:
        begin("no_tf32", NVIDIA_TF32_OVERRIDE="0")
        begin("cpu", accelerator="cpu")
    failed = [name for name, process in processes.items() if process.wait()]
    program.record(ok=not failed, failed=failed)
    again = compare(roots["first"], roots["second"])
    program.record(compared="two runs", ok=again["same_bits"], **again)
    if program.on_gpu:
        with_cpu = compare(roots["no_tf32"], roots["cpu"])
        program.record(compared="without TF32, with the CPU", ok=with_cpu["gap_of_metrics"] <= MAX_GAP, **with_cpu)


# ------------------------------------------------------------------ methods and callbacks
def methods(program: Program, config: str, precision: str) -> None:
    """Two rounds, and one round with a second one after resuming, have the same bits; compare with the CPU, too."""
    whole, resumed, on_cpu = (folder(program, name) for name in ("whole", "resumed", "cpu"))

    def fit(root: Path, rounds: int, *more: str, **trainer: object) -> None:
        options = {"precision": precision, "max_rounds": rounds, **trainer}
        run_here([*fit_command(program, f"smoke/{config}", root, **options), *more])

    fit(whole, 2)
    fit(resumed, 1)
    fit(resumed, 2, "--ckpt_path", "last")
    again = compare(whole, resumed)
    program.record(compared="after resuming", ok=again["same_bits"], **again)
    if program.on_gpu:
        fit(on_cpu, 2, accelerator="cpu")
        program.record(compared="with the CPU", **compare(whole, on_cpu))


def callback(program: Program, name: str) -> None:
    more = ["--trainer.callbacks", name, "--data.val_fraction", "0.1"]
    run_here([*fit_command(program, "smoke/fedavg", folder(program, "run"), max_rounds=2), *more])


def commands(program: Program) -> None:
    """The other commands on the checkpoint of a run."""
    root = folder(program, "run")
    usual = [*fit_command(program, "smoke/fedavg", root, max_rounds=2), "--data.val_fraction", "0.1"]
    for command in ("fit", "test") if program.tiny else ("fit", "doctor", "validate", "test", "predict"):
        last = [] if command in ("fit", "doctor") else ["--ckpt_path", str(newest(root) / "checkpoints" / "last.ckpt")]
        status = start([command, *usual[1:], *last]).wait()
        program.record(command=command, ok=status == 0)


# ------------------------------------------------------------------ waits and memory
def waits(program: Program, name: str) -> None:
    """Waits of a step, a visit and a round, and the most memory as a multiple of the parameters."""
    counts = footprint(name, 2048 if program.on_gpu else 512, device=program.device)
    program.record(ok=counts.is_within_limits(name), waits_at_most=WAITS, **counts._asdict())


# ------------------------------------------------------------------ workers
def workers(program: Program, counts: tuple[int, ...] = (1, 2, 4, 8)) -> None:
    """Any number of workers gives the same bits, with memories of clients and with convolutions."""
    cases: dict[str, tuple[str, list[str]]] = {"scaffold": ("smoke/scaffold", ["--data.num_clients", "8"])}
    if not program.tiny:
        cases["convolutions"] = ("data/npy_images", on_images(program, 2048))
    for case, (config, more) in cases.items():
        for count in counts[: 2 if program.tiny else None]:
            name = "workers_per_device" if program.on_gpu else "devices"
            root = folder(program, f"{case}-{count}")
            options: dict[str, Any] = {"max_rounds": 2, "threads_per_worker": 1, name: count}
            status = start([*fit_command(program, config, root, **options), *more]).wait()
            gaps = {"same_bits": False} if status else compare(folder(program, f"{case}-{counts[0]}"), root)
            program.record(case=case, workers=count, ok=gaps["same_bits"], **gaps)


def workers_with_mps(program: Program) -> None:
    """Workers over NVIDIA's Multi-Process Service."""
    with mps(program) as works:
        if works:
            workers(program, (1, 4, 8))


def parts(tiny: bool, on_gpu: bool) -> dict[str, Part]:
    """The parts by name, each with its limit in seconds."""
    shortest = 1 if tiny else None
    mixed = ("16-mixed", "bf16-mixed") if on_gpu else ("bf16-mixed",)
    return {
        **each(versions, 60),
        **each(smoke, 130),
        **each(methods, 60, *[(name, "32-true") for name in CONFIGS[:shortest]]),
        **each(waits, 60, *[(name,) for name in (FEDAVG, *METHODS)[:shortest]]),
        **each(convolutions, 130),
        **each(workers, 150),
        **(each(batchnorm, 120) if not tiny else {}),
        **each(methods, 60, *[(name, precision) for precision in mixed for name in MIXED[:shortest]]),
        **each(callback, 60, *[(name,) for name in CALLBACKS[:shortest]]),
        **each(commands, 120),
        **each(workers_with_mps, 120),
    }


if __name__ == "__main__":
    args = arguments_of_parts(__doc__, 200, 10).parse_args()
    run_program(__file__, args, parts(args.tiny, args.device == "cuda"))
