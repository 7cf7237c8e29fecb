r"""FedAS: Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024.

Paper: https://openaccess.thecvf.com/content/CVPR2024/html/Yang_FedAS_Bridging_Inconsistency_in_Personalized_Federated_Learning_CVPR_2024_paper.html
Code: https://github.com/xiyuanyang45/FedAS

.. math::
    \min_{y} \sum_{c \in B} \frac{1}{n_c d} \sum_{b: y_b = c} \lVert z_b - \mu_c \rVert^2, \qquad
    p_k \propto \sum_B \lVert \nabla \mathrm{NLL}_B(y_k) \rVert^2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Step
from fl_lightning.functional import class_sums
from fl_lightning.functional.rows import as_rows, in_full_precision
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.fedsam import reading_sums
from fl_lightning.utilities.errors import require

# smaller traces count as 0: such clients have weights that matter only if all have
LEAST_TRACE = 1e-12


class FedAS(FedPer):
    r"""Aligns the received body with the client's last one before it trains, and weights clients by Fisher information.

    At the start of a visit, :math:`\mu_c` is the mean representation of the client's examples of class c by its last
    model. The received body is trained towards these means, by plain SGD; the head stays with the client, as in
    :class:`FedPer` (evaluation point R). Then the client trains as usual. A client's weight is the trace of its Fisher
    information after training, estimated by the squared norms of the gradients of the mean negative log likelihood on
    each batch, in eval mode. Where all traces are 0, weights are numbers of examples. A client's first visit has no
    alignment.

    Args:
        alignment_epochs: passes over the client's data for the alignment, at least 0.
        alignment_rate: learning rate of the alignment, at least 0.
        weighting: weights by the trace of the ``fisher`` information, or by the number of ``examples``. With the
            latter and no alignment, the method is FedPer.

    Raises:
        UsageError: an argument is below 0, clients have no label counts, SCAFFOLD, FedDyn, FedNova or another method
            that weights clients is in the list, or as in :class:`FedPer`.
    """

    name = "fedas"
    requires = ("representation", "logits")  # type: ignore[assignment]
    needs_label_counts = True
    memory_keys: ClassVar = {"last": "the model at the end of the last visit, without unchanged frozen parameters"}

    def __init__(
        self,
        alignment_epochs: int = 1,
        alignment_rate: float = 0.01,
        weighting: Literal["fisher", "examples"] = "fisher",
    ) -> None:
        super().__init__()
        require(alignment_epochs >= 0, "FedAS.alignment_epochs", alignment_epochs, "give 0 or more")
        require(alignment_rate >= 0, "FedAS.alignment_rate", alignment_rate, "give 0 or more")
        self.alignment_epochs, self.alignment_rate, self.weighting = alignment_epochs, alignment_rate, weighting

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        hint = "a client's steps do not start at the received model, as it assumes; take it out"
        require(not reading_sums(client), "FedAS with method", reading_sums(client), hint)
        if self.weighting != "examples":
            weighting = client.methods.overriding("client_weight")
            names = [type(method).__name__ for method in weighting if method is not self]
            require(not names, "FedAS with method", names, "it weights clients, too; set FedAS.weighting to examples")

    def on_client_start(self, client: ClientContext) -> None:
        if "last" not in client.memory(self) or not self.alignment_epochs:
            return
        prototypes = self.class_means(client)

        def distance(step: Step) -> Tensor:
            return distance_to_means(step.taps["representation"], step.targets, prototypes)  # type: ignore[arg-type]

        for batch in client.batches(f"{self.name}/alignment", self.alignment_epochs):
            gradients = client.gradients(batch=batch, loss=distance)
            body = {name: gradients[name] for name in gradients if name not in self.last}
            client.add_to_parameters(body, -self.alignment_rate)

    def on_client_end(self, client: ClientContext) -> None:
        client.memory(self)["last"] = client.state(own=True)

    def client_weight(self, client: ClientContext) -> float | None:
        if self.weighting == "examples" or not client.num_steps:
            return None
        squares: list[Tensor] = []
        with evaluating(client.module):
            for batch in client.batches(f"{self.name}/fisher"):
                gradients = client.gradients(
                    batch=batch, loss=lambda step: cross_entropy(step.taps["logits"], step.targets)
                )
                squares += [gradient.double().square().sum() for gradient in gradients.values()]
        trace = float(torch.stack(squares).sum())
        return trace if trace >= LEAST_TRACE else LEAST_TRACE * client.info.num_examples

    def class_means(self, client: ClientContext) -> Tensor:
        """The mean representation ``(C, d)`` of each class by the client's last model; 0 for classes that it lacks."""
        sums_of_batches: list[tuple[Tensor, Tensor]] = []
        last_model, classes = client.received | client.memory(self)["last"], len(client.info.label_counts)  # type: ignore[arg-type]

        def collect(step: Step) -> None:
            sums_of_batches.append(class_sums(step.taps["representation"], step.targets, classes))  # type: ignore[arg-type]

        with evaluating(client.module):
            for batch in client.batches(f"{self.name}/prototypes"):
                client.gradients(last_model, batch, collect)
        sums, counts = (torch.stack(parts).sum(0) for parts in zip(*sums_of_batches, strict=True))
        return sums / counts.clamp_min(1)


@in_full_precision
def distance_to_means(z: Tensor, targets: Tensor, prototypes: Tensor) -> Tensor:
    """The sum over the batch's classes of the mean squared difference between representations and their prototype."""
    gaps = as_rows(z) - prototypes.to(z)[targets]
    return (gaps.square().mean(1) / (targets[:, None] == targets).sum(1)).sum()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In this block a module and its parts are in eval mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
