"""What methods hold: a visit changes it for itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fl_lightning.client.transient import contents, kinds_of
from fl_lightning.method import Method, ServerValue


class Attributes:
    """The attributes of methods and of their classes, with all that is in them, as a server hook has left them.

    Tensors of server values are not copied: :meth:`Visit.written` says which hook of a client writes to one.

    Args:
        methods: the methods of a run.
        known: ids of the objects that are left alone: those of the module.

    Attributes:
        server: the tensors of server values, each with a name for errors.
        in_place: whether data are restored in place, to which something that a client sends or remembers may refer.
    """

    def __init__(self, methods: Sequence[Method], known: set[int]) -> None:
        own: list[Any] = [value for m in methods for kind in kinds_of(m) for value in vars(kind).values()]
        self.server: list[tuple[str, Tensor]] = []
        for method in methods:
            for name, value in vars(method).items():
                if isinstance(getattr(type(method), name, None), ServerValue):
                    self.server += [(f"{type(method).__name__}.{name}", tensor) for tensor in tensors_in(value)]
                else:
                    own.append(value)
        seen = known | {id(tensor) for _, tensor in self.server}
        self._contents = [restore for value in own for restore in contents(value, seen)]
        self.in_place = bool(self._contents)
        self._contents += [restore for method in methods for restore in contents(method, seen)]

    def restore(self) -> None:
        """Bring it back."""
        for restore in self._contents:
            restore()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)
