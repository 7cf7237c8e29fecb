"""The digits in two domains."""

import numpy as np

from fl_lightning.data import Digits


class TwoDomains(Digits):
    """The digits, with every other one in the domain dark, in which the brightness is inverted."""

    def load(self):
        images = super().load()
        parts = {}
        for split in ("train", "test"):
            pixels = getattr(images, f"{split}_images").copy()
            domains = np.arange(len(pixels)) % 2
            pixels[domains == 1] = 255 - pixels[domains == 1]
            parts |= {f"{split}_images": pixels, f"{split}_domains": domains}
        return images._replace(**parts, domain_names=("bright", "dark"))
