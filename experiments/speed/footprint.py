"""Count the live tensors, the operations and the waits for the device in a round, on a CPU or a GPU.

python experiments/speed/footprint.py [--methods FedAvg SCAFFOLD] [--width 1024] [--clients 2] [--together 1] [--places]
                                      [--device cuda]

A perceptron of five layers is trained by SGD without momentum on batches of 8, so that activations are small.

* memory: the most bytes of live tensors, as a multiple of the parameters in float32, without the memories that clients
  keep between rounds, which are listed as held.
* operations: calls of ATen, each of which launches one kernel or more on a GPU.
* waits: reads of a number or a comparison for which a GPU would have to finish its queue, and copies from pageable main
  memory to the device. Parameters, batches, all that is computed from these, and tensors made for the device of the run
  count as being on the device.

On a GPU, memory is what torch's allocator has given out, without the clients' memories, which lie in main memory. Waits
are those that torch warns of, and operations are not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from methods import FEDAVG, METHODS  # next to this file

from fl_lightning import FederatedTrainer
from fl_lightning.callbacks import Callback
from fl_lightning.core.state import num_bytes
from fl_lightning.data import IID, NpyImages
from fl_lightning.models import Encoder, ImageClassifier

ATEN = torch.ops.aten
READS = {ATEN._local_scalar_dense.default, ATEN.equal.default, ATEN.nonzero.default, ATEN.is_nonzero.default}
TO_HOST = {Tensor.tolist, Tensor.cpu, Tensor.numpy}
MAKERS = {torch.tensor, torch.as_tensor}
BATCH = 8
# methods for networks with BatchNorm
NEED_NORM = ("FedBN", "FixBN")
# the most waits of a step, of a visit beside its steps, and of a round beside both
WAITS = (0, 8, 16)
# the most memory: 9 times the parameters, and more for methods that keep further copies of them, send a changed update,
# have fractional client weights, or compute gradients elsewhere
SENT = ("FedBABU", "FedBN", "FedDisco", "FedExP", "FedNova", "FedPer", "FedRep", "FedRoD", "Freeze")
COPIES = ("MOON", "FedCKA", "FedNTD", "FedVLS", "Ditto", "APFL", "PFedMe", *SENT)
MEMORY = {"SCAFFOLD": 16, "FedDyn": 16, **dict.fromkeys(COPIES, 13)}
MEMORY |= {"FedSAM": 10, "FedASAM": 10, "PerFedAvg": 10, "FedALA": 11, "FedAS": 14, "IFCA": 19, "FedAMP": 20}
# the round of a method whose server sums the clients of each cluster waits for each entry of the state
WAITS_OF = {"IFCA": (0, 8, 80)}
# other devices do without the search for low bits, and FedUV's matrix products
ONLY_ON_CPU = ("core/exact_sum.py _add_chunk", "functional/uniformity.py _squared_distances")


class Counts(TorchDispatchMode):
    """Counts operations and waits, and the most bytes of live tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.live = 0
        self.operations = 0
        self.waits: Counter[str] = Counter()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        # storages of tensors that a GPU run has in host memory
        self._host: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operations += 1
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if func in READS and not all(map(self.on_host, given)):
            self.note_wait()
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        host = kwargs.get("device") is None and all(map(self.on_host, given))
        for tensor in made:
            self._note(tensor, host or func is ATEN.lift_fresh.default)
        return out

    def on_host(self, tensor: Tensor) -> bool:
        if torch._C._functorch.is_batchedtensor(tensor):  # clients side by side, whose values lie on the device
            return False
        key = tensor.untyped_storage()._cdata
        return key in self._host and not self._host[key].expired()

    def mark_as_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor that lies in host memory."""
        self._host[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def mark_as_on_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor that lies on the device."""
        self._host.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def note_wait(self) -> None:
        """Count a wait by the function of the package that waits."""
        if (where := place()) not in ONLY_ON_CPU:
            self.waits[where] += 1

    def reset(self) -> None:
        """Begin to count."""
        self.peak, self.operations, self.waits = self.live, 0, Counter()

    def _note(self, tensor: Tensor, host: bool) -> None:
        storage = tensor.untyped_storage()
        key, ref = storage._cdata, StorageWeakRef(storage)
        known = self._storages.get(key)
        if known is None or known[0].expired():
            for other in [other for other, (one, _) in self._storages.items() if one.expired()]:
                self.live -= self._storages.pop(other)[1]
                self._host.pop(other, None)
            self._storages[key] = ref, storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            if host:
                self._host[key] = ref


class Copies(TorchFunctionMode):
    """Shows ``counts`` the copies between host memory and the device, which on a CPU are no operations."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies = func in TO_HOST and not self.counts.on_host(args[0])
        moves = self._moves(func, args, kwargs)
        if copies or moves:
            self.counts.note_wait()
        out = func(*args, **kwargs)
        if moves:
            return self.counts.mark_as_on_device(out.clone())
        return self.counts.mark_as_host(out.clone()) if copies and func is Tensor.cpu else out

    def _moves(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call copies numbers or a tensor of pageable host memory to the device."""
        if func in MAKERS and not isinstance(args[0], Tensor):
            return kwargs.get("device") is not None
        if func is not Tensor.to or kwargs.get("non_blocking") or not self.counts.on_host(args[0]):
            return False
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        return isinstance(target, torch.device) or (isinstance(target, Tensor) and not self.counts.on_host(target))


