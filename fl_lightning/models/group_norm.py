"""BatchNorm replaced by GroupNorm, in any module."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import nn

# private base of BatchNorm1d, 2d, 3d and SyncBatchNorm, as of torch 2.6 and 2.15
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.utilities.errors import require


def with_group_norm(module: LightningModule, groups: int = 2) -> LightningModule:
    """Replace every BatchNorm layer of a module by GroupNorm, which has no running statistics to average.

    GroupNorm (Wu and He, ECCV 2018) normalises each example by itself, over groups of channels. Scale, shift and
    epsilon are copied from the BatchNorm layer; its running statistics are dropped, so that a trained network must be
    trained further. In a config, it replaces the module:
    ``model: {class_path: fl_lightning.models.with_group_norm, init_args: {module: {class_path: ...}, groups: 2}}``.

    Args:
        module: a LightningModule, or any other module; it is changed in place.
        groups: number of groups of a layer's channels, at least 1.

    Returns:
        The module.

    Raises:
        UsageError: the module has no BatchNorm layer, or a number of channels is not divisible by ``groups``.
    """
    require(groups >= 1, "with_group_norm.groups", groups, "give 1 or more")
    parts = module.named_modules(remove_duplicate=False)
    layers = {path: part for path, part in parts if isinstance(part, _BatchNorm)}
    hint = "it has no BatchNorm layer; take with_group_norm out"
    require(bool(layers) and "" not in layers, "with_group_norm.module", type(module).__name__, hint)
    group_norm_of: dict[nn.Module, nn.GroupNorm] = {}
    for path, layer in layers.items():
        channels = layer.num_features
        # a value that is alone in its group would always become 0
        single_values = isinstance(layer, nn.BatchNorm1d) and channels == groups
        divisor = "a smaller number" if single_values else "a number"
        hint = f"{path} has {channels} channels; give {divisor} that divides them"
        require(channels % groups == 0 and not single_values, "with_group_norm.groups", groups, hint)
        group_norm_of[layer] = nn.GroupNorm(groups, channels, layer.eps, layer.affine).train(layer.training)
        if layer.affine:
            group_norm_of[layer].weight, group_norm_of[layer].bias = layer.weight, layer.bias
    for path, layer in layers.items():
        module.set_submodule(path, group_norm_of[layer])
    return module
