"""The LightningModule of this package: an encoder, a projector and a linear classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from fl_lightning.models.encoders import Encoder
from fl_lightning.models.projector import BaseProjector
from fl_lightning.utilities.errors import require


class ImageClassifier(LightningModule):
    """``logits = classifier(projector(encoder(x)))``, trained by cross-entropy; logs ``loss`` and ``accuracy``.

    Its taps are ``early.0``, ``early.1``, ... (the layers of the encoder from the input on, then projector and
    classifier), further ones that the encoder names, ``representation`` (the input of the classifier, ``(B, d)``) and
    ``logits`` ``(B, C)``.

    With BatchNorm1d, a last training batch of one example is skipped; ``min_batch_size`` is then 2. A run refuses a
    module with this attribute where a client has smaller batches alone.

    Args:
        encoder: the network up to the projector.
        projector: the network between encoder and classifier: ``Projector`` or ``ProjectionHead``; None for none.
        num_classes: C, at least 2.
        optimizer: builds a client's optimizer; None is SGD with lr 0.01.
        classifier: builds the last part from the width of its input and C, such as :class:`ETFClassifier`, whose
            attribute ``taps`` replaces taps; None is ``torch.nn.Linear``.
    """

    def __init__(
        self,
        encoder: Encoder,
        projector: BaseProjector | None = None,
        num_classes: int = 10,
        optimizer: OptimizerCallable | None = None,
        classifier: Callable[[int, int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        require(num_classes >= 2, "model.num_classes", num_classes, "give 2 or more")
        self.encoder = encoder
        self.projector = projector
        self.num_classes = num_classes
        self.optimizer = optimizer
        if projector is not None:
            with torch.no_grad():
                projector.eval()(torch.zeros(1, encoder.out_features))
            projector.train()
        self.classifier = (classifier or nn.Linear)((projector or encoder).out_features, num_classes)
        layers = [f"encoder.{path}" for path in encoder.early]
        layers += ["projector", "classifier"] if projector else ["classifier"]
        self.taps = {f"early.{i}": path for i, path in enumerate(layers)}
        self.taps |= {name: f"encoder.{path}" for name, path in encoder.named.items()}
        self.taps |= {"representation": "projector" if projector else "encoder", "logits": "classifier"}
        inner_taps = getattr(self.classifier, "taps", {})
        self.taps |= {name: f"classifier.{path}" for name, path in inner_taps.items()}
        self.channels_last = any(isinstance(part, nn.Conv2d) for part in encoder.modules())

    @property
    def min_batch_size(self) -> int:
        """The least number of examples that a batch can be trained with."""
        return 2 if any(isinstance(part, nn.BatchNorm1d) for part in self.modules()) else 1

    def forward(self, x: Tensor) -> Tensor:
        self.encoder.check(x)
        z = self.encoder(x)
        return self.classifier(z if self.projector is None else self.projector(z))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        # BatchNorm1d cannot normalise a batch of one example: a last one of that size is skipped, and counted
        if self.training and len(batch[0]) == 1 and self.min_batch_size > 1:
            return None
        return self._step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The logits ``(B, C)`` of a batch of images, with or without labels."""
        return self(batch[0] if isinstance(batch, (list, tuple)) else batch)

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer(self.parameters()) if self.optimizer else SGD(self.parameters(), lr=0.01)

    def _step(self, batch: Any) -> Tensor:
        x, targets = batch
        logits = self(x)
        loss = cross_entropy(logits, targets)
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == targets).float().mean())
        return loss
