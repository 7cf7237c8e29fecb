"""What a program comes to: the operations on tensors that torch does in it, noted down one by one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
# what an operation is given beside tensors, which a recording repeats as it is
CONSTANTS = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
# what takes nothing but the shape and the type from the tensor that it is given
SHAPED = (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.new_zeros.default)
# numbers of a tensor that is kept as it is the same each time
MOST_FIXED = 2**16


class Slot(NamedTuple):
    """Stands for a tensor in a recording."""

    number: int


class Operation(NamedTuple):
    """An operation on tensors.

    Args:
        target: what was called.
        args: its arguments, with slots in the place of tensors, as in ``kwargs``.
        kwargs: those given by name.
        result: what it gave: a slot, a list of them, or None.
    """

    target: OpOverload
    args: Any
    kwargs: Any
    result: Any


class NotRecordable(Exception):
    """A program cannot be repeated; says why."""


class Recorder(TorchDispatchMode):
    """In this block each operation is done as usual, and noted down.

    Args:
        inputs: the tensors that another one of these programs has others of, each once.

    Attributes:
        operations: what was done, in order.
        outside: tensors that are neither inputs nor results, each with the number of its slot and its version; the same
            ones are used each time.
        aliases: the numbers of tensors that are another one under a new name, such as one that is detached, with that
            one's.
        obstacle: why it cannot be repeated; None as long as it can.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.outside: list[tuple[int, Tensor, int]] = []
        self.aliases: dict[int, int] = {}
        self.obstacle: str | None = None
        # all tensors are held, so that an id stays that of one tensor
        self._held: list[Tensor] = [*inputs]
        self._num_inputs = len(inputs)
        self._numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
        # of the results: a tensor of the same memory that no operation gave was made by one that was not seen
        self._storages: set[int] = set()
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (self._noted(args, True), self._noted(kwargs, True)) if self.obstacle is None else None
        result = func(*args, **kwargs)
        if given is not None:
            self.operations.append(Operation(func, *given, self._noted(result, False)))
            first = args[0] if args else None
            if isinstance(result, Tensor) and isinstance(first, Tensor) and is_same(result, first):
                self.aliases[self._numbers[id(result)]] = self._numbers[id(first)]
            if torch.Tag.inplace_view in func.tags:
                self.obstacle = "it changes the shape of a tensor in place"
            if func._schema.is_mutable:
                names = [argument.name for argument in func._schema.arguments]
                values = dict(zip(names, args, strict=False)) | kwargs
                written = [values[a.name] for a in func._schema.arguments if a.is_write and a.name in values]
                self._written.update(storage(tensor) for tensor in tree_leaves(written))
        return result

    def exposed(self, outputs: Sequence[Tensor]) -> set[int]:
        """The numbers of the tensors whose memory an operation writes to, or the program gives away."""
        return self._in_memory(self._written | {storage(tensor) for tensor in outputs})

    def copies(self, exposed: set[int]) -> dict[int, int]:
        """The numbers of tensors that are a copy of one whose memory nobody else gets, with its.

        As a step ends, autograd gives such a gradient away as it is. It makes a copy of one that is held elsewhere, as
        the recorder holds all.
        """
        held, num_inputs = self._held, self._num_inputs
        taken = {storage(tensor) for tensor in (*held[:num_inputs], *(tensor for _, tensor, _ in self.outside))}
        writing = [one for one in self.operations if one.target._schema.is_mutable]
        written = Counter(slot.number for one in writing for slot in slots(one.args[:1]))
        # those that autograd makes to hold a copy, of the shape and the strides of a parameter
        empty = {one.result.number for one in self.operations if one.target is aten.new_empty_strided.default}
        found: dict[int, int] = {}
        for target, args, _, _ in writing:
            copy, source = slots(args[:2]) if target is aten.copy_.default else (None, None)
            if copy is None or source is None or copy.number not in empty or written[copy.number] > 1:
                continue
            one, other = held[copy.number], held[source.number]
            alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
            if alike and source.number < copy.number and source.number not in exposed and storage(other) not in taken:
                found[copy.number] = source.number
                taken.add(storage(other))
        return found

    def beside(self, numbers: Iterable[int]) -> set[int]:
        """The numbers of the tensors in the memory of these."""
        return self._in_memory({storage(self._held[number]) for number in numbers})

    def unchanged(self, exposed: set[int]) -> dict[int, int]:
        """The numbers of tensors that are another one multiplied by 1, as each bias in a mapped layer is, with its."""
        found: dict[int, int] = {}
        for target, args, _, result in self.operations:
            if target is aten.mul.Scalar and args[1] == 1 and exposed.isdisjoint((result.number, args[0].number)):
                one, other = self._held[result.number], self._held[args[0].number]
                if one.dtype == other.dtype and one.stride() == other.stride():
                    found[result.number] = args[0].number
        return found

    def fixed(self, exposed: set[int]) -> dict[int, Tensor]:
        """The small tensors that have the same values each time, as they depend on shapes alone, by number."""
        found: dict[int, Tensor] = {}
        for target, args, kwargs, result in self.operations:
            if isinstance(result, Slot) and is_pure(target) and result.number not in exposed:
                given = [] if target in SHAPED else [slot.number for slot in slots(args, kwargs)]
                tensor = self._held[result.number]
                if all(number in found for number in given) and tensor.numel() <= MOST_FIXED:
                    found[result.number] = tensor
        return found

    def slot(self, tensor: Tensor) -> Slot:
        """That of a tensor which an operation gave, or which is an input.

        Raises:
            NotRecordable: it is another one.
        """
        number = self._numbers.get(id(tensor))
        if number is None:
            raise NotRecordable("what it gives is not what an operation gave")
        return Slot(number)

    def tensors(self, value: Any) -> Any:
        """What was noted down, with tensors in the place of their slots."""
        return without_slots(value, self._held)

    def _in_memory(self, places: set[int]) -> set[int]:
        return {number for number, tensor in enumerate(self._held) if storage(tensor) in places}

    def _noted(self, value: Any, given: bool) -> Any:
        """A value with slots in the place of tensors; ``given`` to an operation, or given by it."""
        if isinstance(value, Tensor):
            number = self._numbers.get(id(value))
            if number is None:
                number = self._numbers[id(value)] = len(self._held)
                self._held.append(value)
                place = storage(value)
                if not given:
                    self._storages.add(place)
                elif place in self._storages:
                    self.obstacle = "a tensor comes from an operation that was not seen"
                else:
                    self.outside.append((number, value, value._version))
            return Slot(number)
        if isinstance(value, (list, tuple)):
            return [self._noted(part, given) for part in value]
        if isinstance(value, dict):
            return {name: self._noted(part, given) for name, part in value.items()}
        if not given and value is not None:
            self.obstacle = "it reads a number from a tensor"
        elif not isinstance(value, CONSTANTS):
            self.obstacle = f"an operation is given a {type(value).__name__}"
        # the one nan that is equal to itself, by identity
        return math.nan if isinstance(value, float) and math.isnan(value) else value


