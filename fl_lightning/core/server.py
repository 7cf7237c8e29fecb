"""The server: keeper of the global state, and the optimizer that moves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from fl_lightning.core.clock import MICROSECONDS
from fl_lightning.core.lazy_copies import lazy_copy, share_memory
from fl_lightning.core.state import State, first_not_finite, is_frozen, select
from fl_lightning.utilities.errors import ClientError, require

Scope = Literal["parameters", "all_float"]


class Server:
    r"""Takes the mean change of a cohort as the negative gradient of an ordinary optimizer.

    With ``SGD(lr=1)``, the default, :math:`w^{t+1} = w^t + \sum_k p_k (y_k - w^t) = \sum_k p_k y_k`: FedAvg. Parameters
    are stepped in float64 and rounded to their own dtype after each step, so that the mean is rounded once. Buffers and
    frozen parameters bypass the optimizer, except floating-point ones if ``scope`` is ``all_float``: they take the
    plain mean, and integers its whole part in their dtype.

    Args:
        state: the initial global state by name; frozen parameters are shared with it until one of them changes.
        trainable: names of the parameters that clients train.
        optimizer: builds the server optimizer from parameters; None is ``SGD(lr=1)``.
        num_clients: N.
        num_examples: training examples of all N clients together.
        scope: entries that the optimizer moves: the ``parameters``, or ``all_float`` entries of the state, as in some
            reference codes; running variances may then become negative.
        seed: base seed of the run, for random draws of methods.
        label_counts: number of training examples of each class at each client, ``(N, C)``; None where they are unknown,
            as without labels and at real sites.

    Attributes:
        state: the global state w^t that clients receive.
        optimized: names of the entries of it that the optimizer moves.
        travelling: names of the entries of it that each client of a cohort receives in each round.
        round: t, from 0.
        microseconds: simulated time from the start of the run to the end of the last round; 0 without
            ``trainer.clock``.
        cohort: ids of the clients of this round.
        population: number of clients of a uniform draw; 0 for other samplers.
        cohort_size: number of clients of a round, as far as the trainer's arguments say.
        at_sites: whether its clients are real sites, which all know the run's seed.
        metrics: values for the round's log from server hooks, by tag.
        known: of each frozen parameter that has changed since the start of the run, the clients that its present value
            has been sent to, by name.
    """

    def __init__(
        self,
        state: State,
        trainable: list[str],
        optimizer: Callable[[Iterable], Optimizer] | None = None,
        num_clients: int = 1,
        num_examples: int = 0,
        scope: Scope = "parameters",
        seed: int = 0,
        label_counts: torch.Tensor | None = None,
    ) -> None:
        self.state = {}
        for name, value in state.items():
            self.state[name] = lazy_copy(value) if is_frozen(value) else value.detach().clone()
        self.travelling = list(self.state)
        self.num_clients, self.num_examples, self.seed = num_clients, num_examples, seed
        self.label_counts = label_counts
        self.round, self.microseconds = 0, 0
        self.cohort: list[int] = []
        self.population, self.cohort_size, self.at_sites = 0, num_clients, False
        self.metrics: dict[str, float] = {}
        self.frozen = {name for name, value in state.items() if is_frozen(value)}
        self.known: dict[str, set[int]] = {}
        trained = set(trainable)
        if scope == "all_float":
            trained |= {name for name, value in state.items() if value.is_floating_point()}
        moved = [name for name in state if name in trained]
        self.optimized = dict.fromkeys(moved)
        self._parameters = {name: nn.Parameter(self.state[name].double()) for name in moved}
        build = optimizer or (lambda parameters: SGD(parameters, lr=1.0))
        self.optimizer = build(list(self._parameters.values())) if moved else None
        self._empty_parameters()

    @property
    def time(self) -> float:
        """Simulated seconds until the end of the last round."""
        return self.microseconds / MICROSECONDS

    def zeros(self) -> State:
        """Zeros in the shapes of the entries :attr:`optimized`, in float64, for a method's server value."""
        make = partial(torch.zeros_like, dtype=torch.float64)
        return {name: make(self.state[name]) for name in self.optimized}

    def begin_round(self, round_: int, cohort: list[int]) -> None:
        """Set the round that begins, and its cohort."""
        self.round, self.cohort, self.metrics = round_, cohort, {}

    def assign(self, state: State) -> None:
        """Overwrite entries of the global state. A frozen parameter then travels once to each client that trains.

        Raises:
            UsageError: the state has no such entry, or one of another shape.
        """
        for name, value in state.items():
            entry, shape = self.state.get(name), tuple(value.shape)
            hint = "the global state has no such entry" if entry is None else f"its shape is {tuple(entry.shape)}"
            require(entry is not None and entry.shape == value.shape, f"server.assign: {name}", shape, hint)
            if not share_memory(self.state[name], value):
                self.state[name].copy_(value)
                self._note_changes([name])

    def news_for(self, k: int) -> list[str]:
        """Names of the frozen parameters whose present values client ``k`` has not been sent."""
        return [name for name, clients in self.known.items() if k not in clients]

    def note_sent(self, clients: Iterable[int]) -> None:
        """Note that these clients have been sent all that is new."""
        for receivers in self.known.values():
            receivers.update(clients)

    def _note_changes(self, names: Iterable[str]) -> None:
        self.known |= {name: set() for name in names if name in self.frozen}

    @torch.no_grad()
    def share(self, live: State) -> None:
        """Set the frozen parameters of the module to those of the global state, and share their memory again."""
        for name, value in live.items():
            if is_frozen(value) and not share_memory(value, self.state[name]):
                value.copy_(self.state[name])
                self.state[name] = lazy_copy(value)

    def step(self, delta: State, means: State) -> None:
        """Move the parameters by the mean change ``delta``; set the other entries to their means ``means``.

        Raises:
            ClientError: the optimizer made a parameter nan or infinite.
        """
        optimized = [name for name in means if name in self.optimized]
        delta = delta | {name: means[name] - self.state[name] for name in optimized}
        if self.optimizer is not None and delta:
            for name, parameter in self._parameters.items():
                # each step starts from the sent values, also if the module is in float16 or bfloat16
                parameter.data = self.state[name].double()
                parameter.grad = -delta[name].double() if name in delta else None
            self.optimizer.step()
            for name in delta:
                self.state[name].copy_(self._parameters[name].data)
            self._empty_parameters()
        stepped = select(self.state, delta)
        zeros = {name: value.new_zeros(()) for name, value in stepped.items()}
        bad = first_not_finite(stepped, zeros)
        if bad is not None and self.optimizer is not None:
            kind, rate = type(self.optimizer).__name__, self.optimizer.param_groups[0].get("lr")
            raise ClientError(
                f"round {self.round}: trainer.server_optimizer {kind} with lr {rate} made {bad} nan or infinite; "
                "use a smaller lr"
            )
        for name in means.keys() - delta.keys():
            self.state[name].copy_(means[name])
        self._note_changes(means)

    def _empty_parameters(self) -> None:
        """Free the memory of the optimizer's parameters, which are the state in float64 during a step."""
        for parameter in self._parameters.values():
            parameter.data, parameter.grad = torch.empty(0, dtype=torch.float64, device=parameter.device), None

    def state_dict(self) -> dict[str, Any]:
        """The global state, the server optimizer's state and the number of the last round."""
        optimizer = self.optimizer.state_dict() if self.optimizer else {}
        receivers = {name: sorted(clients) for name, clients in self.known.items()}
        progress = {"round": self.round, "microseconds": self.microseconds}
        return {"state": self.state, "optimizer": optimizer, "known": receivers, **progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            KeyError: the state belongs to another model.
        """
        if names := sorted(state["state"].keys() ^ self.state.keys()):
            raise KeyError(f"it and the model have different entries, such as {names[0]}")
        self.assign(state["state"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.round, self.microseconds = state["round"], state["microseconds"]
        self.known = {name: {*clients} for name, clients in state["known"].items()}
