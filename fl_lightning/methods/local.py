"""Local: nothing is exchanged, the reference row below every federated method."""

from __future__ import annotations

from fl_lightning.method import Method


class Local(Method):
    """Every client trains its own model from the common initial weights and never hears of the others.

    Metrics are means over the models of the clients that have trained, on the same test data.
    """

    def exchanges(self, key: str) -> bool:
        return False
