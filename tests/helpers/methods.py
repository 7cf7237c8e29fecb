"""Lists of methods with different payloads, memories and random draws, for properties of all methods."""

from typing import ClassVar

import torch

from fl_lightning import Method, ServerValue, Weighted, methods

NAMES = ("classifier.weight", "classifier.bias")


class Shifted(Method):
    """Client k starts from the global head plus k hundredths, and learns by which number."""

    def sent_state(self, server, k):
        return {name: server.state[name].double() + k / 100 for name in NAMES}

    def sent_extras(self, server, k):
        return {"shift": {"number": k / 100, "tensor": torch.tensor(k / 100)}}


class Chosen(Shifted):
    """Client k adds the number itself, where its loss is lower than with the number subtracted."""

    name = "chosen"
    memory_keys: ClassVar = {"sign": "what it chose"}
    signs = ServerValue[dict](lambda server: {})

    def sent_state(self, server, k):
        return None

    def start_state(self, client):
        shift, losses = client.extras(self)["shift"]["number"], {}
        (batch,) = client.batches("chosen", passes=1, fraction=0.01)
        for sign in (-1, 1):
            moved = {name: client.received[name] + sign * shift for name in NAMES}
            losses[sign] = float(client.gradients(at=dict(moved), batch=batch, loss="own").loss)
        client.scratch(self).sign = sign = min(losses, key=losses.get)
        return {name: client.received[name] + sign * shift for name in NAMES}

    def on_client_end(self, client):
        client.memory(self)["sign"] = client.scratch(self).sign
        return {"sign": {str(client.info.id): Weighted.of(float(client.scratch(self).sign))}}

    def on_round_end(self, server, payload):
        self.signs = {**self.signs, **{k: float(sign.mean()) for k, sign in payload["sign"].items()}}


ALONE = "SCAFFOLD MOON FedProto FedDisco FedNTD FedSAM FedAS FedBN LGFedAvg FedRoD Ditto Local"
METHODS = {
    "FedAvg": list,
    **{name: lambda name=name: [getattr(methods, name)()] for name in ALONE.split()},
    "FedDyn": lambda: [methods.FedDyn(reported="all")],
    "FedNova with FedDecorr": lambda: [methods.FedNova(), methods.FedDecorr()],
    "PerFedAvg": lambda: [methods.PerFedAvg(hessian=True)],
    "FedALA": lambda: [methods.FedALA(window=2)],
    "FedPer": lambda: [methods.FedPer(2)],
    "LogitAdjustment": lambda: [methods.LogitAdjustment(prior="global")],
    "LogitAdjustment post hoc": lambda: [methods.LogitAdjustment(when="post_hoc")],
    "APFL": lambda: [methods.APFL(adaptive=True)],
    "PFedMe": lambda: [methods.PFedMe(inner_steps=2)],
    "FedCKA": lambda: [methods.FedCKA(layers=1)],
    "Shifted, FedProx": lambda: [Shifted(), methods.FedProx(0.1)],
    "Shifted, SCAFFOLD, MOON": lambda: [methods.SCAFFOLD(), Shifted(), methods.MOON()],
    "Chosen, FedProx": lambda: [Chosen(), methods.FedProx(0.1)],
    "FedBN, Shifted": lambda: [methods.FedBN(), Shifted()],
    "IFCA": lambda: [methods.IFCA(2, 0.5)],
    "FedAMP, FedProx": lambda: [methods.FedAMP(weight=0), methods.FedProx(0.1)],
    "HetLoRA": lambda: [methods.HetLoRA([1, 4, 2])],
}
