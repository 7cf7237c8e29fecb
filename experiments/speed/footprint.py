"""Count live tensors, operations and waits for the device in a round, by method, on a CPU.

python experiments/speed/footprint.py [--methods FedAvg SCAFFOLD] [--width 1024] [--clients 4] [--together 1]

A multilayer perceptron of `width`, trained by SGD without momentum on batches of 8, so that activations are small.

* memory: the most bytes of live tensors, as a multiple of the parameters in float32; without the memories that clients
  keep between rounds, in brackets with them.
* operations: calls of ATen in a local step, a visit and a round, which are launches of kernels on a GPU.
* waits: reads of a number, or of a comparison, that a GPU would have to finish its queue for. The parameters, the
  batches, and all tensors that are computed from these or made for the device of the run count as being on the device.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fl_lightning import FederatedTrainer, Method
from fl_lightning.callbacks import Callback
from fl_lightning.data import IID, NpyImages
from fl_lightning.models import Encoder, ImageClassifier
from fl_lightning.state import num_bytes

ATEN = torch.ops.aten
READS = {ATEN._local_scalar_dense.default, ATEN.equal.default, ATEN.nonzero.default, ATEN.is_nonzero.default}
TO_HOST = {Tensor.tolist, Tensor.cpu, Tensor.numpy}
CLASSES, BATCH = 10, 8
# other devices do without the search for low bits, and FedUV's matrix products
ONLY_ON_CPU = ("aggregation/exact.py _add_chunk", "functional/uniformity.py _squared_distances")


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
        key = tensor.untyped_storage()._cdata
        return key in self._host and not self._host[key].expired()

    def mark_as_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor that lies in host memory."""
        self._host[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def note_wait(self) -> None:
        """Count a wait by the function of the package that waits."""
        frames = [one for one in traceback.extract_stack() if "fl_lightning/" in one.filename]
        where = f"{frames[-1].filename.split('fl_lightning/')[-1]} {frames[-1].name}" if frames else "elsewhere"
        if where not in ONLY_ON_CPU:
            self.waits[where] += 1

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
    """Shows ``counts`` the copies to host memory, which on a CPU are no operations."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = func in TO_HOST and not self.counts.on_host(args[0])
        if copies:
            self.counts.note_wait()
        out = func(*args, **kwargs or {})
        return self.counts.mark_as_host(out.clone()) if copies and func is Tensor.cpu else out


class Perceptron(Encoder):
    """Four layers of `width`, for images of 32 x 32 pixels, which are averaged to 8 x 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(192, width), *(nn.Linear(width, width) for _ in range(4))])
        self.early, self.out_features = ("layers.0", "layers.1"), width

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(x, 4).flatten(1)
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Watch(Callback):
    """Begins to count in the third round, when all clients have memories, and ends at the start of the fourth."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        counts = self.counts
        if trainer.server.round == 2:
            counts.peak, counts.operations, counts.waits = counts.live, 0, Counter()
        if trainer.server.round == 3:
            memories = trainer.client.memories()
            self.found = counts.peak, counts.operations, Counter(counts.waits)
            self.memories = sum(num_bytes(memories[k]) for k in memories)
            self.model = sum(one.numel() * 4 for one in trainer.client.module.parameters())


def count(method: list[Method], width: int, clients: int, steps: int, together: int) -> Watch:
    """Count a round of ``clients`` clients with ``steps`` batches each."""
    with tempfile.TemporaryDirectory() as folder, Counts() as counts, Copies(counts):
        seed_everything(0, verbose=False)
        watch = Watch(counts)
        trainer = FederatedTrainer(
            max_rounds=4,
            callbacks=[watch],
            logger=False,
            enable_progress_bar=False,
            accelerator="cpu",
            clients_per_step=together,
            default_root_dir=folder,
            eval_every_n_rounds=4,
        )
        model = ImageClassifier(Perceptron(width), num_classes=CLASSES, optimizer=partial(torch.optim.SGD, lr=0.01))
        trainer.fit(
            model,
            NpyImages(
                offline=True,
                train_size=clients * steps * BATCH,
                test_size=BATCH,
                num_clients=clients,
                batch_size=BATCH,
                partitioner=IID(),
            ),
            method,
        )
    return watch
