r"""FedCKA: Son et al., Compare Where It Matters: ... Federated Learning on Heterogeneous Data, 2021, Eq. 1 to 3.

Its title in full is Compare Where It Matters: Using Layer-Wise Regularization To Improve Federated Learning on
Heterogeneous Data.

Paper: https://arxiv.org/abs/2112.00407

.. math::
    \ell = \frac{1}{M} \sum_{m=1}^{M} -\log
        \frac{e^{\mathrm{CKA}(a_m, a_m^{glob})}}{e^{\mathrm{CKA}(a_m, a_m^{glob})} + e^{\mathrm{CKA}(a_m, a_m^{prev})}}
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.errors import require
from fl_lightning.functional import (
    cosine_similarity,
    frobenius_similarity,
    linear_ckas,
    rbf_cka,
    representation_contrast,
)
from fl_lightning.method import Method, Step
from fl_lightning.state import Weighted


def _each(similarity: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, *ys: torch.stack([similarity(x, y) for y in ys])


SIMILARITIES: dict[str, Callable[..., Tensor]] = {
    "linear": linear_ckas,
    "debiased": partial(linear_ckas, debiased=True),
    "rbf": _each(rbf_cka),
    "frobenius": _each(frobenius_similarity),
    "frobenius_raw": _each(lambda x, y: frobenius_similarity(x, y) * x.numel()),
    "cosine": _each(cosine_similarity),
}


class FedCKA(Method):
    r"""Keeps early activations closer to those of the global model than to those of the client's previous model.

    :math:`a_m` are the activations of layer m on the current batch. The previous model is the client's own at the end
    of its last visit. Both reference models are frozen and in eval mode, and run only up to the last compared layer.
    In a client's first visit there is no previous model and no term.

    Args:
        mu: coefficient :math:`\mu \ge 0`; 0 gives FedAvg. The paper chooses among 3, 5 and 10.
        layers: M, how many layers to compare, counted from the input, at least 1; 2 in the paper. They are the taps
            ``early.0``, ``early.1``, ... Or their names: ``[early.0, stage.1]`` compares a ResNet's stem
            and its whole first stage.
        similarity: ``linear`` CKA, its ``debiased`` form or ``rbf`` CKA; or, from the paper's Table 3, ``cosine`` or
            the negative squared Frobenius distance, per element (``frobenius``) or summed (``frobenius_raw``).

    Raises:
        UsageError: ``mu`` is below 0, or ``layers`` is 0 or empty.
    """

    remembers: ClassVar = {"previous": "the client's model at the end of its last visit, as a state"}

    def __init__(
        self,
        mu: float = 3.0,
        layers: int | list[str] = 2,
        similarity: Literal["linear", "debiased", "rbf", "frobenius", "frobenius_raw", "cosine"] = "linear",
    ) -> None:
        require(mu >= 0, "FedCKA.mu", mu, "give 0 or more")
        names = [f"early.{m}" for m in range(layers)] if isinstance(layers, int) else layers
        require(len(names) >= 1, "FedCKA.layers", layers, "give 1 or more")
        self.mu, self.similarity = mu, SIMILARITIES[similarity]
        self.requires = tuple(names)

    def on_client_start(self, client: Client) -> None:
        previous = client.memory(self).get("previous")
        if previous is not None:
            client.load_reference("global", client.received, self.requires)
            client.load_reference("previous", previous, self.requires)

    def penalty(self, client: Client, step: Step) -> Tensor | None:
        if "previous" not in client.memory(self):
            return None
        to_global, to_previous = client.observe("global"), client.observe("previous")
        terms = [
            representation_contrast(*self.similarity(step.taps[tap], to_global[tap], to_previous[tap]))
            for tap in self.requires
        ]
        return self.mu * torch.stack(terms).mean()

    def on_client_end(self, client: Client) -> dict[str, Weighted] | None:
        client.memory(self)["previous"] = client.state()
        return None
