"""Data sets held from one run of a process to the next."""

from __future__ import annotations

from collections import OrderedDict
from inspect import signature
from typing import TYPE_CHECKING, Any

from fl_lightning.seeding import base_seed

if TYPE_CHECKING:
    from fl_lightning.data.datamodule import ImageDataModule, Images


class Held:
    """The data sets that were last read, so that the next run with the same ones need not read them again.

    Args:
        number: how many are held; 0 holds none.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._known: OrderedDict[str, tuple[Images, dict[str, Any]]] = OrderedDict()

    def load(self, module: ImageDataModule, own: type) -> Images:
        """What ``module.load()`` gives; the attributes that it sets are set as well.

        Args:
            module: the data module.
            own: the class whose arguments, and those of the classes above it, ``load`` does not depend on.
        """
        key = _key(module, own) if self.number else None
        if key is None:
            return module.load()
        if key not in self._known:
            before = dict(vars(module))
            images = module.load()
            self._known[key] = images, {k: v for k, v in vars(module).items() if before.get(k, self) is not v}
        self._known.move_to_end(key)
        while len(self._known) > self.number:
            self._known.popitem(last=False)
        images, attributes = self._known[key]
        vars(module).update(attributes)
        return images


def _key(module: ImageDataModule, own: type) -> str | None:
    """What the data of a module depend on: its class, its own arguments and the seed; None where these do not show."""
    below = [kind for kind in type(module).__mro__ if issubclass(kind, own) and kind is not own]
    arguments = set().union(*(signature(kind).parameters for kind in below if "__init__" in vars(kind)))
    names = sorted(arguments - {"args", "kwargs"})
    # an argument of the class above is an attribute, or is set when the data are read
    if not all(hasattr(module, name) or name in signature(own).parameters for name in names):
        return None
    return repr([type(module), base_seed(), *((name, getattr(module, name, None)) for name in names)])


# a process that runs many configs sets its number
HELD = Held()
