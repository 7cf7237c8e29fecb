"""Each field of an update reaches the server, through sums and through a message."""

from dataclasses import fields
from types import SimpleNamespace

import torch

from fl_lightning.core.reduced import Reduced
from fl_lightning.core.update import Totals, Update
from fl_lightning.core.weighted import Weighted
from fl_lightning.engine.update_codec import PARTS, decode_update, encode_update

FIELDS = {
    "delta": {"w": torch.tensor([1.5, 2.0], dtype=torch.float64)},
    "others": {"mean": torch.tensor(3.0)},
    "weight": 4.0,
    "payload": {"mine": {"norm": Weighted.of(5.0), "layers": {"first": Weighted.of(torch.ones(2))}}},
    "logged": {"loss": Reduced("mean", 6.0, 2.0)},
    "drift": 7.0,
    "frozen_changes": {"head": torch.tensor([8.0], dtype=torch.float64)},
    "num_bytes": 9,
}


def test_a_message_has_each_field_of_an_update():
    # the bound of the changes is found again by the sum, and the rest is for the engine of the worker
    assert [field.name for field in fields(Update)] == [*FIELDS, "bound", "facts", "metric_states"]
    client = SimpleNamespace(methods=SimpleNamespace(overriding=lambda hook: [hook]))
    message = encode_update(client, Update(**FIELDS))
    assert message.keys() <= PARTS
    again = decode_update(message, {})
    for name, value in FIELDS.items():
        torch.testing.assert_close(getattr(again, name), value) if name in ("delta", "others", "frozen") else None
        assert name in ("delta", "others", "frozen", "payload") or getattr(again, name) == value
    assert again.payload["mine"]["layers"]["first"].total.tolist() == [1, 1]


def test_the_totals_of_one_update_are_its_fields():
    totals = Totals()
    totals.add(Update(**FIELDS))
    means = totals.close()
    for name in FIELDS.keys() - {"weight", "payload", "logged"}:
        torch.testing.assert_close(getattr(means, name), FIELDS[name], check_dtype=False)
    assert means.logged == {"loss": 3.0} and means.payload["mine"]["layers"]["first"].mean().tolist() == [1, 1]
