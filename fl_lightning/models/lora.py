"""LoRA adapters for the linear layers of any module.

LoRA: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fl_lightning.models.etf import ETFClassifier
from fl_lightning.utilities.errors import require


class LoRALinear(nn.Module):
    r"""A frozen linear layer with an adapter, :math:`W x + b + \frac{\alpha}{r} B A x`.

    A has the default initialisation of a linear layer, and B begins at 0.

    Args:
        base_layer: the linear layer.
        rank: r.
        alpha: :math:`\alpha`.
    """

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        where = {"device": base_layer.weight.device, "dtype": base_layer.weight.dtype}
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, **where)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, **where)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    @property
    def weight(self) -> Tensor:
        r""":math:`W + \frac{\alpha}{r} B A` ``(out, in)``, for modules that read it, such as MultiheadAttention."""
        return self.base_layer.weight + self.scaling * self.lora_B.weight @ self.lora_A.weight

    @property
    def bias(self) -> Tensor | None:
        """b, or None."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


def with_lora(
    module: LightningModule, rank: int = 4, alpha: float = 8.0, trained: list[str] | None = None, train_a: bool = True
) -> LightningModule:
    r"""Add LoRA adapters to the linear layers of a module, and freeze the rest.

    In a config, it replaces the module:
    ``model: {class_path: fl_lightning.models.with_lora, init_args: {module: {class_path: ...}, rank: 4}}``.

    Args:
        module: a LightningModule, or any other module; it is changed in place.
        rank: rank r of the adapters, at least 1.
        alpha: :math:`\alpha`; the product of the factors is scaled by :math:`\alpha / r`.
        trained: paths of submodules that are trained without an adapter; None is the submodule of the module's tap
            ``logits``, if it has one.
        train_a: whether the factors A are trained. False freezes them, so that they do not travel (for FFALoRA).

    Returns:
        The module.

    Raises:
        UsageError: ``rank`` is below 1, or the module has no linear layer outside of ``trained`` or an ETFClassifier.
    """
    require(rank >= 1, "with_lora.rank", rank, "use 1 or more")
    taps = getattr(module, "taps", {})
    full_paths = ([taps["logits"]] if "logits" in taps else []) if trained is None else trained
    parts = dict(module.named_modules(remove_duplicate=False))
    is_fixed = any(isinstance(part, ETFClassifier) for part in parts.values())
    hint = "adapters would change its fixed vertices; use another classifier"
    require(not is_fixed, "with_lora.module", "ETFClassifier", hint)
    prefixes = tuple(f"{path}." for path in full_paths)
    trained_parts = {part for path, part in parts.items() if f"{path}.".startswith(prefixes)}
    layers = dict[str, nn.Linear]()
    for path, part in parts.items():
        if isinstance(part, nn.Linear) and part not in trained_parts:
            layers[path] = part
    hint = "it has no linear layer that can have an adapter; take with_lora out"
    require(bool(layers) and "" not in layers, "with_lora.module", type(module).__name__, hint)
    module.requires_grad_(False)
    for path in full_paths:
        module.get_submodule(path).requires_grad_(True)
    # a layer may have several paths
    adapted = {layer: LoRALinear(layer, rank, alpha) for layer in dict.fromkeys(layers.values())}
    for path, layer in layers.items():
        adapted[layer].lora_A.requires_grad_(train_a)
        module.set_submodule(path, adapted[layer])
    return module
