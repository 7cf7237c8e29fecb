r"""LogitAdjustment: Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021.

Paper: https://arxiv.org/abs/2007.07314
Code: https://github.com/google-research/google-research/tree/master/logit_adjustment

.. math:: \ell = -\log \frac{\pi_y^\tau e^{o_y}}{\sum_c \pi_c^\tau e^{o_c}}, \qquad
    \text{or after training } \hat y = \arg\max_c\, o_c - \tau \log \pi_c

With :math:`\tau = 1`, the first is the balanced softmax of Ren et al. (NeurIPS 2020,
https://arxiv.org/abs/2007.10740).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, ServerValue
from fl_lightning.core.server import Server
from fl_lightning.core.state import State
from fl_lightning.core.weighted import Weighted
from fl_lightning.data.transfer import transferred
from fl_lightning.functional import adjusted_logits
from fl_lightning.utilities.errors import require

# far below any logit, and finite, so that losses are
LOW = -1e4


class LogitAdjustment(Method):
    r"""Adjusts logits o by the class prior :math:`\pi`, for a classifier that treats all classes alike.

    In ``training``, the module's ``training_step`` sees :math:`o_c + \tau \log \pi_c`, and evaluation uses raw logits.
    With each client's own prior, all clients then estimate the same posterior, as if classes were equally frequent.
    ``post_hoc`` trains as FedAvg and subtracts :math:`\tau \log \pi_c` from the classifier's bias in the model that is
    evaluated and saved, from the end of the first round on.

    Args:
        tau: :math:`\tau \ge 0`; 0 gives FedAvg.
        prior: shares of the classes in the client's training examples (``local``), or in all clients' (``global``, not
            at real sites); None for ``local`` in training and ``global`` post hoc.
        when: ``training`` or ``post_hoc``.
        floor: a number from 0 added to :math:`\pi_c^\tau`; 1e-12 in code by others. 0 leaves classes without examples
            out of the loss, and post hoc they are not predicted.

    Raises:
        UsageError: ``tau`` or ``floor`` is below 0, clients have no label counts, or another method changes logits by
            label counts, too; post hoc, ``prior`` is ``local``, the classifier has no bias that travels, or another
            method gives clients models of their own.
    """

    requires = ("logits",)
    needs_label_counts = True
    started = ServerValue(lambda server: False, travels=False)

    def __init__(
        self,
        tau: float = 1.0,
        prior: Literal["local", "global"] | None = None,
        when: Literal["training", "post_hoc"] = "training",
        floor: float = 0.0,
    ) -> None:
        require(tau >= 0, "LogitAdjustment.tau", tau, "give 0 or more")
        require(floor >= 0, "LogitAdjustment.floor", floor, "give 0 or more")
        hint = "one global model has no prior of a client; leave it out, or see the score label_prior of Scores"
        require(when == "training" or prior != "local", "LogitAdjustment.prior", prior, hint)
        self.tau, self.when, self.floor = tau, when, floor
        self.prior = prior or ("local" if when == "training" else "global")
        self.needs_exchange = when == "post_hoc"
        if when == "training":
            self.transform_logits = self._adjusted  # type: ignore[method-assign]

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        if self.when == "post_hoc":
            path = client.tap_paths["logits"]
            self._bias = f"{path}.bias"
            hint = f"the tap logits is bound to {path!r}, which has no bias; use training"
            require(self._bias in client.live, "LogitAdjustment.when", self.when, hint)
            hint = "the models that another method gives the clients are not adjusted; use training"
            require(not client.methods.personalizes, "LogitAdjustment.when", self.when, hint)

    def on_fit_start(self, server: Server) -> None:
        if self.prior == "global":
            hint = "the label counts of the clients stay at their sites; use local"
            require(server.label_counts is not None, "LogitAdjustment.prior", self.prior, hint)
            device = next(iter(server.state.values())).device
            self._counts = server.label_counts.sum(0).to(device)  # type: ignore[union-attr]

    def on_client_start(self, client: ClientContext) -> None:
        hint = "the classifier's bias stays with the clients, and is not adjusted; use training"
        require(self.when == "training" or self._bias not in client.kept, "LogitAdjustment.when", self.when, hint)

    def _adjusted(self, client: ClientContext, logits: Tensor) -> Tensor:
        counts: Tensor = client.info.label_counts if self.prior == "local" else self._counts  # type: ignore[assignment]
        return adjusted_logits(logits, transferred(counts, logits.device), self.tau, self.floor)

    def on_round_end(self, server: Server, payload: dict[str, Weighted]) -> None:
        self.started = True

    def evaluated_state(self, server: Server, state: State) -> State:
        if self.when == "training" or not self.started:
            return state
        bias = state[self._bias]
        added = adjusted_logits(torch.zeros_like(bias)[None], self._counts, self.tau, self.floor)[0]
        return state | {self._bias: (bias - added).where(added.isfinite(), LOW).to(bias)}
