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
from functools import partial, wraps
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Penalty, Step
from fl_lightning.core.weighted import Weighted
from fl_lightning.functional import (
    cosine_similarity,
    frobenius_similarity,
    linear_ckas,
    rbf_cka,
    representation_contrast,
)
from fl_lightning.utilities.errors import require

BANDWIDTH = 0.5


def _each(similarity: Callable[..., Tensor], **how: float) -> Callable[..., Tensor]:
    """The similarities of x with each of several y; under the name of ``similarity``, by which checkpoints know it."""
    return wraps(similarity)(lambda x, *ys: torch.stack([similarity(x, y, **how) for y in ys]))


def frobenius_raw(x: Tensor, y: Tensor) -> Tensor:
    """Minus the squared Frobenius distance."""
    return frobenius_similarity(x, y) * x.numel()


def frobenius_literal(x: Tensor, y: Tensor) -> Tensor:
    """The squared Frobenius distance, as Table 3 names it."""
    return -frobenius_raw(x, y)


SIMILARITIES: dict[str, Callable[..., Tensor]] = {
    "linear": linear_ckas,
    "debiased": partial(linear_ckas, debiased=True),
    "frobenius": _each(frobenius_similarity),
    "frobenius_raw": _each(frobenius_raw),
    "frobenius_literal": _each(frobenius_literal),
    "cosine": _each(cosine_similarity),
}


class FedCKA(Method):
    r"""Keeps early activations closer to the global model's than to the client's previous model's.

    :math:`a_m` are the activations of layer m on the current batch. The previous model is the client's local model at
    the end of its last visit. Both reference models are frozen and in eval mode, and run only up to the last compared
    layer. A client's first visit has no previous model and no term. The term of each layer is logged by its tap, with
    its coefficient :math:`\mu / M`: ``train/fedcka/early.0`` and the others add up to ``train/fedcka``.

    Args:
        mu: coefficient :math:`\mu \ge 0`; 0 gives FedAvg. The paper uses 3, 5 and 10.
        layers: number M of compared layers from the input on, at least 1; 2 in the paper: the taps ``early.0``,
            ``early.1``, ... Or their names: ``[early.0, stage.1]`` compares a ResNet's stem
            and its whole first stage.
        similarity: ``linear`` CKA, its ``debiased`` form or ``rbf`` CKA; or, from the paper's Table 3, ``cosine`` or
            the negative squared Frobenius distance, per element (``frobenius``) or summed (``frobenius_raw``), or the
            distance with the printed sign (``frobenius_literal``), which moves the activations away from the global
            model's.
        bandwidth: t > 0, the width of the kernel of ``rbf`` CKA in units of the square root of the median squared
            distance; the paper does not state it. For ``rbf`` only.

    Raises:
        UsageError: ``mu`` is below 0, ``layers`` is 0 or empty, ``bandwidth`` is not above 0 or set without ``rbf``,
            or the model cannot be copied.
    """

    memory_keys: ClassVar = {"previous": "the client's last model, as a state without unchanged frozen parameters"}

    def __init__(
        self,
        mu: float = 3.0,
        layers: int | list[str] = 2,
        similarity: Literal[
            "linear", "debiased", "rbf", "frobenius", "frobenius_raw", "frobenius_literal", "cosine"
        ] = "linear",
        bandwidth: float = BANDWIDTH,
    ) -> None:
        require(mu >= 0, "FedCKA.mu", mu, "give 0 or more")
        names = [f"early.{m}" for m in range(layers)] if isinstance(layers, int) else layers
        require(len(names) >= 1, "FedCKA.layers", layers, "give 1 or more")
        require(bandwidth > 0, "FedCKA.bandwidth", bandwidth, "use a number above 0")
        hint = f"the similarity {similarity} has no kernel; take it out, or take similarity: rbf"
        require(similarity == "rbf" or bandwidth == BANDWIDTH, "FedCKA.bandwidth", bandwidth, hint)
        kernel = _each(rbf_cka, bandwidth=bandwidth)
        self.mu, self.similarity = mu, kernel if similarity == "rbf" else SIMILARITIES[similarity]
        self.bandwidth, self.requires = bandwidth, tuple(names)

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        client.reference_copy()  # refuses a model that cannot be copied

    def on_client_start(self, client: ClientContext) -> None:
        previous = client.memory(self).get("previous")
        client.scratch(self).compares = previous is not None
        if previous is not None:
            client.load_reference("global", client.received, self.requires)
            client.load_reference("previous", client.received | previous, self.requires)

    def penalty(self, client: ClientContext, step: Step) -> Penalty:
        if not client.scratch(self).compares:
            return None
        to_global, to_previous = client.observe("global"), client.observe("previous")
        terms = []
        for tap in self.requires:
            similarities = self.similarity(step.taps[tap], to_global[tap], to_previous[tap])
            terms.append(representation_contrast(*similarities))
        of_taps = zip(self.requires, terms, strict=True)
        logged = {tap: self.mu / len(terms) * term.detach() for tap, term in of_taps}
        return self.mu * torch.stack(terms).mean(), logged

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted] | None:
        client.memory(self)["previous"] = client.state(own=True)
        return None
