"""Programs of a group, as lists of their operations, repeated without the Python that led to them.

A step of small models takes most of its time in Python: the module's and the methods' code, autograd, and the mapping
over clients. All of it ends in a list of operations on tensors. Where two steps differ in their tensors alone, so does
the list, and repeating it gives the same bits.
"""

from __future__ import annotations

import dis
import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from fl_lightning.client.module_snapshot import changed_value
from fl_lightning.engine.compiled import CompiledPrograms
from fl_lightning.engine.recorder import NotRecordable, Recorder, Slot, aten, is_pure, native, slots, without_slots
from fl_lightning.errors import ClientError

# recordings that are kept for one part of a step
MOST_KEPT = 1000
# largest relative difference of a compiled program; rounding makes one of a thousandth in half precision
NEAR = 0.05
# rounds whose programs were others than before, after which a part of a step is no longer noted down
MOST_DROPPED = 2


class Recording:
    """A program as a list of operations.

    Args:
        recorder: has noted it down.
        num_inputs: number of its inputs.
        outputs: the tensors that it gives.
        notes: what it comes to beside tensors.

    Raises:
        NotRecordable: it cannot be repeated.
    """

    def __init__(self, recorder: Recorder, num_inputs: int, outputs: Sequence[Tensor], notes: Any) -> None:
        if recorder.obstacle is not None:
            raise NotRecordable(recorder.obstacle)
        if any(torch.Tag.nondeterministic_seeded in operation.target.tags for operation in recorder.operations):
            raise NotRecordable("it draws random numbers")
        if any(tensor._version != version for _, tensor, version in recorder.outside):
            raise NotRecordable("it writes to a tensor that is not the client's")
        self.operations, self.num_inputs, self.notes = recorder.operations, num_inputs, notes
        self.outside = [(number, tensor) for number, tensor, _ in recorder.outside]
        self._outputs = [recorder.slot(tensor) for tensor in outputs]
        self.compiled, self.age = False, 0
        self._program: Callable[..., Any]
        self._known: list[Tensor]

    def is_like(self, other: Recording) -> bool:
        """Whether both do the same with the same tensors from outside."""
        return (
            self.operations == other.operations
            and self._outputs == other._outputs
            and self.notes == other.notes
            and len(self.outside) == len(other.outside)
            and all(a == b and mine is its for (a, mine), (b, its) in zip(self.outside, other.outside, strict=True))
        )

    @torch.no_grad()
    def repeat(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The program with other inputs."""
        return self._program(*inputs, *self._known)

    def compile(self, program: Callable[..., Any] | None) -> bool:
        """Repeat it by a compiled function of the inputs; returns whether there is one."""
        self.compiled = program is not None
        if program is not None:
            self._program, self._known = program, []
        return self.compiled

    def write(self, recorder: Recorder, outputs: Sequence[Tensor]) -> None:
        """Write the operations as a function of the inputs.

        What nothing depends on is left out, what comes twice is done once, and what is the same each time is kept. That
        does not hold for tensors that are written to or given away, which must stay apart. A gradient is given away
        itself, where autograd has given a copy of it.
        """
        exposed = recorder.exposed(outputs)
        copies = recorder.copies(exposed)
        exposed |= recorder.beside(copies.values())
        aliases = recorder.aliases | recorder.unchanged(exposed) | copies
        graph, nodes, done = fx.Graph(), dict[int, fx.Node](), dict[str, fx.Node]()
        known = dict(self.outside) | recorder.fixed(exposed)
        for number in (*range(self.num_inputs), *known):
            nodes[number] = graph.placeholder(f"tensor_{number}")
        self._known = [*known.values()]

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
                first = done.setdefault(f"{target} {node.args} {node.kwargs}", node)
                if first is not node:
                    graph.erase_node(node)
                    node = first
            if isinstance(result, Slot):
                nodes.setdefault(result.number, node)
            for place, part in enumerate(result if isinstance(result, list) else []):
                if part is not None and part.number not in nodes:
                    nodes[part.number] = graph.call_function(operator.getitem, (node, place))
        graph.output(tuple(nodes[slot.number] for slot in self._outputs))
        graph.eliminate_dead_code()
        self._program = fx.GraphModule({}, graph).forward


class Recordings:
    """The recordings of a worker, by the part of a step and by what may differ from step to step beside tensors.

    A program is noted down the second time that it comes, and repeated from the third on. What methods and modules keep
    outside of tensors may change between rounds. Where an attribute has, each program is run as usual before it is
    repeated again; else the first program of a part is, in each round. If it is another one than before, all recordings
    of this part are dropped.

    Args:
        compiler: compiles programs, so that they are repeated from the first time on.

    Attributes:
        obstacles: why a part is never repeated, by part; where programs are compiled by program, since the bits of one
            may not depend on which came before.
    """

    def __init__(self, compiler: CompiledPrograms | None = None) -> None:
        self.compiler = compiler
        self._kept: dict[str, dict[Any, Recording | None]] = {}
        self._round, self._confirmed = -1, set[str]()
        self._outside, self._age = dict[tuple[int, str], Any](), 0
        self._dropped: Counter[str] = Counter()
        self.obstacles: dict[Any, str] = {}

    def begin_group(self, round_: int, outside: dict[tuple[int, str], Any]) -> None:
        """Nothing is known yet of how the programs of a round are.

        Args:
            round_: its number.
            outside: what the attributes of module and methods hold.
        """
        same = changed_value(self._outside, outside) is None
        if round_ != self._round or not same:
            self._round = round_
            self._confirmed.clear()
        if not same:
            self._outside, self._age = outside, self._age + 1
            if self.compiler is not None:
                self.compiler.forget()

    def find(self, part: str, key: Any) -> Recording | None:
        """The recording of a program; None where it is to be run."""
        found = self._kept.get(part, {}).get(key) if part in self._confirmed else None
        return found if found is None or found.age == self._age else None

    def run(
        self,
        part: str,
        key: Any,
        inputs: Sequence[Tensor],
        program: Callable[[], tuple[Sequence[Tensor], Any]],
        compiled: Callable[[], Callable[..., Any] | None] | None = None,
    ) -> tuple[Sequence[Tensor], Any]:
        """Run a program, and note it down where it may come again.

        Args:
            part: of which part of a step it is.
            key: programs of this part with the same key are alike; the number of clients comes first.
            inputs: its inputs, each once.
            program: runs it; gives its outputs and its notes.
            compiled: compiles it; its outputs are then those of the compiled one, each time.
        """
        kept = self._kept.setdefault(part, {})
        what = part if self.compiler is None else (part, *key[1:])
        if what in self.obstacles:
            return program()
        if key not in kept and len(kept) >= MOST_KEPT:
            kept.clear()
        if key not in kept and compiled is None:
            kept[key] = None
            return program()
        before = kept.get(key)
        copies = [tensor.detach().clone() for tensor in inputs]
        drawn = numbers_drawn()
        with Recorder(inputs) as recorder:
            outputs, notes = program()
        try:
            if notes.obstacle is not None:
                raise NotRecordable(notes.obstacle)
            if numbers_drawn() != drawn:
                raise NotRecordable("it draws random numbers")
            recording = Recording(recorder, len(inputs), outputs, notes)
            same = before is not None and recording.is_like(before)
            if before is not None and not same:
                kept.clear()
                self._dropped[part] += 1
                if self.compiler is not None:
                    self.compiler.forget(part)
                elif self._dropped[part] > MOST_DROPPED:
                    raise NotRecordable("it changes from round to round")
            if before is not None and same:
                recording = before
            elif compiled is None or not recording.compile(compiled()):
                recording.write(recorder, outputs)
                check_repeats(recording, copies, inputs, outputs)
        except NotRecordable as error:
            self.obstacles[what] = str(error)
            kept.clear()
            if self.compiler is not None:
                self.compiler.say(f"the {part} of clients side by side", str(error))
            return outputs, notes
        if recording.compiled:
            written = [pair for pair in zip(inputs, copies, strict=True) if not same_values(*pair)]
            usual = [*outputs, *(tensor.detach().clone() for tensor, _ in written)]
            for tensor, copy in written:
                tensor.data.copy_(copy)
            outputs = recording.repeat(inputs)
            check_near(usual, [*outputs, *(tensor for tensor, _ in written)])
        if before is not None or not any(kept.values()):
            self._confirmed.add(part)
        kept[key], recording.age = recording, self._age
        return outputs, notes


def numbers_drawn() -> tuple[Any, ...]:
    """The states of the generators outside of torch, of whose numbers a program would repeat those of one step."""
    numbers: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), numbers[1].tobytes(), numbers[2:]


def check_repeats(
    recording: Recording, copies: Sequence[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Repeat a program on copies of its inputs, and compare.

    Raises:
        NotRecordable: something comes out with other bits.
    """
    repeated = [*recording.repeat(copies), *copies]
    for new, old in zip(repeated, [*outputs, *inputs], strict=True):
        if new.shape != old.shape or new.dtype != old.dtype or not same_values(new, old):
            raise NotRecordable("a repetition gives other bits")


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, where nan is equal to nan."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def check_near(usual: Sequence[Tensor], compiled: Sequence[Tensor]) -> None:
    """Compare what a compiled program gives with what it gives as it is.

    Raises:
        ClientError: it is another.
    """
    pairs = [(a.detach(), b.detach()) for a, b in zip(usual, compiled, strict=True) if a.is_floating_point()]
    total = math.hypot(*(float(a.double().norm()) for a, _ in pairs))
    for one, other in pairs if math.isfinite(total) else ():
        gap, size = float((one.double() - other).norm()), float(one.double().norm())
        # small values that are left of large ones are rounding
        if not gap <= NEAR * max(size, total * min(1.0, 1000 * torch.finfo(one.dtype).eps)):
            what = f"a compiled step gives other values than the step itself, by {gap / max(size, 1e-30):.2%}"
            raise ClientError(f"{what}; leave trainer.compile out")


def looks_at(function: Callable[..., Any], place: int) -> bool:
    """Whether the code of a method reads its argument at this place, which another program may have another of."""
    code = getattr(getattr(function, "__func__", None), "__code__", None)
    if code is None or code.co_argcount <= place + 1:
        return True
    name = code.co_varnames[place + 1]
    return any(
        name in (instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
        for instruction in dis.get_instructions(code)
    )
