r"""Distance of the global model's running statistics from its statistics on the clients' data.

With the global model's mean :math:`\bar\mu_c` and variance :math:`\bar\sigma_c^2` of channel c, the recomputed
:math:`\mu_c` and :math:`\sigma_c^2`, and the layer's :math:`\epsilon`, over all channels of all layers:

.. math::
    \text{mean: } \frac1C \sum_c \frac{|\bar\mu_c - \mu_c|}{\sqrt{\sigma_c^2 + \epsilon}}, \qquad
    \text{variance: } \frac1C \sum_c \left| \ln \frac{\bar\sigma_c^2 + \epsilon}{\sigma_c^2 + \epsilon} \right|
"""

from __future__ import annotations

import torch

from fl_lightning.callbacks.measurement import PeriodicCallback, log_finite, require_global_model
from fl_lightning.client.batch_norm import statistics_of
from fl_lightning.client.run_context import RunContext
from fl_lightning.utilities.errors import require


class BatchNormGap(PeriodicCallback):
    """Logs the distance between the global model's running statistics of BatchNorm and the recomputed ones.

    The statistics are recomputed for the same weights on the training data of the round's cohort, layer by layer, as
    ``trainer.buffers=recalibrate`` does, for which both values are 0 if each client sends an update. ``bn_gap/mean`` is
    in standard deviations of a channel, and ``bn_gap/variance`` is the logarithm of the ratio of the variances.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too. A measurement
            costs about half a forward pass over the cohort's data for each layer.

    Raises:
        UsageError: the model has no BatchNorm layer that updates running statistics, or no global model because entries
            of the state stay with the clients.
    """

    def setup(self, trainer: RunContext) -> None:
        kind = type(trainer.client.module).__name__
        hint = "it has no BatchNorm layer that updates running statistics; remove the callback"
        require(bool(trainer.client.batch_norms), "BatchNormGap with the model", kind, hint)
        require_global_model(trainer, self)

    def measure(self, trainer: RunContext) -> None:
        recalibrated = trainer.recalibrated(clients=trainer.server.cohort)
        state = trainer.methods.evaluated_state(trainer.server)
        gaps: dict[str, list[torch.Tensor]] = {"mean": [], "variance": []}
        for path in trainer.client.batch_norms:
            if statistics_of(path)[0] in recalibrated:
                names = statistics_of(path)
                mean, variance = [recalibrated[name].double().cpu() for name in names]
                state_mean, state_variance = [state[name].double().cpu() for name in names]
                epsilon = float(trainer.client.module.get_submodule(path).eps)  # type: ignore[arg-type]
                gaps["mean"].append((state_mean - mean).abs() / (variance + epsilon).sqrt())
                gaps["variance"].append(((state_variance + epsilon) / (variance + epsilon)).log().abs())
        means = {name: float(torch.cat(parts).mean()) for name, parts in gaps.items() if parts}
        log_finite(trainer, means, "bn_gap/")
