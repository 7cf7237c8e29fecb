"""The weights of layers with LoRA adapters, as a forward uses them."""

from fl_lightning.client.lora import lora_adapters


def effective(module, state):
    """W + s B A of each adapter, by its path, in the layout of W."""
    found = {}
    for adapter in lora_adapters(module):
        change = adapter.product(state)
        change = change.T if adapter.transposed else change
        found[adapter.path] = state[adapter.base].double() + adapter.scaling * change.reshape(state[adapter.base].shape)
    return found
