"""Methods that compute gradients elsewhere, a module with dropout, and a scaler of gradients without a GPU."""

import torch
from lightning.fabric.plugins import MixedPrecision
from torch import nn

from fl_lightning import Method
from helpers.tiny import TinyModule


class Ahead(Method):
    """Steps with the gradients where the step would lead, and keeps statistics of a personal model."""

    replaces_gradients = True
    requires = ("logits",)

    def on_client_start(self, client):
        client.scratch(self).own = {name: value.clone() for name, value in client.received.items()}

    def on_before_optimizer_step(self, client, optimizer):
        own = client.scratch(self).own
        for name, gradient in client.gradients(own, loss=lambda step: step.taps["logits"].square().mean()).items():
            own[name] = own[name] - 0.05 * gradient
        found = client.gradients({name: client.live[name] - 0.1 * client.live[name].grad for name in client.trainable})
        client.log("ahead", found.loss)
        for name, gradient in found.items():
            client.live[name].grad = gradient

    def on_client_end(self, client):
        client.memory(self)["own"] = dict(client.scratch(self).own)


class InStep(Method):
    """Reads a batch in each step."""

    replaces_gradients = True

    def on_before_optimizer_step(self, client, optimizer):
        for name, gradient in client.gradients(batch=next(client.batches("in step"))).items():
            client.live[name].grad = gradient


class Dropping(TinyModule):
    def build(self):
        self.body.append(nn.Dropout(0.3))


def scales_gradients(monkeypatch, init_scale):
    """Mixed precision has a scaler on the CPU, as 16-mixed has on a GPU."""
    plain = MixedPrecision.__init__

    def scaled(self, **kwargs):
        plain(self, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)

    monkeypatch.setattr(MixedPrecision, "__init__", scaled)
