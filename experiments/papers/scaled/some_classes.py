"""NpyImages with some of the classes alone: the data of scaled/pretrained.yaml."""

from typing import Any

import numpy as np

from fl_lightning.data import NpyImages
from fl_lightning.data.datamodule import Images


class SomeClasses(NpyImages):
    """:class:`NpyImages` with some of the classes alone.

    Args:
        classes: the classes; the first one becomes class 0, and so on.
        **kwargs: see :class:`NpyImages`.
    """

    def __init__(self, classes: list[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.classes = classes

    def load(self) -> Images:
        train, train_labels, test, test_labels, *_ = super().load()
        self.num_classes = len(self.classes)
        return Images(*self._chosen(train, train_labels), *self._chosen(test, test_labels))

    def _chosen(self, images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.isin(labels, self.classes)
        new = np.zeros(max(int(labels.max()), *self.classes) + 1, np.int64)
        new[self.classes] = np.arange(len(self.classes))
        return images[rows], new[labels[rows]]
