r"""Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1.

Paper: https://arxiv.org/abs/2012.04221
Code: https://github.com/litian96/ditto

.. math:: v_k \leftarrow v_k - \eta \big(\nabla f_k(v_k) + \lambda (v_k - w^t)\big)

The global model w is trained by FedAvg. In addition, a client trains a personal model :math:`v_k` on the same batches.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.state import State, clone
from fl_lightning.utilities.errors import require


class Ditto(Method):
    r"""Trains a personal model next to the global one, and pulls it towards the received model :math:`w^t`.

    :math:`v_k` takes plain SGD steps, at the rate :math:`\eta` of the client's optimizer but without its momentum and
    weight decay and without clipping, and has its own running statistics. Entries that stay with the client, such as
    FedBN's, are not pulled. The update that a client sends does not depend on :math:`v_k`. A step computes two
    gradients.

    On its test data, a client uses :math:`v_k`, which changes only in its own visits (evaluation point R, which equals
    T). A new client uses the global model, with which :math:`v_k` begins; ``test/accuracy`` measures the global model.

    Args:
        lambda_: coefficient :math:`\lambda \ge 0`. With 0, :math:`v_k` is trained as by Local; for every value, the
            global model is FedAvg's.
        personal_loss: loss of :math:`v_k`: the module's ``own``, or ``full``, which includes the other methods'
            penalties and their changes of the logits.

    Raises:
        UsageError: ``lambda_`` is below 0, :math:`\eta \lambda \ge 2`, for which :math:`v_k` diverges, the optimizer
            has several rates or needs a closure, or gradients are accumulated.
    """

    needs_gradients = True
    memory_keys: ClassVar = {"model": "v_k: the personal parameters and their buffers, by name"}

    def __init__(self, lambda_: float = 1.0, personal_loss: Literal["own", "full"] = "own") -> None:
        require(lambda_ >= 0, "Ditto.lambda_", lambda_, "give 0 or more")
        self.lambda_, self.personal_loss = lambda_, personal_loss

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        check_pull("Ditto with the client optimizer's lr", rate_of("Ditto", optimizer), self.lambda_)

    def on_client_start(self, client: ClientContext) -> None:
        client.scratch(self).model = own_model(client, client.memory(self).get("model", {}))

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        v, rate = client.scratch(self).model, optimizer.param_groups[0]["lr"]
        for name, gradient in client.gradients(v, loss=self.personal_loss).items():
            if name in client.sent:
                gradient = gradient + self.lambda_ * (v[name] - client.received[name])
            v[name] = v[name].add(gradient, alpha=-rate)

    def on_client_end(self, client: ClientContext) -> None:
        client.memory(self)["model"] = clone(client.scratch(self).model)

    def personal_state(self, client: ClientContext) -> State | None:
        return client.memory(self).get("model")


def own_model(client: ClientContext, personal: State) -> State:
    """Return copies of the trained parameters and buffers of the received state, replaced by those of ``personal``."""
    frozen, entries = {*client.frozen}, client.received | personal
    return clone({name: value for name, value in entries.items() if name not in frozen})


def rate_of(who: str, optimizer: Optimizer) -> float:
    """Return the learning rate of all parameters; refuse several."""
    rates = sorted({group["lr"] for group in optimizer.param_groups})
    hint = "it uses one; give all parameters the same"
    require(len(rates) == 1, f"{who} with the client optimizer's lr", rates, hint)
    return rates[0]


def check_pull(who: str, rate: float, pull: float, key: str = "lambda_") -> None:
    """Refuse a rate at which a pull alone diverges; warn of one at which it overshoots."""
    hint = f"times {key}={pull:g} it is 2 or more, and the model diverges; lower one of them"
    require(rate * pull < 2, who, rate, hint)
    if rate * pull > 1:
        rank_zero_warn(f"{who}={rate:g}: times {key}={pull:g} it is above 1, so that a step overshoots its anchor")
