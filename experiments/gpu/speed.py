"""Measure the speed of a round on a GPU, and how much of each limit it reaches. Parts run one after another.

python experiments/gpu/speed.py [--output FOLDER] [--seconds 200] [--parts ceilings model:ResNet18 workers]
python experiments/gpu/speed.py --device cpu --tiny

Run it in the root of the repository. 10 clients of 1,000 generated images of 32 px, batches of 64, one local epoch, SGD
with momentum; the fastest of the rounds after the first counts, without evaluation. FOLDER/speed.jsonl has a line for
each measurement, FOLDER/speed.log the output and the profiles. A share is the part of our step's time that this takes:

* of_bare: a step of a bare loop, on batches that lie on the device;
* of_matrix: the operations of a step, three times those of a forward pass, at the rate of a large matrix product;
* of_launches: the kernels of a bare step, at the time of a launch.

The loop "graph" is the bare one as a CUDA graph, which takes the time that the GPU itself needs.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from parts import Part, Program, arguments_of_parts, each, mps, run_program  # next to this file

sys.path.insert(0, str(Path.cwd() / "experiments/speed"))

import groups  # in experiments/speed
import numpy as np
import torch
from lightning.pytorch import seed_everything
from overhead import machine
from PIL import Image
from smoke_runs import images
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms

from fl_lightning import FederatedTrainer
from fl_lightning import methods as all_methods
from fl_lightning.callbacks import Callback
from fl_lightning.data import NpyImages, RandomCrop, RandomFlip
from fl_lightning.data.augmentation import Augmentation
from fl_lightning.models import Backbone, FedCKACNN, FedUVCNN, ImageClassifier, Logistic, Projector, ResNet18

BATCH = 64
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
PRECISIONS = ("32-true", "tf32", "bf16-mixed")
# our step takes at most so many times as long as that of a bare loop
MOST_OF_BARE = 1.3


class Unchanged(Augmentation):
    """Changes nothing, and keeps the images in main memory."""

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return images


def vit() -> Backbone:
    import timm

    options = {"model_name": "vit_small_patch16_224", "img_size": 32, "patch_size": 4, "num_classes": 10}
    return Backbone(timm.create_model, options)


MODELS: dict[str, Callable[[], tuple[nn.Module, ...]]] = {
    "ResNet18": lambda: (ResNet18(),),
    "FedCKACNN": lambda: (FedCKACNN(),),
    "FedUVCNN": lambda: (FedUVCNN(4), Projector(256)),
    "ViT-S": lambda: (vit(),),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "crop and flip": {"augment": [RandomCrop(), RandomFlip()]},
    "images in main memory": {"augment": [Unchanged()]},
    "compiled": {"compile": True},
    "CUDA graphs": {"compile": "reduce-overhead"},
}


def build(name: str) -> ImageClassifier:
    return ImageClassifier(*MODELS[name](), num_classes=10, optimizer=SGD)


def sizes(program: Program) -> tuple[int, int, int]:
    """Clients, images of a client, and rounds that count."""
    return (2, 64, 1) if program.tiny else (10, 1000, 3)


def use_tf32(precision: str) -> str:
    """Let torch compute float32 in full or as TF32; returns Fabric's precision."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    return "32-true" if precision == "tf32" else precision


def seconds(program: Program, function: Callable[[], object]) -> float:
    """Seconds of a call, until the device has finished."""
    synchronize = torch.cuda.synchronize if program.on_gpu else lambda: None
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began


