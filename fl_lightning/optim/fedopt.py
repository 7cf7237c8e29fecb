r"""Server optimizers: Hsu et al., 2019 (FedAvgM), and Reddi et al., Adaptive Federated Optimization, ICLR 2021.

Paper: https://arxiv.org/abs/1909.06335 (FedAvgM)
Paper: https://arxiv.org/abs/2003.00295 (FedAdagrad, FedAdam, FedYogi)
Code: https://github.com/google-research/federated/tree/master/optimization (FedAdagrad, FedAdam, FedYogi)

The server passes the negative mean change of the clients as gradient g, so that :math:`\Delta = -g` is the mean change.
PyTorch's own Adam and Adagrad are not the paper's: they differ in bias correction and in the place and size of the
small constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.utilities.errors import require

BiasCorrection = Literal["none", "adam", "flower"]


class FedAvgM(Optimizer):
    r"""Server momentum, :math:`v \leftarrow \beta v + (1 - \delta) \Delta,\; w \leftarrow w + \eta v` from v = 0.

    ``dampening=0`` is the paper's form. ``dampening=momentum`` is the exponential moving average in the code of MOON
    and of FedDecorr. ``torch.optim.SGD`` differs: it does not dampen its first step.

    Args:
        params: the parameters to optimize.
        lr: :math:`\eta`, at least 0.
        momentum: :math:`\beta \in [0, 1)`; 0 with ``lr=1`` and ``dampening=0`` gives FedAvg.
        dampening: :math:`\delta \in [0, 1]`.

    Raises:
        UsageError: an argument is outside its range.

    Source: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification,
    2019, section 3.
    """

    def __init__(self, params: Iterable, lr: float = 1.0, momentum: float = 0.9, dampening: float = 0.0) -> None:
        require(lr >= 0, "FedAvgM.lr", lr, "give 0 or more")
        require(0 <= momentum < 1, "FedAvgM.momentum", momentum, "use a number in [0, 1)")
        require(0 <= dampening <= 1, "FedAvgM.dampening", dampening, "use a number in [0, 1]")
        super().__init__(params, {"lr": lr, "momentum": momentum, "dampening": dampening})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group, p, gradient in parameters_with_gradients(self):
            v = self.state[p].setdefault("momentum", torch.zeros_like(p))
            v.mul_(group["momentum"]).sub_(gradient, alpha=1 - group["dampening"])
            p.add_(v, alpha=group["lr"])


class _Adaptive(Optimizer):
    r"""The common part of the adaptive optimizers, which differ in how they accumulate v.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) \Delta` and :math:`w \leftarrow w + \eta\, m / (\sqrt v + \tau)`.
    """

    def __init__(self, params: Iterable, lr: float, tau: float, initial_v: float, **defaults: Any) -> None:
        name = type(self).__name__
        require(lr >= 0, f"{name}.lr", lr, "give 0 or more")
        require(tau > 0, f"{name}.tau", tau, "use a number above 0")
        require(initial_v >= 0, f"{name}.initial_v", initial_v, "give 0 or more")
        for key in ("beta1", "beta2"):
            require(0 <= defaults.get(key, 0) < 1, f"{name}.{key}", defaults.get(key), "use a number in [0, 1)")
        super().__init__(params, {"lr": lr, "tau": tau, "initial_v": initial_v, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group, p, gradient in parameters_with_gradients(self):
            state = self.state[p]
            if not state:
                state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.full_like(p, group["initial_v"])}
            state["step"] += 1
            state["m"].mul_(group["beta1"]).sub_(gradient, alpha=1 - group["beta1"])
            self.accumulate(state["v"], gradient.square(), group)
            rate, kind = group["lr"], group.get("bias_correction", "none")
            if kind != "none":
                power = state["step"] + (kind == "flower")
                rate *= float((1 - group["beta2"] ** power) ** 0.5 / (1 - group["beta1"] ** power))
            p.addcdiv_(state["m"], state["v"].sqrt().add_(group["tau"]), value=rate)

    def accumulate(self, v: Tensor, square: Tensor, group: dict[str, Any]) -> None:
        """Update v by the squared change, in place."""
        raise NotImplementedError


class FedAdagrad(_Adaptive):
    r"""Adagrad on the server: :math:`v \leftarrow v + \Delta^2`, :math:`w \leftarrow w + \eta\, m / (\sqrt v + \tau)`.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) \Delta` from m = 0.

    Args:
        params: the parameters to optimize.
        lr: :math:`\eta`, at least 0.
        beta1: :math:`\beta_1 \in [0, 1)`; 0 in the paper, 0.9 in FedDecorr's code.
        tau: :math:`\tau > 0`, the degree of adaptivity; smaller values adapt more.
        initial_v: v before the first round, at least 0; at least :math:`\tau^2` in the paper, 0 in most code.

    Raises:
        UsageError: an argument is outside its range.

    Source: Reddi et al., Algorithm 2.
    """

    def __init__(
        self, params: Iterable, lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3, initial_v: float = 0.0
    ) -> None:
        super().__init__(params, lr, tau, initial_v, beta1=beta1)

    def accumulate(self, v: Tensor, square: Tensor, group: dict[str, Any]) -> None:
        v.add_(square)


class FedAdam(_Adaptive):
    r"""Adam on the server: :math:`v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2`, in all else as :class:`FedAdagrad`.

    Args:
        params: the parameters to optimize.
        lr: :math:`\eta`, at least 0.
        beta1: :math:`\beta_1 \in [0, 1)` of m.
        beta2: :math:`\beta_2 \in [0, 1)` of v; 0.99 in the paper, 0.999 in FL-bench.
        tau: :math:`\tau > 0`, the degree of adaptivity; smaller values adapt more.
        initial_v: v before the first round, at least 0; at least :math:`\tau^2` in the paper, 0 in most code.
        bias_correction: factor of :math:`\eta`: 1, as in the paper (``none``);
            :math:`\sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`, where t counts the steps from 1 (``adam``) or, as in
            Flower, from 2 (``flower``).

    Raises:
        UsageError: an argument is outside its range.

    Source: Reddi et al., Algorithm 2.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        initial_v: float = 0.0,
        bias_correction: BiasCorrection = "none",
    ) -> None:
        super().__init__(params, lr, tau, initial_v, beta1=beta1, beta2=beta2, bias_correction=bias_correction)

    def accumulate(self, v: Tensor, square: Tensor, group: dict[str, Any]) -> None:
        v.mul_(group["beta2"]).add_(square, alpha=1 - group["beta2"])


