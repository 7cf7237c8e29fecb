"""Views for modules and methods in a mapped step: one client, whose tensors represent the whole group.

Clients of a group take a step together, as one program over stacked tensors: the step runs once, under ``torch.vmap``,
and each tensor has a hidden dimension for the clients. Values that differ between clients are such tensors; others,
such as an id that user code would use as a key, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fl_lightning.utilities.errors import UsageError

REMEDY = "give trainer.clients_per_step=1"
DIFFERS = "it differs by client, and a step is of several side by side"


class VmapUnsupported(UsageError):
    """A step cannot be mapped over clients; says why."""


def not_mappable(what: str, why: str) -> VmapUnsupported:
    """The error of something that a mapped step may not use."""
    return VmapUnsupported(f"{what}: {why}; {REMEDY}")


class View:
    """Several objects as one: returns attributes in which they agree, and refuses others by name.

    ``note`` is called with each attribute that is read, since it may change before the next step. Values in
    ``attributes``, such as mapped tensors, take precedence. ``name`` precedes the attribute in errors.
    """

    def __init__(
        self, name: str, objects: Callable[[], Sequence[Any]], note: Callable[[str], None], **attributes: Any
    ) -> None:
        vars(self).update(attributes)
        self._name, self._objects, self._note = name, objects, note

    def __getattr__(self, name: str) -> Any:
        self._note(f"{self._name}{name}")
        values = [getattr(element, name) for element in self._objects()]
        if any(value != values[0] for value in values[1:]):
            raise not_mappable(f"{self._name}{name}", DIFFERS)
        return values[0]
