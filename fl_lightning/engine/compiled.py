"""``torch.compile``: of a module's forward, for batches of the usual size, and of programs of clients side by side.

The private parts of torch that this needs are used here alone, as of torch 2.6 and 2.15: the error of a failed
compilation, the reset of compiled code, the list of modes, sizes that are not constants, and tensors without values.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch._inductor
from lightning.pytorch import LightningModule
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fl_lightning.errors import clipped

MODES = tuple(torch._inductor.list_mode_options())
NO_GRAPHS = {"triton.cudagraphs": False}
aten = torch.ops.aten
# an operation that writes to its arguments without saying so, and one that says so
WRITING = {aten.native_batch_norm.default: aten._native_batch_norm_legit.default}
# clients in a trace, a prime; and when a program is compiled
MANY, FEW = 1_000_003, 16


def first_line(error: Exception) -> str:
    """That of its message, or its kind where it has none."""
    return clipped((str(error).strip().splitlines() or [type(error).__name__])[0], 300)


class CompiledForward:
    """Replaces the ``forward`` of a module, and runs it compiled in training.

    A client's last batch is mostly smaller than the others. It runs uncompiled, since torch would compile each size
    anew, and with padding to one size BatchNorm would see the padding.

    Args:
        module: the module.
        mode: of ``torch.compile``; True is its default.
        warn: called once if compiling fails.
    """

    def __init__(self, module: LightningModule, mode: bool | str, warn: Callable[[str], None]) -> None:
        self.module, self.plain, self.warn = module, module.forward, warn
        self._compiled: Any = torch.compile(self.plain, dynamic=False, mode=None if mode is True else str(mode))
        self._usual = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module's own ``forward``."""
        rows = len(args[0]) if args and isinstance(args[0], Tensor) and args[0].ndim else 0
        self._usual = max(self._usual, rows)
        if self._compiled is None or not self.module.training or rows < self._usual:
            return self.plain(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:  # raised before anything has run
            self._compiled = None
            self.warn(f"trainer.compile: the model cannot be compiled and runs as it is: {first_line(error)}")
            return self.plain(*args, **kwargs)


def replace_forward(module: LightningModule, mode: bool | str, warn: Callable[[str], None]) -> None:
    """Let a module run through :class:`CompiledForward`, until :meth:`Client.release` removes that."""
    # torch would reuse code compiled for another module of this class, without the hooks that record this one's taps
    torch._dynamo.reset()
    module.__dict__["forward"] = CompiledForward(module, mode, warn)


@contextmanager
def uncompiled(module: LightningModule) -> Iterator[None]:
    """In this block the module's ``forward`` is its own."""
    compiled = module.__dict__.get("forward")
    if not isinstance(compiled, CompiledForward):
        yield
        return
    del module.__dict__["forward"]
    try:
        yield
    finally:
        module.__dict__["forward"] = compiled


class CompiledPrograms:
    """Programs of several clients side by side through ``torch.compile``, each once for any number of clients.

    A program is traced with so many clients that no other size is a multiple of their number; that costs nothing, since
    the tensors of a trace have no values. In the trace that number is replaced by the number that there is. torch's
    own sizes that are symbols do not do here: under ``torch.vmap`` some operations turn them into numbers.

    Args:
        mode: of ``torch.compile``; True is its default.
        warn: told what is not compiled.
    """

    def __init__(self, mode: bool | str, warn: Callable[[str], None]) -> None:
        # a CUDA graph writes its results over those of the step before, which clients keep
        self._options = ({} if mode is True else torch._inductor.list_mode_options(str(mode))) | NO_GRAPHS
        self.warn, self._said = warn, set[str]()
        # None is what cannot be compiled
        self._by_key: dict[Any, Callable[..., Any] | None] = {}
        self._by_code: dict[Any, Callable[..., Any] | None] = {}

    def say(self, what: str, why: str) -> None:
        """Say, once, that something runs as it is."""
        text = f"trainer.compile: {what} cannot be compiled and runs as it is: {why}"
        if text not in self._said:
            self._said.add(text)
            self.warn(text)

    def forget(self, part: str | None = None) -> None:
        """Trace the programs of a part of a step anew, or all."""
        self._by_key = {key: program for key, program in self._by_key.items() if part not in (None, key[0])}

    def compiled(
        self, key: Any, program: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], stacked: Sequence[bool]
    ) -> Callable[..., Any] | None:
        """A compiled function of the inputs; None where it cannot be compiled, of which is warned once.

        Args:
            key: the name of a part of a step, and what else distinguishes programs but for the number of clients.
            program: a function of the inputs.
            inputs: tensors to compile it for.
            stacked: which of them are of each client.
        """
        if key not in self._by_key:
            # others are compiled nevertheless: the bits of a client may not depend on who has come before it
            self._by_key[key] = None
            try:
                self._by_key[key] = self._compile(trace(program, inputs, stacked), inputs, stacked)
            except Exception as error:  # whatever a compiler comes upon
                self.say("the step of clients side by side", first_line(error))
        return self._by_key[key]

    def _compile(
        self, traced: GraphModule, inputs: Sequence[Tensor], stacked: Sequence[bool]
    ) -> Callable[..., Any] | None:
        # steps at another rate are others by their key, but mostly not by their code
        shapes = tuple((t.shape[own:], t.dtype, own) for t, own in zip(inputs, stacked, strict=True))
        code = (traced.code, shapes, tuple(id(value) for value in traced.buffers()))
        if code not in self._by_code:
            self._by_code[code] = None
            function = torch.compile(traced, fullgraph=True, dynamic=False, options=self._options)
            # the code may depend on the sizes that it is first compiled for, so these are the same everywhere
            some = [
                t.new_zeros(FEW, *t.shape[1:]).requires_grad_(t.requires_grad) if own else t
                for t, own in zip(inputs, stacked, strict=True)
            ]
            for tensor, own in zip(some, stacked, strict=True):
                if own:
                    torch._dynamo.mark_dynamic(tensor, 0)
            logging.disable(logging.ERROR)  # what fails is said in one line
            try:
                with torch.no_grad():
                    function(*some)
            finally:
                logging.disable(logging.NOTSET)
            self._by_code[code] = function
        return self._by_code[code]


