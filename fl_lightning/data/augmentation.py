"""Augmentations of whole batches, with separate random draws for each image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from fl_lightning.data.transfer import transferred
from fl_lightning.utilities.errors import require


class Augmentation(ABC):
    """Changes a batch of uint8 images ``(B, C, H, W)`` before normalisation. Subclasses implement ``__call__``.

    Attributes:
        on_device: whether the images may lie on a GPU, where the augmentation gives the same bits. ``generator`` is
            always a CPU's.
    """

    on_device = False

    @abstractmethod
    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the changed batch; all randomness comes from ``generator``."""


class RandomCrop(Augmentation):
    """Pads every image on all sides and crops it back to its size at a random position.

    Args:
        padding: pixels on each side, at least 1.
        mode: pad with ``zeros``, or ``reflect`` the image at its edges.
    """

    on_device = True

    def __init__(self, padding: int = 4, mode: Literal["zeros", "reflect"] = "zeros") -> None:
        require(1 <= padding <= 512, "RandomCrop.padding", padding, "give 1 or more, up to 512")
        require(mode in ("zeros", "reflect"), "RandomCrop.mode", mode, "choose zeros or reflect")
        self.padding, self.mode = padding, "constant" if mode == "zeros" else mode

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        size, height, width = len(images), *images.shape[-2:]
        fits = self.mode != "reflect" or self.padding < min(height, width)
        require(fits, "RandomCrop.padding", self.padding, f"reflection of {height} x {width} pixels needs less padding")
        padded = pad(images, [self.padding] * 4, mode=self.mode)
        corners = torch.randint(0, 2 * self.padding + 1, (2, size), generator=generator)
        tops, lefts = transferred(corners, images.device)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (B, C, tops, lefts, H, W)
        return windows[torch.arange(size, device=images.device), :, tops, lefts]


class RandomFlip(Augmentation):
    """Mirrors every image left to right with probability ``p``.

    Args:
        p: probability, in [0, 1].
    """

    on_device = True

    def __init__(self, p: float = 0.5) -> None:
        require(0 <= p <= 1, "RandomFlip.p", p, "use a probability in [0, 1]")
        self.p = p

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        mask = torch.rand(len(images), generator=generator) < self.p
        # numbers instead of a mask, whose sum a GPU would be waited for
        flips = transferred(mask.nonzero()[:, 0], images.device)
        flipped = images.clone()
        flipped[flips] = images[flips].flip(-1)
        return flipped


class RandomRotation(Augmentation):
    """Rotates every image about its centre by an angle drawn uniformly from ``[-degrees, degrees]``.

    Each pixel takes the value of the nearest pixel of the original image, as torchvision's does by default; corners
    that the image no longer covers become 0.

    Args:
        degrees: the largest angle, in [0, 180].
    """

    def __init__(self, degrees: float = 15.0) -> None:
        require(0 <= degrees <= 180, "RandomRotation.degrees", degrees, "use an angle in [0, 180]")
        self.degrees = degrees

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        height, width = images.shape[-2:]
        angles = torch.deg2rad((2 * torch.rand(len(images), generator=generator) - 1) * self.degrees)
        cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
        # the grid's coordinates span [-1, 1] along both sides, whatever their lengths
        rows = [cos, -sin * height / width, zero, sin * width / height, cos, zero]
        grid = affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(images.shape), align_corners=False)
        return grid_sample(images.float(), grid, mode="nearest", align_corners=False).to(torch.uint8)


class AutoAugment(Augmentation):
    """AutoAugment (Cubuk et al., CVPR 2019): one of torchvision's 25 pairs of operations for each image.

    The images of a batch that get the same operation are changed together. FedDecorr's code has an older port, in
    which the strength is drawn within a bin and its sign is not.

    Args:
        policy: the data for which the pairs were searched: ``cifar10``, ``imagenet`` or ``svhn``.
    """

    def __init__(self, policy: Literal["cifar10", "imagenet", "svhn"] = "cifar10") -> None:
        from torchvision.transforms import v2

        policies = [policy_.value for policy_ in v2.AutoAugmentPolicy]
        require(policy in policies, "AutoAugment.policy", policy, f"choose one of {', '.join(policies)}")
        self.policy = policy

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        pairs, number = operation_pairs(self.policy, *images.shape[-2:]), len(images)
        pair_of_image = torch.randint(len(pairs), (number,), generator=generator).tolist()
        chances, signs = torch.rand(2, number, 2, generator=generator).tolist()
        # images by the name and signed magnitude of their operation; second operations follow later
        turns: list[dict[tuple[str, float], list[int]]] = [{}, {}]
        for image, pair in enumerate(pair_of_image):
            turn = 0
            for (name, probability, magnitude, signed), chance, sign in zip(
                pairs[pair], chances[image], signs[image], strict=True
            ):
                if chance <= probability:
                    operation = (name, -magnitude if signed and sign <= 0.5 else magnitude)
                    turns[turn].setdefault(operation, []).append(image)
                    turn += 1
        changed = images.clone(memory_format=torch.contiguous_format)
        transform = _transform("cifar10")  # operations do not depend on the policy
        how = {"interpolation": transform.interpolation, "fill": transform._fill}
        for members in turns:
            for (name, magnitude), places in members.items():
                rows = torch.tensor(places)
                changed[rows] = transform._apply_image_or_video_transform(changed[rows], name, magnitude, **how)
        return changed


# torchvision publishes neither the pairs nor the application by name. Its private names that are used here are the same
# in torchvision 0.21 and 0.29.
@lru_cache(maxsize=8)
def operation_pairs(policy: str, height: int, width: int) -> list[tuple[tuple[str, float, float, bool], ...]]:
    """The pairs of a policy; each operation is its name, probability, magnitude (0 without one) and random sign."""
    transform = _transform(policy)

    def operation(name: str, probability: float, level: int | None) -> tuple[str, float, float, bool]:
        magnitudes, signed = transform._AUGMENTATION_SPACE[name]
        values = magnitudes(10, height, width)
        return name, probability, 0.0 if values is None else float(values[level]), signed

    return [tuple(operation(*entry) for entry in pair) for pair in transform._policies]


@lru_cache
def _transform(policy: str) -> Any:
    from torchvision.transforms import v2

    return v2.AutoAugment(v2.AutoAugmentPolicy(policy))