def slots(*values: Any) -> list[Slot]:
    """Those in arguments of an operation."""
    leaves = tree_leaves(values, is_leaf=lambda value: isinstance(value, Slot))
    return [leaf for leaf in leaves if isinstance(leaf, Slot)]


def without_slots(value: Any, found: Any) -> Any:
    """Arguments of an operation, with what is ``found`` under their numbers in the place of slots."""
    return tree_map(
        lambda part: found[part.number] if isinstance(part, Slot) else part,
        value,
        is_leaf=lambda part: isinstance(part, Slot),
    )


def is_pure(target: OpOverload) -> bool:
    """Whether an operation gives the same for the same arguments, and changes nothing."""
    return not (target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags)


# by an operation and the types of its arguments
NATIVE: dict[Any, Callable[..., Any]] = {}


def native(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of torch that comes to an operation, where there is one: it reads its arguments in less time."""
    key = repr((target, tree_map(type, (args, kwargs))))
    if key not in NATIVE:
        name = target._schema.name.removeprefix("aten::")
        function: Any = getattr(torch, name, getattr(Tensor, name, None))
        known = isinstance(function, BuiltinFunctionType | MethodDescriptorType) and is_pure(target)
        NATIVE[key] = function if known and comes_to(target, function, args, kwargs) else target
    return NATIVE[key]


@torch.no_grad()
def comes_to(target: OpOverload, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function calls an operation with the arguments that it is given, and no other one."""
    # some write to their arguments without saying so
    args, kwargs = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, kwargs))
    with Recorder([]) as called:
        try:
            function(*args, **kwargs)
        except (TypeError, RuntimeError):
            return False
    with Recorder([]) as usual:
        target(*args, **kwargs)
    return called.operations == usual.operations and len(usual.operations) == 1


def storage(tensor: Tensor) -> int:
    """Where the memory of a tensor is."""
    return tensor.untyped_storage().data_ptr()


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether a tensor is another one under a new name."""
    return one is not other and one.dtype == other.dtype and one.is_set_to(other)
