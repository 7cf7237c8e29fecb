"""Local: clients train alone and exchange nothing, the baseline without federation."""

from __future__ import annotations

from fl_lightning.method import Method


class Local(Method):
    """Every client trains a model of its own, from the common initial weights, without exchange with the others.

    Metrics are means over the models of the clients that have trained, on the same test data.
    """

    def exchanges(self, key: str) -> bool:
        return False