# ------------------------------------------------------------------ the limits of the machine
def ceilings(program: Program) -> None:
    """Rates of a large matrix product and of memory, and the time of a launch."""
    size, number, launches = (256, 2**20, 100) if program.tiny else (8192, 2**30, 2000)

    def fastest(function: Callable[[], object]) -> float:
        return min(seconds(program, function) for _ in range(8))

    def launch() -> None:
        for _ in range(launches):
            small.add_(1.0)

    rates = {}
    for precision in PRECISIONS:
        use_tf32(precision)
        kind = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
        a, b = (torch.randn(size, size, device=program.device).to(kind) for _ in range(2))
        rates[precision] = 2 * size**3 / fastest(lambda a=a, b=b: a @ b)
    source = torch.empty(number, dtype=torch.uint8, device=program.device)
    small = torch.zeros(16, device=program.device)
    target, host = torch.empty_like(source), torch.empty(number // 8, dtype=torch.uint8, pin_memory=program.on_gpu)
    limits = {
        "rates": rates,
        "bandwidth": 2 * number / fastest(lambda: target.copy_(source)),
        "to_device": len(host) / fastest(lambda: source[: len(host)].copy_(host, non_blocking=True)),
        "launch": fastest(launch) / launches,
    }
    (program.scratch / "ceilings.json").write_text(json.dumps(limits))
    card = torch.cuda.get_device_name() if program.on_gpu else None
    program.record(machine=machine(), card=card, cuda=torch.version.cuda, **limits)


class BareLoop:
    """A training loop on batches that lie on the device."""

    def __init__(self, program: Program, name: str, precision: str) -> None:
        use_tf32(precision)
        self._program, self._network = program, build(name).to(program.device)
        self._autocast = torch.autocast(program.device, torch.bfloat16, enabled=precision == "bf16-mixed")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self._network.eval()(torch.zeros(1, 3, 32, 32, device=program.device))
        self.operations = 3 * counter.get_total_flops() * BATCH
        form = torch.channels_last if getattr(self._network, "channels_last", False) else torch.contiguous_format
        self._network.train().to(memory_format=form)
        self._optimizer = SGD(self._network.parameters())
        x = torch.randn(4, BATCH, 3, 32, 32, device=program.device)
        labels = torch.arange(BATCH, device=program.device) % 10
        self._batches = [(part.to(memory_format=form), labels) for part in x]

    def step(self, x: Tensor, y: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast:
            loss = nn.functional.cross_entropy(self._network(x), y)
        loss.backward()
        self._optimizer.step()

    def run(self, steps: int) -> None:
        for i in range(steps):
            self.step(*self._batches[i % 4])

    def seconds(self) -> float:
        """Seconds of a step."""
        warm_up, steps = (1, 1) if self._program.tiny else (10, 60)
        self.run(warm_up)
        return statistics.median(seconds(self._program, partial(self.run, steps)) / steps for _ in range(3))

    def num_kernels(self) -> int:
        """Kernels of a step."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.run(1)
        return sum(str(event.device_type).endswith("CUDA") for event in profiler.events())

    def graph_seconds(self) -> float:
        """Seconds of a step as a CUDA graph."""
        x, y = (part.clone() for part in self._batches[0])
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # as torch asks for before a capture
            for _ in range(3):
                self.step(x, y)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            self.step(x, y)

        def replay(steps: int) -> None:
            for i in range(steps):
                x.copy_(self._batches[i % 4][0])
                graph.replay()

        replay(5)
        return seconds(self._program, partial(replay, 60)) / 60


# ------------------------------------------------------------------ rounds of the trainer
class Profile(Callback):
    """Prints the operations of the last round that take the most time."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        if trainer.server.round == trainer.max_rounds - 1:
            self._profiler = profile().__enter__()

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        self._profiler.__exit__(None, None, None)
        averages = self._profiler.key_averages()
        for key in dict.fromkeys((f"self_{self._kind}_time_total", "self_cpu_time_total")):
            print(averages.table(sort_by=key, row_limit=20, max_name_column_width=60))


def rounds(
    program: Program, network: ImageClassifier, data: NpyImages, methods: Any = (), workers: int = 1, **options: Any
) -> dict[str, Any]:
    """Seconds of the fastest round after the first, and by phase."""
    seed_everything(0, verbose=False)
    usual = {"accelerator": program.accelerator, "clients_per_step": 1, "max_rounds": 1 + sizes(program)[2]}
    usual |= {"devices": 1, "workers_per_device": workers} if program.on_gpu else {"devices": workers}
    usual |= {"logger": False, "enable_progress_bar": False, "default_root_dir": program.scratch}
    trainer = FederatedTrainer(**usual | {"eval_every_n_rounds": 1000} | options)
    trainer.fit(network, data, list(methods))
    later = trainer.history[1:]
    fastest = min(row["time/train"] + row["time/server"] for row in later)
    steps = sum(len(data.train_dataloader(k)) for k in range(data.num_clients))
    phases = {key: statistics.median(row[key] for row in later) for key in later[0] if key.startswith("time/")}
    return {"round_s": fastest, "step_ms": 1000 * fastest / steps, "phases": phases}


def ours(program: Program, name: str, precision: str, augment: Any = (), **options: Any) -> dict[str, Any]:
    """Measure the rounds of a model on images."""
    clients, number, _ = sizes(program)
    place = images(program, clients * number)
    data = NpyImages(str(place), num_clients=clients, batch_size=BATCH, augment=list(augment))
    measured = rounds(program, build(name), data, precision=use_tf32(precision), **options)
    measured["images_per_second"] = clients * number / measured["round_s"]
    return {"model": name, "precision": precision, **measured}


def model(program: Program, name: str, precision: str) -> None:
    """A bare loop, our rounds, and the shares of the limits that a step reaches."""
    bare = BareLoop(program, name, precision)
    limits = {"bare": bare.seconds()}
    program.record(model=name, precision=precision, loop="bare", images_per_second=BATCH / limits["bare"])
    path = program.scratch / "ceilings.json"
    ceiling = json.loads(path.read_text()) if path.exists() else None
    if ceiling:
        limits["matrix"] = bare.operations / ceiling["rates"][precision]
    if ceiling and program.on_gpu:
        limits["launches"] = bare.num_kernels() * ceiling["launch"]
    for deterministic in (False, True) if program.on_gpu else (False,):
        measured = ours(program, name, precision, deterministic=deterministic)
        step = measured["step_ms"] / 1000
        fast = step <= MOST_OF_BARE * limits["bare"] or not program.on_gpu
        shares = {f"of_{key}": limit / step for key, limit in limits.items()}
        program.record(ok=fast, loop="ours", deterministic=deterministic, **measured, **shares)
    if program.on_gpu:  # last, since a capture that fails ends the process
        program.record(model=name, precision=precision, loop="graph", images_per_second=BATCH / bare.graph_seconds())


def workers(program: Program, name: str, count: int) -> None:
    program.record(workers=count, **ours(program, name, "bf16-mixed", workers=count))


def workers_with_mps(program: Program, name: str, count: int) -> None:
    with mps(program) as works:
        if works:
            workers(program, name, count)


def setting(program: Program, name: str) -> None:
    program.record(setting=name, **ours(program, "ResNet18", "bf16-mixed", **SETTINGS[name]))


def method(program: Program, name: str) -> None:
    program.record(method=name, **ours(program, "ResNet18", "bf16-mixed", methods=[getattr(all_methods, name)()]))


def together(program: Program, name: str, size: int) -> None:
    """Clients side by side."""
    program.record(clients_per_step=size, **ours(program, name, "32-true", clients_per_step=size))


def profiled(program: Program, name: str) -> None:
    kind = "device" if program.on_gpu else "cpu"
    program.record(**ours(program, name, "bf16-mixed", callbacks=[Profile(kind)], max_rounds=2))


def small(program: Program, size: int) -> None:
    """A logistic regression on 60 numbers, 100 clients of 200 examples, batches of 10: microseconds of a step."""
    clients, max_rounds = (10, 2) if program.tiny else (100, 5)
    place = program.scratch / f"logistic-{size}"
    place.mkdir()
    groups.generate(place, (6, 10, 1), clients * 200)
    for accelerator in dict.fromkeys((program.accelerator, "cpu")):
        data = NpyImages(str(place), num_clients=clients, batch_size=10)
        network = ImageClassifier(Logistic(60), num_classes=10, optimizer=partial(torch.optim.SGD, lr=0.01))
        options = {"accelerator": accelerator, "clients_per_step": min(size, clients), "max_rounds": max_rounds}
        measured = rounds(program, network, data, **options)
        program.record(accelerator=accelerator, clients_per_step=size, step_us=1000 * measured["step_ms"], **measured)


# ------------------------------------------------------------------ the loop of most papers' code
class Pictures(Dataset):
    """Random images, transformed one by one."""

    def __init__(self, number: int, rng: np.random.Generator) -> None:
        self._x, self._y = rng.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, number)
        self._transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.25,) * 3)])

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._x[i])), int(self._y[i])


