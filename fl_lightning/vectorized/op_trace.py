"""Records the tensor operations of a program, and repeats them without the Python that led to them.

A step of small models takes most of its time in Python: the module's and the methods' code, autograd, and the mapping
over clients. All of it ends in a list of operations on tensors. Where two steps differ in their tensors alone, so does
the list, and repeating it gives the same bits.
"""

from __future__ import annotations

import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fl_lightning.core.state import as_floats
from fl_lightning.vectorized.values_held import changed_value

aten = torch.ops.aten
# types of the constant arguments of an operation
CONSTANTS = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
# operations that read nothing but the shape and the type of their argument
SHAPED = (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.new_zeros.default)
# numbers of a constant tensor that a recording keeps
MOST_FIXED = 2**16
# recordings that are kept for one part of a step
MOST_KEPT = 1000
# changes of programs between rounds after which a part of a step is no longer recorded
MOST_DROPPED = 2


class TensorRef(NamedTuple):
    """Stands for a tensor in a recording."""

    number: int


class Operation(NamedTuple):
    """An operation on tensors: its arguments and its result hold slots in the place of tensors."""

    target: OpOverload
    args: Any
    kwargs: Any
    result: Any


class NotRecordable(Exception):
    """A program cannot be repeated; says why."""


class OpTracer(TorchDispatchMode):
    """In this block each operation is done as usual, and recorded.

    Args:
        inputs: the tensors that differ from program to program, each once.

    Attributes:
        operations: the operations in order.
        outside: tensors that are neither inputs nor results, each with the number of its slot and its version; the same
            ones are used each time.
        aliases: number of each tensor that is another one under a new name, such as a detached one, with that one's.
        obstacle: why the program cannot be repeated; None as long as it can.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.outside: list[tuple[int, Tensor, int]] = []
        self.aliases: dict[int, int] = {}
        self.obstacle: str | None = None
        # keeps all tensors alive, so that ids are unique
        self._held: list[Tensor] = [*inputs]
        self._num_inputs = len(inputs)
        self._numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
        # of the results: a tensor of the same memory that no operation gave was made by one that was not seen
        self._storages: set[int] = set()
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = (self._noted(args, True), self._noted(kwargs, True)) if self.obstacle is None else None
        result = func(*args, **kwargs)
        if arguments is not None:
            self.operations.append(Operation(func, *arguments, self._noted(result, False)))
            source = args[0] if args else None
            if isinstance(result, Tensor) and isinstance(source, Tensor) and is_alias(result, source):
                self.aliases[self._numbers[id(result)]] = self._numbers[id(source)]
            if torch.Tag.inplace_view in func.tags:
                self.obstacle = "it changes the shape of a tensor in place"
            if func._schema.is_mutable:
                names = [argument.name for argument in func._schema.arguments]
                values = dict(zip(names, args, strict=False)) | kwargs
                targets = [argument.name for argument in func._schema.arguments if argument.is_write]
                written_tensors = tree_leaves([values[name] for name in targets if name in values])
                self._written.update(map(storage, written_tensors))
        return result

    def exposed(self, outputs: Sequence[Tensor]) -> set[int]:
        """The numbers of the tensors whose memory an operation writes to, or the program gives away."""
        return self._in_memory(self._written | {storage(tensor) for tensor in outputs})

    def copies(self, exposed: set[int]) -> dict[int, int]:
        """The numbers of tensors that are a copy of one whose memory nobody else gets, with its number.

        At the end of a step, autograd hands out such a gradient itself. It copies a gradient that has another owner,
        and the recorder owns them all.
        """
        tensors, num_inputs = self._held, self._num_inputs
        outside = [tensor for _, tensor, _ in self.outside]
        owned = {storage(tensor) for tensor in (*tensors[:num_inputs], *outside)}
        writing = [part for part in self.operations if part.target._schema.is_mutable]
        num_writes = Counter[int]()
        for operation in writing:
            num_writes.update(slot.number for slot in slots(operation.args[:1]))
        # those that autograd makes to hold a copy, of the shape and the strides of a parameter
        allocate = aten.new_empty_strided.default
        empty = {part.result.number for part in self.operations if part.target is allocate}
        sources: dict[int, int] = {}
        for target, args, _, _ in writing:
            copy, source = slots(args[:2]) if target is aten.copy_.default else (None, None)
            if copy is None or source is None or copy.number not in empty or num_writes[copy.number] > 1:
                continue
            gradient, original = tensors[copy.number], tensors[source.number]
            alike = (gradient.dtype, gradient.shape, gradient.stride()) == (
                original.dtype,
                original.shape,
                original.stride(),
            )
            place = storage(original)
            if alike and source.number < copy.number and source.number not in exposed and place not in owned:
                sources[copy.number] = source.number
                owned.add(place)
        return sources

    def beside(self, numbers: Iterable[int]) -> set[int]:
        """The numbers of the tensors in the memory of these."""
        return self._in_memory({storage(self._held[number]) for number in numbers})

    def unchanged(self, exposed: set[int]) -> dict[int, int]:
        """The numbers of tensors that are another one times 1, as each bias in a mapped layer is, with its number."""
        sources: dict[int, int] = {}
        for target, args, _, result in self.operations:
            if target is aten.mul.Scalar and args[1] == 1 and exposed.isdisjoint((result.number, args[0].number)):
                product, factor = self._held[result.number], self._held[args[0].number]
                if product.dtype == factor.dtype and product.stride() == factor.stride():
                    sources[result.number] = args[0].number
        return sources

    def fixed(self, exposed: set[int]) -> dict[int, Tensor]:
        """The small tensors that have the same values each time, as they depend on shapes alone, by number."""
        constants: dict[int, Tensor] = {}
        for target, args, kwargs, result in self.operations:
            if isinstance(result, TensorRef) and is_pure(target) and result.number not in exposed:
                numbers = [] if target in SHAPED else [slot.number for slot in slots(args, kwargs)]
                tensor = self._held[result.number]
                if all(number in constants for number in numbers) and tensor.numel() <= MOST_FIXED:
                    constants[result.number] = tensor
        return constants

    def slot(self, tensor: Tensor) -> TensorRef:
        """The slot of an input or of a result; another tensor makes the program one that cannot be repeated."""
        number = self._numbers.get(id(tensor))
        if number is None:
            raise NotRecordable("one of its results comes from no operation")
        return TensorRef(number)

    def tensors(self, value: Any) -> Any:
        """A recorded value, with tensors in the place of their slots."""
        return without_slots(value, self._held)

    def _in_memory(self, places: set[int]) -> set[int]:
        return {number for number, tensor in enumerate(self._held) if storage(tensor) in places}

    def _noted(self, value: Any, is_argument: bool) -> Any:
        """A value with slots in the place of tensors; an argument of an operation, or its result."""
        if isinstance(value, Tensor):
            number = self._numbers.get(id(value))
            if number is None:
                number = self._numbers[id(value)] = len(self._held)
                self._held.append(value)
                place = storage(value)
                if not is_argument:
                    self._storages.add(place)
                elif place in self._storages:
                    self.obstacle = "a tensor comes from an operation that was not seen"
                else:
                    self.outside.append((number, value, value._version))
            return TensorRef(number)
        if isinstance(value, (list, tuple)):
            return [self._noted(part, is_argument) for part in value]
        if isinstance(value, dict):
            return {name: self._noted(part, is_argument) for name, part in value.items()}
        if not is_argument and value is not None:
            self.obstacle = "it reads a number from a tensor"
        elif not isinstance(value, CONSTANTS):
            self.obstacle = f"an operation receives a {type(value).__name__}"
        # the one nan that is equal to itself, by identity
        return math.nan if isinstance(value, float) and math.isnan(value) else value


class OpTrace:
    """A program of ``num_inputs`` inputs as a list of operations, with its ``notes``: its results apart from tensors.

    Raises:
        NotRecordable: the program cannot be repeated.
    """

    def __init__(self, recorder: OpTracer, num_inputs: int, outputs: Sequence[Tensor], notes: Any) -> None:
        if obstacle := notes.obstacle or recorder.obstacle:
            raise NotRecordable(obstacle)
        random_tag = torch.Tag.nondeterministic_seeded
        if any(random_tag in operation.target.tags for operation in recorder.operations):
            raise NotRecordable("it draws random numbers")
        if any(tensor._version != version for _, tensor, version in recorder.outside):
            raise NotRecordable("it writes to a tensor that is not the client's")
        self.operations, self.num_inputs, self.notes = recorder.operations, num_inputs, notes
        self.outside = [(number, tensor) for number, tensor, _ in recorder.outside]
        self._outputs = [recorder.slot(tensor) for tensor in outputs]
        self.age = 0
        self._program: Callable[..., Any]
        self._known: list[Tensor]

    def is_like(self, other: OpTrace) -> bool:
        """Whether both do the same with the same tensors from outside."""
        return (
            self.operations == other.operations
            and self._outputs == other._outputs
            and self.notes == other.notes
            and len(self.outside) == len(other.outside)
            and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(self.outside, other.outside, strict=True))
        )

    @torch.no_grad()
    def repeat(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs of the program for other inputs."""
        return self._program(*inputs, *self._known)

    def write(self, recorder: OpTracer, outputs: Sequence[Tensor]) -> None:
        """Write the operations as a function of the inputs.

        Operations without effect are removed, equal ones are executed once, and constants are stored. This does not
        apply to tensors that are modified or returned, which must remain separate. In place of autograd's copy of a
        gradient, the gradient itself is returned.
        """
        exposed = recorder.exposed(outputs)
        copies = recorder.copies(exposed)
        exposed |= recorder.beside(copies.values())
        aliases = recorder.aliases | recorder.unchanged(exposed) | copies
        graph, nodes, computed_nodes = fx.Graph(), dict[int, fx.Node](), dict[str, fx.Node]()
        constants = dict(self.outside) | recorder.fixed(exposed)
        for number in (*range(self.num_inputs), *constants):
            nodes[number] = graph.placeholder(f"tensor_{number}")
        self._known = [*constants.values()]

        for target, args, kwargs, result in self.operations:
            numbers = [slot.number for slot in slots(result)]
            if target is aten.copy_.default and args[0].number in copies:
                continue
            if numbers and all(number in nodes for number in numbers) and is_pure(target):
                continue
            if len(numbers) == 1 and numbers[0] in aliases and numbers[0] not in nodes:
                nodes[numbers[0]] = nodes[aliases[numbers[0]]]
                continue
            function = native(target, recorder.tensors(args), recorder.tensors(kwargs))
            node = graph.call_function(function, tuple(without_slots(args, nodes)), without_slots(kwargs, nodes))
            if is_pure(target) and exposed.isdisjoint(slot.number for slot in slots(args, kwargs, result)):
                earlier = computed_nodes.setdefault(f"{target} {node.args} {node.kwargs}", node)
                if earlier is not node:
                    graph.erase_node(node)
                    node = earlier
            if isinstance(result, TensorRef):
                nodes.setdefault(result.number, node)
            for place, part in enumerate(result if isinstance(result, list) else []):
                if part is not None and part.number not in nodes:
                    nodes[part.number] = graph.call_function(operator.getitem, (node, place))
        graph.output(tuple(nodes[slot.number] for slot in self._outputs))
        graph.eliminate_dead_code()
        self._program = fx.GraphModule({}, graph).forward

    def check(self, copies: Sequence[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Repeat the program on copies of its inputs; refuse other bits than it had."""
        pairs = list(zip([*self.repeat(copies), *copies], [*outputs, *inputs], strict=True))
        fits = all(
            repeated.shape == recorded.shape and repeated.dtype == recorded.dtype for repeated, recorded in pairs
        )
        # nan equals nan
        if not fits or not all(as_floats([((a == b) | ((a != a) & (b != b))).all() for a, b in pairs])):
            raise NotRecordable("a repetition gives other bits")


class Recordings:
    """The recordings of a worker, by part of a step and a key of everything except tensors.

    A program is recorded in its second run, and repeated from the third on. Attributes of methods and modules may
    change between rounds. After a change, each program runs normally before it is repeated again; otherwise only the
    first program of a part does, in each round. If it differs from its recording, all recordings of the part are
    dropped.

    Attributes:
        obstacles: reasons why parts are never repeated, by part.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[Any, OpTrace | None]] = {}
        self._round, self._confirmed = -1, set[str]()
        self._outside, self._age = dict[tuple[int, str], Any](), 0
        self._dropped: Counter[str] = Counter()
        self.obstacles: dict[str, str] = {}

    def begin_group(self, round_: int, outside: dict[tuple[int, str], Any]) -> None:
        """Begin a group of a round; ``outside`` has the values of the attributes of module and methods."""
        is_same = changed_value(self._outside, outside) is None
        if round_ != self._round or not is_same:
            self._round = round_
            self._confirmed.clear()
        if not is_same:
            self._outside, self._age = outside, self._age + 1

    def find(self, part: str, key: Any) -> OpTrace | None:
        """The recording of a program; None where it is to be run."""
        trace = self._kept.get(part, {}).get(key) if part in self._confirmed else None
        return trace if trace is None or trace.age == self._age else None

    def run(
        self, part: str, key: Any, inputs: Sequence[Tensor], program: Callable[[], tuple[Sequence[Tensor], Any]]
    ) -> tuple[Sequence[Tensor], Any]:
        """Run a program, and record it where it may come again.

        Args:
            part: the part of a step that it does.
            key: programs of this part with the same key are alike.
            inputs: its inputs, each once.
            program: runs it; gives its outputs and its notes.
        """
        traces = self._kept.setdefault(part, {})
        if part in self.obstacles:
            return program()
        if key not in traces:
            if len(traces) >= MOST_KEPT:
                traces.clear()
            traces[key] = None
            return program()
        before = traces[key]
        copies = [tensor.detach().clone() for tensor in inputs]
        drawn = numbers_drawn()
        with OpTracer(inputs) as recorder:
            outputs, notes = program()
        try:
            recording = OpTrace(recorder, len(inputs), outputs, notes)
            if numbers_drawn() != drawn:
                raise NotRecordable("it draws random numbers")
            if before is not None and recording.is_like(before):
                recording = before
            else:
                if before is not None:
                    traces.clear()
                    self._dropped[part] += 1
                    if self._dropped[part] > MOST_DROPPED:
                        raise NotRecordable("it changes from round to round")
                recording.write(recorder, outputs)
                recording.check(copies, inputs, outputs)
        except NotRecordable as error:
            self.obstacles[part] = str(error)
            traces.clear()
            return outputs, notes
        if before is not None or not any(traces.values()):
            self._confirmed.add(part)
        traces[key], recording.age = recording, self._age
        return outputs, notes


def numbers_drawn() -> tuple[Any, ...]:
    """The states of the generators outside of torch: a repetition would use the numbers of one step each time."""
    numbers: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), numbers[1].tobytes(), numbers[2:]


