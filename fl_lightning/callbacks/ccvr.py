r"""CCVR: Luo et al., No Fear of Heterogeneity: Classifier Calibration for FL, NeurIPS 2021, Algorithm 1.

Paper: https://arxiv.org/abs/2106.05001

With client k's count :math:`n_{kc}`, mean :math:`\mu_{kc}` and unbiased covariance :math:`\Sigma_{kc}` of class c:

.. math::
    \mu_c = \sum_k \frac{n_{kc}}{n_c} \mu_{kc}, \qquad
    \Sigma_c = \sum_k \left( \frac{n_{kc} - 1}{n_c - 1} \Sigma_{kc}
        + \frac{n_{kc}}{n_c - 1} \mu_{kc} \mu_{kc}^\top \right) - \frac{n_c}{n_c - 1} \mu_c \mu_c^\top
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.measurement import labelled, require_global_model
from fl_lightning.callbacks.spectrum import rows_and_products
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.seeding import torch_rng
from fl_lightning.core.state import State, clone, uncompiled_names
from fl_lightning.core.weighted import Sums
from fl_lightning.storage.atomic_io import save
from fl_lightning.utilities.errors import require


class ClassStatistics:
    """Count, mean and unbiased covariance of the representations of each class, in float64.

    Adding the sums of several clients is equivalent to merging their means and covariances.
    """

    def __init__(self, num_classes: int) -> None:
        self.sums = [Sums() for _ in range(num_classes)]

    def add(self, z: Tensor, targets: Tensor) -> None:
        """Count representations ``(B, ...)`` with labels ``(B,)``."""
        rows, labels = z.cpu(), targets.cpu()
        for c in labels.unique().tolist():
            self.sums[c].add(rows_and_products(rows[labels == c]))

    @property
    def counts(self) -> list[int]:
        """Number of examples n_c of each class, C numbers."""
        return [int(sums.totals["rows"].weight) if sums.totals else 0 for sums in self.sums]

    def gaussian(self, c: int) -> tuple[Tensor, Tensor]:
        """Return mean ``(d,)`` and unbiased covariance ``(d, d)`` of class ``c``, which has at least 2 examples."""
        number, totals = self.counts[c], self.sums[c].totals
        mean = totals["rows"].total / number
        return mean, (totals["products"].total - number * torch.outer(mean, mean)) / (number - 1)

    def sample(self, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return ``number`` draws from the Gaussian of each class with at least 2 examples, and their labels."""
        drawn, classes = [], [c for c, count in enumerate(self.counts) if count >= 2]
        require(len(classes) > 0, "CCVR with the largest class", max(self.counts), "it needs 2 examples of a class")
        for c in classes:
            mean, covariance = self.gaussian(c)
            # with fewer examples than dimensions some eigenvalues are 0, and rounding may make them negative
            values, vectors = torch.linalg.eigh(covariance)
            noise = torch.randn(number, len(mean), generator=generator, dtype=torch.float64)
            drawn.append(mean + (noise * values.clamp_min(0).sqrt()) @ vectors.T)
        return torch.cat(drawn).float(), torch.tensor(classes).repeat_interleave(number)


class CCVR(Callback):
    r"""Calibrates the final global model's classifier on representations drawn from a Gaussian of each class.

    After the last round, the training examples from every client's loader pass the global model in eval mode. Only the
    classifier is then trained on the draws, starting from its global weights. The result of ``fit`` does not change:
    the calibrated model is evaluated as ``ccvr/accuracy`` and saved as ``checkpoints/ccvr.ckpt``.

    Args:
        samples_per_class: number M of draws from each class, at least 1; the paper tunes it. Classes with fewer than 2
            examples have no draws.
        epochs: passes over the draws, at least 1.
        lr: learning rate of SGD with momentum 0.9, above 0.
        batch_size: draws in a step, at least 1.

    Raises:
        UsageError: the run has no global model because entries of the state stay with the clients, or ``logits`` is not
            a layer that reads the representation.
    """

    requires = ("representation", "logits")

    def __init__(self, samples_per_class: int = 200, epochs: int = 10, lr: float = 0.01, batch_size: int = 64) -> None:
        require(samples_per_class >= 1, "CCVR.samples_per_class", samples_per_class, "use 1 or more")
        require(epochs >= 1, "CCVR.epochs", epochs, "use 1 or more")
        require(lr > 0, "CCVR.lr", lr, "use a number above 0")
        require(batch_size >= 1, "CCVR.batch_size", batch_size, "use 1 or more")
        self.samples_per_class, self.epochs, self.lr, self.batch_size = samples_per_class, epochs, lr, batch_size

    def setup(self, trainer: RunContext) -> None:
        self._path = trainer.client.tap_paths["logits"]
        head = trainer.client.module.get_submodule(self._path)
        trained = isinstance(head, nn.Linear) and head.weight.requires_grad
        require(trained, "CCVR with the tap logits", self._path, "bind it to the last linear layer, which is trained")
        require_global_model(trainer, self, "remove CCVR")

    def on_last_round_end(self, trainer: RunContext) -> None:
        began = time.perf_counter()
        state = clone(trainer.methods.evaluated_state(trainer.server))
        state |= self._calibrated(trainer, state)
        for tag, value in trainer.evaluate("test", state).items():
            trainer.log(f"ccvr/{tag.removeprefix('test/')}", value)
        trainer.log("time/ccvr", time.perf_counter() - began)
        if trainer.run_dir is not None:
            save({"state_dict": uncompiled_names(state)}, trainer.run_dir / "checkpoints" / "ccvr.ckpt")

    def _calibrated(self, trainer: RunContext, state: State) -> State:
        """Return the entries of the calibrated classifier by name in the state; workers share the clients."""
        path = self._path
        prefix = f"{path}."
        names = [name for name in state if name.startswith(prefix)]
        entries = {name.removeprefix(prefix): state[name] for name in names}
        classes, width = entries["weight"].shape
        statistics = ClassStatistics(classes)
        for z, targets in labelled(trainer, self, state, "representation", "train"):
            statistics.add(z, targets)
        for sums in statistics.sums:
            trainer.all_reduce(sums)
        head = nn.Linear(width, classes, bias="bias" in entries)
        head.load_state_dict(entries)
        generator = torch_rng(trainer.seed, "ccvr")
        draws = TensorDataset(*statistics.sample(self.samples_per_class, generator))
        loader = DataLoader(draws, self.batch_size, shuffle=True, generator=generator)
        optimizer = SGD(head.parameters(), lr=self.lr, momentum=0.9)
        for _ in range(self.epochs):
            for z, targets in loader:
                optimizer.zero_grad()
                cross_entropy(head(z), targets).backward()
                optimizer.step()
        calibrated = head.state_dict()
        return {prefix + name: value.to(entries[name]) for name, value in calibrated.items()}
