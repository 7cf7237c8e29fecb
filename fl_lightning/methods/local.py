"""Local: clients train alone and exchange nothing, the baseline without federation."""

from __future__ import annotations

from fl_lightning.core.method import Method


class Local(Method):
    """Every client trains a separate model from the common initial weights, without exchange.

    Metrics are means over the models of the clients that have trained, on the same test data.
    """

    has_personal_models = True

    def exchanges(self, key: str) -> bool:
        return False