def trace(program: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], stacked: Sequence[bool]) -> GraphModule:
    """The operations of a function of some tensors, for any length of those that are stacked."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [
            tensor.new_empty(MANY, *tensor.shape[1:]) if own else mode.from_tensor(tensor.detach())
            for tensor, own in zip(inputs, stacked, strict=True)
        ]

        def detached(*others: Tensor) -> list[Tensor]:
            leaves = [o.detach().requires_grad_(i.requires_grad) for o, i in zip(others, inputs, strict=True)]
            return [output.detach() for output in program(*leaves)]

        traced = make_fx(detached, decomposition_table=WRITING)(*fakes)
    graph = traced.graph
    places = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(places[-1]):
        number = graph.call_function(aten.sym_size.int, (places[[*stacked].index(True)], 0))

    def of_number(value: Any, node: Node) -> Any:
        if isinstance(value, (list, tuple)):
            return [of_number(part, node) for part in value]
        if type(value) is not int or not value or value % MANY:
            return value
        with graph.inserting_before(node):
            return number if value == MANY else graph.call_function(operator.mul, (number, value // MANY))

    for node in [*graph.nodes]:
        if node.op == "get_attr":
            # a tensor that the function has not taken from its arguments
            same = [
                place for place, tensor in zip(places, inputs, strict=True) if tensor is getattr(traced, node.target)
            ]
            if same:
                node.replace_all_uses_with(same[0])
        elif node.target is aten.convolution.default and node.args[8] % MANY == 0:
            raise NotImplementedError("torch compiles a convolution for one number of clients alone")
        elif node.op == "call_function" and node.target not in (operator.mul, number.target):
            node.args = tuple(of_number(part, node) for part in node.args)
            node.kwargs = {name: of_number(part, node) for name, part in node.kwargs.items()}
    graph.eliminate_dead_code()
    traced.recompile()
    return traced
