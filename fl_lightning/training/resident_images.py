"""Data sets of images that stay on a GPU, where their batches are gathered, augmented and normalised."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fl_lightning.data.client_loaders import Batches, ClientLoader


class ResidentImages:
    """Copies of images and labels on a device, of up to ``limit`` bytes; beyond it, the least recently used ones go.

    Which data sets are copied depends on their own sizes alone, and so is the same on all workers.
    """

    def __init__(self, device: torch.device, limit: float) -> None:
        self.device, self.limit = device, limit
        # by the original, which they do not keep alive; the least recently used one is the first
        self._copies, self._number = WeakTensorKeyDictionary(), 0

    def of(self, loader: ClientLoader) -> ClientLoader:
        """The loader on copies of its images and labels, or the loader itself where these have to stay."""
        # a subclass may do anything with its images
        if type(loader) is not Batches or not all(augmentation.on_device for augmentation in loader.augment):
            return loader
        if len(self._copies) < self._number:  # a data module that makes new tensors for every visit, or a part of them
            self.limit = 0.0
        if loader.images.nbytes + loader.labels.nbytes > self.limit:
            return loader
        return loader.on(self._copy(loader.images), self._copy(loader.labels))

    def _copy(self, tensor: Tensor) -> Tensor:
        copied = self._copies.pop(tensor, None)
        if copied is None:
            size = sum(images.nbytes for images in self._copies.values())
            while self._copies and size + tensor.nbytes > self.limit:
                oldest = next(iter(self._copies))
                size -= self._copies.pop(oldest).nbytes
            copied = tensor.to(self.device, copy=True)
        self._copies[tensor] = copied
        self._number = len(self._copies)
        return copied
