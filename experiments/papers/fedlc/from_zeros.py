"""An ImageClassifier whose classifier begins with zeros: one reading of what FedLC's Table 4 leaves open."""

from typing import Any

from torch import nn

from fl_lightning.models import ImageClassifier


class FromZeros(ImageClassifier):
    """:class:`ImageClassifier` whose last layer has zeros as initial weights; the arguments are its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.classifier.parameters():
            nn.init.zeros_(parameter)
