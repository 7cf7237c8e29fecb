"""FedProx's synthetic data (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.seeding import base_seed, numpy_rng
from fl_lightning.data.client_loaders import ArrayBatches
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.plan import Plan
from fl_lightning.utilities.errors import require

FEATURES, CLASSES = 60, 10
MOST_CLIENTS = 100_000


class Synthetic(FederatedDataModule):
    r"""FedProx's Synthetic(:math:`\alpha, \beta`): each client has its own logistic model and its own inputs.

    .. math::
        y = \arg\max (W_k x + b_k), \quad W_k, b_k \sim N(u_k, 1), \quad u_k \sim N(0, \alpha), \quad
        x \sim N(v_k, \Sigma), \quad v_k \sim N(B_k, 1), \quad B_k \sim N(0, \beta), \quad \Sigma_{jj} = j^{-1.2}

    with 60 features, 10 classes, and :math:`50 + e^{N(4, 2)}` samples for each client. Nine tenths of them are for
    training. As in the authors' generator, :math:`\alpha` and :math:`\beta` are standard deviations, and :math:`u_k` is
    one number for all classes. It adds the same to all logits of an input, so :math:`\alpha` changes no label: the data
    are the same for any value. In :class:`SyntheticPerClass` it has an effect.

    Args:
        alpha: standard deviation of :math:`u_k`, at least 0.
        beta: how far their inputs differ, at least 0.
        num_clients: K, at least 1; 30 in FedProx, 100 in FedLC.
        batch_size: examples of a training batch, at least 1.
        largest: upper bound of a client's number of samples; None for no bound.
        iid: all clients have the same model and distribution of inputs: FedProx's Synthetic-IID.
    """

    num_classes = CLASSES

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 1.0,
        num_clients: int = 30,
        batch_size: int = 10,
        largest: int | None = None,
        iid: bool = False,
    ) -> None:
        super().__init__(num_clients)
        hint = f"give at most {MOST_CLIENTS}, which fill the memory"
        require(num_clients <= MOST_CLIENTS, "data.num_clients", num_clients, hint)
        require(0 <= alpha < math.inf, "Synthetic.alpha", alpha, "give 0 or more")
        require(0 <= beta < math.inf, "Synthetic.beta", beta, "give 0 or more")
        require(batch_size >= 1, "data.batch_size", batch_size, "give 1 or more")
        require(largest is None or largest >= 10, "Synthetic.largest", largest, "give 10 or more, or null")
        self.alpha, self.beta, self.batch_size, self.largest, self.iid = alpha, beta, batch_size, largest, iid
        self._ready_for: int | None = None

    def setup(self, stage: str | None = None) -> None:
        """Draw the clients' data; a second call with the same base seed does nothing."""
        if self._ready_for == base_seed():
            return
        clients = self._draw(numpy_rng(base_seed(), "synthetic"))
        cuts = [int(0.9 * len(y)) for _, y in clients]
        # all training samples in two arrays, from which a batch is gathered at once
        parts_of_training = [(x[:cut], y[:cut]) for (x, y), cut in zip(clients, cuts, strict=True)]
        self._train = [torch.cat(column) for column in zip(*parts_of_training, strict=True)]
        self._test = [(x[cut:], y[cut:]) for (x, y), cut in zip(clients, cuts, strict=True)]
        labels = self._train[1].numpy()
        parts = np.split(np.arange(len(labels)), np.cumsum(cuts)[:-1])
        self.plan, self._ready_for = Plan(parts, labels, CLASSES), base_seed()

    def train_dataloader(self, k: int = 0) -> ArrayBatches:
        return ArrayBatches(self._train, torch.from_numpy(self.plan.parts[k]), self.batch_size, shuffle=True)

    def test_dataloader(self, k: int | None = None) -> ArrayBatches:
        """The test samples of all clients, or of client ``k``."""
        parts = self._test if k is None else [self._test[k]]
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        return ArrayBatches([x, y], torch.arange(len(y)), batch_size=512)

    def _draw(self, rng: np.random.Generator) -> list[tuple[Tensor, Tensor]]:
        sizes = rng.lognormal(4, 2, self.num_clients).astype(int) + 50
        sizes = sizes if self.largest is None else sizes.clip(max=self.largest)
        models, inputs = self._means(rng), rng.normal(0, self.beta, self.num_clients)
        spread = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations
        shared = rng.normal(0, 1, (FEATURES, CLASSES)), rng.normal(0, 1, CLASSES)
        clients = []
        for size, u, b in zip(sizes, models, inputs, strict=True):
            client_model = rng.normal(u, 1, (FEATURES, CLASSES)), rng.normal(u, 1, CLASSES)
            center = rng.normal(b, 1, FEATURES)
            weight, bias = shared if self.iid else client_model
            x = rng.normal(0 if self.iid else center, spread, (size, FEATURES))
            clients.append((torch.from_numpy(x).float(), torch.from_numpy((x @ weight + bias).argmax(1))))
        return clients

    def _means(self, rng: np.random.Generator) -> np.ndarray:
        """The mean of each client's model ``(K,)``."""
        return rng.normal(0, self.alpha, self.num_clients)


class SyntheticPerClass(Synthetic):
    r""":class:`Synthetic` with a mean for each class in place of one for all: :math:`u_k \in \mathbb{R}^C`.

    Weights and bias of class c of client k are from :math:`N(u_{kc}, 1)`, so that :math:`\alpha` changes labels. 0
    gives the distribution of :class:`Synthetic`. No paper has this generator: it is a reading of those that take
    :math:`\alpha` for how far the clients' models differ.
    """

    def _means(self, rng: np.random.Generator) -> np.ndarray:
        """The mean of each client's model by class ``(K, C)``."""
        return rng.normal(0, self.alpha, (self.num_clients, CLASSES))
