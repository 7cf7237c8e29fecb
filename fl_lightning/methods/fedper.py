"""FedPer: Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

Paper: https://arxiv.org/abs/1912.00818

The first layers, the body, are averaged. The last layers, the head, stay with each client. All are trained together.
"""

from __future__ import annotations

import re

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.state import is_frozen
from fl_lightning.methods.freeze import Freeze
from fl_lightning.utilities.errors import require


class FedPer(Method):
    """Keeps the last layers with each client and averages the others.

    Normalisation and its statistics belong to the layer before them; ``trainer.buffers=local`` keeps all statistics
    with the clients.

    A client that has trained is evaluated with the averaged body and its own head of its last visit, with which it
    would begin the next one (evaluation point R); metrics are means over these models on the same test data. A new
    client starts with the initial head.

    Args:
        layers: number m of last layers that stay with the client, at least 0. 1 is the module that the tap ``logits``
            is bound to. A further layer is a submodule with a trained weight of two or more dimensions, or with a LoRA
            adapter, in the order of the state dict, with the entries that follow it. 0 gives FedAvg, all layers give
            Local. Frozen parameters are shared by all clients.

    Raises:
        UsageError: ``layers`` is below 0 or above the number of layers, or the tap ``logits`` has no trained parameter
            or all of them. Freeze, or another method that gives each client its own model, is in the list.
    """

    requires = ("logits",)
    has_personal_models = True

    def __init__(self, layers: int = 1) -> None:
        require(layers >= 0, f"{type(self).__name__}.layers", layers, "use 0 or more")
        self.layers = layers

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        methods = client.methods.methods
        freezing = [type(method).__name__ for method in methods if isinstance(method, Freeze)]
        require(not freezing, f"{type(self).__name__} beside method", freezing, "it freezes the head; keep one of them")
        self.last = last_layers(client, self.layers, type(self).__name__)

    def exchanges(self, key: str) -> bool:
        return key not in self.last


def last_layers(client: ClientContext, number: int, who: str) -> set[str]:
    """Return the entries of the last ``number`` layers, as :class:`FedPer` counts them, for ``who``."""
    path, trained = client.tap_paths["logits"], {*client.trainable}
    names = [name for name, value in client.live.items() if not is_frozen(value)]
    names = [name for name in names if name not in client.of_methods]
    head = [name for name in names if name.startswith(f"{path}.")]
    body = [name for name in names if not name.startswith(f"{path}.")]
    hint = "bind it to the last layer, which must have some of the trained parameters, but not all"
    require(0 < len(trained.intersection(head)) < len(trained), f"{who} with the tap logits", path, hint)
    starts: dict[str, int] = {}  # index of a layer's first entry, by the path of the layer
    for index, name in enumerate(body):
        if name in trained and client.live[name].ndim >= 2:
            starts.setdefault(re.split(r"\.lora_|\.[^.]*$", name)[0], index)
    hint = f"the model has {len(starts) + 1} layers; use at most {len(starts) + 1}"
    require(number <= len(starts) + 1, f"{who}.layers", number, hint)
    if number == 0:
        return set()
    # entries before the first layer belong to it
    start = [0, *sorted(starts.values())[1:], len(body)][-number]
    return {*head, *body[start:]}