class CountsOnGPU:
    """Counts waits and the most bytes on a GPU, by torch's own means."""

    operations = 0

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # the usual workspace is half as large as the parameters

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("warn")
        self.waits.clear()

    @contextmanager
    def counting(self) -> Iterator[CountsOnGPU]:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._note  # type: ignore[assignment]
            try:
                yield self
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _note(self, message: Warning | str, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.waits[place()] += 1


def place() -> str:
    """The function of the package that is being called."""
    frames = [one for one in traceback.extract_stack() if "/fl_lightning/" in one.filename]
    return f"{frames[-1].filename.split('/fl_lightning/')[-1]} {frames[-1].name}" if frames else "elsewhere"


@contextmanager
def counting(device: str) -> Iterator[Counts | CountsOnGPU]:
    """Count what happens in this block."""
    if device == "cuda":
        with CountsOnGPU().counting() as on_gpu:
            yield on_gpu
        return
    with Counts() as counts, Copies(counts):
        yield counts


class Perceptron(Encoder):
    """Five layers of ``width``, for images of 32 x 32 pixels, which are averaged to 8 x 8."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        layers = [nn.Linear(192, width), *(nn.Linear(width, width) for _ in range(4))]
        self.layers = nn.ModuleList(nn.Sequential(one, nn.BatchNorm1d(width)) if norm else one for one in layers)
        self.early, self.out_features = ("layers.0", "layers.1"), width

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(x, 4).flatten(1)
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Watch(Callback):
    """Begins to count in the third round, when all clients have memories, and ends at the start of the fourth."""

    def __init__(self, counts: Counts | CountsOnGPU) -> None:
        self.counts = counts

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        counts = self.counts
        if trainer.server.round == 2:
            counts.reset()
        if trainer.server.round == 3:
            model = sum(4 * parameter.numel() for parameter in trainer.client.module.parameters())
            memories = trainer.client.memories()
            self.operations, self.waits, self.peak = counts.operations, Counter(counts.waits), counts.peak / model
            self.held = sum(num_bytes(memories[k]) for k in memories) / model
            self.memory = self.peak - self.held if isinstance(counts, Counts) else self.peak


def count(name: str, width: int, clients: int, steps: int, together: int, device: str) -> Watch:
    """Count the operations of a round in which ``clients`` clients train ``steps`` batches each."""
    with tempfile.TemporaryDirectory() as folder, counting(device) as counts:
        seed_everything(0, verbose=False)
        watch = Watch(counts)
        sizes = {"train_size": clients * steps * BATCH, "test_size": BATCH, "batch_size": BATCH}
        data = NpyImages(offline=True, num_clients=clients, partitioner=IID(), **sizes)
        model = ImageClassifier(Perceptron(width, norm=name in NEED_NORM), optimizer=partial(torch.optim.SGD, lr=0.01))
        trainer = FederatedTrainer(
            max_rounds=4,
            eval_every_n_rounds=4,
            clients_per_step=together,
            callbacks=[watch],
            logger=False,
            enable_progress_bar=False,
            default_root_dir=folder,
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
        )
        trainer.fit(model, data, METHODS.get(name, list)())
    return watch


class Footprint(NamedTuple):
    """Counts of a method; the waits and operations of a step, of a visit beside its steps, and of a round beside both.

    Args:
        memory: most live bytes as a multiple of the parameters, without the clients' memories.
        held: bytes of the clients' memories as such a multiple.
        operations: calls of ATen.
        waits: reads that wait for the device.
        places: the waits by function of the package.
    """

    memory: float
    held: float
    operations: list[float]
    waits: list[float]
    places: dict[str, list[float]]

    def is_within_limits(self, name: str) -> bool:
        return self.memory <= MEMORY.get(name, 9) and all(
            n <= most for n, most in zip(self.waits, WAITS_OF.get(name, WAITS), strict=True)
        )


def footprint(name: str, width: int, clients: int = 2, together: int = 1, device: str = "cpu") -> Footprint:
    """Count rounds of three sizes, and solve for the parts of a round."""
    sizes = ((clients, 2), (clients, 4), (2 * clients, 2))
    few, long, many = (count(name, width, *size, together, device) for size in sizes)

    def parts(read: Callable[[Watch], float]) -> list[float]:
        step = (read(long) - read(few)) / (2 * clients)
        visit = (read(many) - read(few)) / clients - 2 * step
        return [step, visit, read(few) - clients * (visit + 2 * step)]

    places = few.waits.keys() | long.waits.keys() | many.waits.keys()
    return Footprint(
        many.memory,
        many.held,
        parts(lambda watch: watch.operations),
        parts(lambda watch: watch.waits.total()),
        {place: parts(lambda watch, place=place: watch.waits[place]) for place in sorted(places)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=[FEDAVG, "MOON", "FedCKA", "SCAFFOLD"])
    parser.add_argument("--width", type=int, default=1024, help="of the layers")
    parser.add_argument("--clients", type=int, default=2, help="of the smaller rounds; the larger have twice as many")
    parser.add_argument("--together", type=int, default=1, help="clients that train side by side")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--places", action="store_true", help="list the functions that wait")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, width {args.width}, {args.together} side by side; a step, a visit, a round")
    print(f"{'method':22}{'memory':>8}{'held':>6}{'operations':>24}{'waits':>21}")
    for name in args.methods:
        found = footprint(name, args.width, args.clients, args.together, args.device)
        numbers = "".join(f"{value:8.0f}" for value in found.operations), "".join(f"{v:7.1f}" for v in found.waits)
        print(f"{name:22}{found.memory:8.1f}{found.held:6.1f}{numbers[0]}{numbers[1]}")
        for place, waits in found.places.items() if args.places else ():
            print(f"    {place:60}{''.join(f'{value:7.1f}' for value in waits)}")


if __name__ == "__main__":
    main()