def usual(program: Program, name: str, loader_workers: int) -> None:
    """FedAvg as most papers' code has it: a deep copy for each client, a DataLoader, the mean of the state dicts."""
    clients, number, _ = sizes(program)
    rng = np.random.default_rng(0)
    datasets = [Pictures(number, rng) for _ in range(clients)]
    use_tf32("32-true")
    server = build(name).to(program.device)

    def one_round() -> None:
        states, losses = [], []
        for dataset in datasets:
            local = copy.deepcopy(server).train()
            optimizer = SGD(local.parameters())
            for x, y in DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=loader_workers):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(local(x.to(program.device)), y.to(program.device))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            states.append(local.state_dict())
        server.load_state_dict({key: sum(state[key].float() for state in states) / clients for key in states[0]})

    fastest = min(seconds(program, one_round) for _ in range(2))
    rate = clients * number / fastest
    program.record(model=name, precision="32-true", loader_workers=loader_workers, images_per_second=rate)


def parts(tiny: bool) -> dict[str, Part]:
    """The parts by name, each with its limit in seconds."""
    networks = ("FedCKACNN",) if tiny else ("ResNet18", "FedCKACNN")
    shortest = 1 if tiny else None

    def with_workers(function: Callable[..., None], *counts: int) -> dict[str, Part]:
        return each(function, 60, *[(name, count) for count in counts[:shortest] for name in networks])

    return {
        **each(ceilings, 40),
        **each(model, 45, *[(name, p) for name in (networks if tiny else MODELS) for p in PRECISIONS[:shortest]]),
        **with_workers(workers, 4),
        **each(small, 40, *[(size,) for size in (1, 10, 100)[:shortest]]),
        **each(profiled, 40, *[(name,) for name in networks]),
        **each(usual, 45, *[("FedCKACNN", 0), ("FedCKACNN", 4), ("ResNet18", 4)][:shortest]),
        **each(together, 40, *[("FedCKACNN", number) for number in (2, 5, 10)[:shortest]]),
        **each(setting, 90, *[(name,) for name in list(SETTINGS)[:shortest]]),
        **with_workers(workers, 2, 8),
        **with_workers(workers_with_mps, 4, 8),
        **each(method, 60, *[(name,) for name in ("FedCKA", "MOON", "FedUV", "FedDecorr")[:shortest]]),
    }


if __name__ == "__main__":
    args = arguments_of_parts(__doc__, 200, 1).parse_args()
    run_program(__file__, args, parts(args.tiny))