def slots(*values: Any) -> list[TensorRef]:
    """The slots in arguments of an operation."""
    leaves = tree_leaves(values, is_leaf=lambda value: isinstance(value, TensorRef))
    return [leaf for leaf in leaves if isinstance(leaf, TensorRef)]


def without_slots(value: Any, substitutes: Any) -> Any:
    """Arguments of an operation, with ``substitutes[number]`` in the place of each slot."""
    return tree_map(
        lambda part: substitutes[part.number] if isinstance(part, TensorRef) else part,
        value,
        is_leaf=lambda part: isinstance(part, TensorRef),
    )


def is_pure(target: OpOverload) -> bool:
    """Whether an operation gives the same for the same arguments, and changes nothing."""
    return not (target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags)


# by an operation and the types of its arguments
NATIVE: dict[Any, Callable[..., Any]] = {}


def native(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of torch that calls this operation alone, where there is one: it reads arguments in less time."""
    key = repr((target, tree_map(type, (args, kwargs))))
    if key not in NATIVE:
        name = target._schema.name.removeprefix("aten::")
        function: Any = getattr(torch, name, getattr(Tensor, name, None))
        is_native = isinstance(function, BuiltinFunctionType | MethodDescriptorType) and is_pure(target)
        NATIVE[key] = function if is_native and is_equivalent(target, function, args, kwargs) else target
    return NATIVE[key]


@torch.no_grad()
def is_equivalent(target: OpOverload, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function calls this operation alone, with the same arguments."""
    # some write to their arguments without saying so
    args, kwargs = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, kwargs))
    with OpTracer([]) as called:
        try:
            function(*args, **kwargs)
        except (TypeError, RuntimeError):
            return False
    with OpTracer([]) as usual:
        target(*args, **kwargs)
    return called.operations == usual.operations and len(usual.operations) == 1


def storage(tensor: Tensor) -> int:
    """A number that tells the memory of one tensor from that of another; it does not write out lazy copies."""
    return tensor.untyped_storage()._cdata


def is_alias(tensor: Tensor, source: Tensor) -> bool:
    """Whether a tensor is another one under a new name."""
    return tensor is not source and tensor.dtype == source.dtype and tensor.is_set_to(source)
