"""The LoRA adapters of a module, found by the names that peft, loralib and :func:`fl_lightning.models.with_lora` use.

LoRA: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.core.state import tensors

# x.lora_A (loralib), x.lora_A.weight (with_lora), x.lora_A.default.weight and x.lora_embedding_A.default (peft)
FACTOR = re.compile(r"(.+)\.lora_(embedding_)?A((?:\.\w+)*)")


class LoRAAdapter(NamedTuple):
    """An adapter, which adds s B A to a frozen weight W.

    Args:
        a: name of A, ``(r, in)``, in the state.
        b: name of B, ``(out, r)``.
        base: name of W, ``(out, in)``; empty if the layer has no such entry.
        scaling: s; nan if the layer does not say.
        transposed: whether the layer stores W as ``(in, out)``.
    """

    a: str
    b: str
    base: str
    scaling: float
    transposed: bool

    @property
    def path(self) -> str:
        """The path of the layer, with the name of the adapter if it has one."""
        return re.sub(r"\.lora_(embedding_)?A|\.weight$", "", self.a)

    @torch.no_grad()
    def product(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return B A ``(out, in)`` of a state, in float64; the kernel of a convolution is flattened."""
        return state[self.b].double().flatten(1) @ state[self.a].double().flatten(1)

    @torch.no_grad()
    def singular_values(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the singular values of B A ``(min(out, r, in),)``, descending, in float64; the others are 0."""
        # B A has the singular values of the small product of the triangular factors of B and A^T
        factors = (state[self.b].flatten(1), state[self.a].flatten(1).T)
        b, a = (torch.linalg.qr(factor.double()).R for factor in factors)
        return torch.linalg.svdvals(b @ a.T)


def lora_adapters(module: nn.Module) -> list[LoRAAdapter]:
    """Return the adapters of a module, in the order of its state dict."""
    state, adapters = tensors(module), list[LoRAAdapter]()
    for name in state:
        match = FACTOR.fullmatch(name)
        if match is None:
            continue
        path, kind, suffix = match[1], match[2] or "", match[3]
        b, layer = f"{path}.lora_{kind}B{suffix}", module.get_submodule(path)
        base = next((w for w in (f"{path}.base_layer.weight", f"{path}.weight") if w in state), "")
        scaling = getattr(layer, "scaling", None)
        if isinstance(scaling, Mapping):
            scaling = scaling.get(suffix.removesuffix(".weight").removeprefix("."))
        transposed = bool(kind or getattr(layer, "fan_in_fan_out", False))
        if b in state:
            adapters.append(LoRAAdapter(name, b, base, float("nan" if scaling is None else scaling), transposed))
    return adapters