class FedYogi(_Adaptive):
    r"""Yogi on the server: :math:`v \leftarrow v - (1 - \beta_2) \Delta^2 \mathrm{sign}(v - \Delta^2)`.

    In all else as :class:`FedAdam`.

    Args:
        params: the parameters to optimize.
        lr: :math:`\eta`, at least 0.
        beta1: :math:`\beta_1 \in [0, 1)` of m.
        beta2: :math:`\beta_2 \in [0, 1)` of v.
        tau: :math:`\tau > 0`, the degree of adaptivity; smaller values adapt more.
        initial_v: v before the first round, at least 0; 1e-6 in TensorFlow Federated.
        bias_correction: as in :class:`FedAdam`.

    Raises:
        UsageError: an argument is outside its range.

    Source: Reddi et al., Algorithm 2.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        initial_v: float = 0.0,
        bias_correction: BiasCorrection = "none",
    ) -> None:
        super().__init__(params, lr, tau, initial_v, beta1=beta1, beta2=beta2, bias_correction=bias_correction)

    def accumulate(self, v: Tensor, square: Tensor, group: dict[str, Any]) -> None:
        v.sub_(square * torch.sign(v - square), alpha=1 - group["beta2"])


def parameters_with_gradients(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], Tensor, Tensor]]:
    """Group, parameter and gradient of every parameter that has a gradient."""
    parameters = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    return [(group, p, p.grad) for group, p in parameters if p.grad is not None]
