"""The two distributions of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``: the same classes, twice.

Objects of one are not instances of the other's classes, so this module tests the types of users' objects.
``pytorch_lightning`` is optional and never imported here: an object of it implies that the user has imported it.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import model_helpers

if TYPE_CHECKING:
    from lightning.fabric.loggers import Logger
    from lightning.pytorch import LightningDataModule, LightningModule

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
# where else a class lies
PLACES = {"Logger": ("lightning.fabric.loggers", "lightning_fabric.loggers")}
FABRIC = ("lightning.fabric", "lightning_fabric")
# Lightning's classes with hooks
BASES = ("LightningModule", "LightningDataModule", "Callback")


def classes(name: str) -> tuple[type, ...]:
    """Lightning's classes called ``name``, one of each distribution that is imported."""
    modules = [sys.modules.get(space) for space in PLACES.get(name, NAMESPACES)]
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))


def is_callback(value: object) -> bool:
    """Whether an object is a callback of Lightning's own trainer."""
    return isinstance(value, classes("Callback"))


def is_overridden(hook: str, instance: object) -> bool:
    """Whether the class of a module, data module or callback overrides a hook of Lightning's class.

    An object of another class has the hooks that it defines.
    """
    bases = itertools.chain.from_iterable(map(classes, BASES))
    parent = next((base for base in bases if isinstance(instance, base)), None)
    return hasattr(instance, hook) if parent is None else model_helpers.is_overridden(hook, instance, parent)


class _OfBoth(type):
    """The type of a class that stands for both of Lightning's classes of its name, as a type in a config."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, classes(cls.__name__))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, classes(cls.__name__))

    def __subclasses__(cls) -> list[Any]:
        # where a parser looks up short names, such as CSVLogger, which Fabric and Lightning have
        kinds: list[list[type]] = [kind.__subclasses__() for kind in classes(cls.__name__)]
        return [kind for part in kinds for kind in part if not kind.__module__.startswith(FABRIC)]


if not TYPE_CHECKING:

    class LightningModule(metaclass=_OfBoth):
        """A LightningModule of lightning or pytorch_lightning."""

    class LightningDataModule(metaclass=_OfBoth):
        """A LightningDataModule of lightning or pytorch_lightning."""

    class Logger(metaclass=_OfBoth):
        """A logger of Fabric or of either distribution."""
