"""A run through Flower itself, with TLS and keys on this machine's own address, has the bits of ``fit``."""

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr")

from helpers.errors import missing
from helpers.flower import Flower
from helpers.runs import assert_same_bits
from helpers.sites import SMALL, Here, alone, app_of, message_of, numbers_of, run_here, workers

from fl_lightning.federation.framing import BadMessageError, as_records, of_records
from fl_lightning.federation.serialization import encoded
from fl_lightning.federation.server import FlowerLink
from fl_lightning.storage.checkpoint import read, unpack_rows

SITES, ROUNDS = 2, 2


@pytest.mark.thorough
def test_a_run_through_flower_has_the_bits_of_fit_and_its_server_cannot_read_data(tmp_path):
    config = copy.deepcopy(SMALL) | {"method": ["SCAFFOLD"]}
    config["data"]["init_args"]["num_clients"], config["trainer"]["max_rounds"] = SITES, ROUNDS
    app = app_of(tmp_path, config)
    # neither the server nor the relays of the sites can load the data set
    blocked = tmp_path / "blocked" / "sklearn"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('no data here')\n")
    with workers(app, tmp_path, SITES), Flower(tmp_path / "flower", blocked.parent) as flower:
        for k in range(SITES):
            flower.register(f"node-{k}")
            flower.start_node(f"node-{k}", f'socket="{tmp_path / f"{k}.sock"}"')
        said = flower.run(app, root=tmp_path / "server")
    found = [*(tmp_path / "server").rglob("last.ckpt")]
    assert found, said
    ours, trainer = read(found[0]), alone(tmp_path, config)
    assert_same_bits(ours["state_dict"], trainer.server.state)
    rows = unpack_rows(ours["history"])
    assert len(rows) == ROUNDS and numbers_of(rows) == numbers_of(trainer.history)


def test_a_message_comes_out_of_flowers_records_as_it_went_in():
    packet = encoded({"x": torch.arange(3), "y": torch.ones(2, dtype=torch.bfloat16)})
    records = as_records(packet)
    assert of_records(records) == packet
    with pytest.raises(BadMessageError, match="at most 10 are accepted"):
        of_records(records, limit=10)
    records["more"] = records["message"]
    with pytest.raises(BadMessageError, match="do not hold exactly one message"):
        of_records(records)


class Grid(Here):
    """Flower's grid before the workers of sites; it refuses a message to node 1 and one to node 2."""

    def get_node_ids(self):
        return self.nodes()

    def push_messages(self, messages):
        (message,) = messages
        node, packet = message.metadata.dst_node_id, of_records(message.content)
        shared = message_of(packet).get("shared", {})
        if (shared.get("kind"), shared.get("round"), node) == ("train", 0, 1):
            raise ConnectionError("the session has expired")
        return [None if shared.get("round") == 1 and node == 2 else self.send(node, packet)]

    def pull_messages(self, numbers):
        for number, answer in self.receive(numbers).items():
            metadata = SimpleNamespace(reply_to_message_id=number)
            yield SimpleNamespace(metadata=metadata, has_error=lambda: False, content=as_records(answer))


def message(content, dst_node_id, message_type):
    """A message of Flower's outside of its processes, which alone can make one."""
    return SimpleNamespace(content=content, metadata=SimpleNamespace(dst_node_id=dst_node_id))


def test_a_message_that_flower_does_not_take_is_a_site_that_is_lost_in_this_round(tmp_path, monkeypatch):
    monkeypatch.setattr("flwr.app.Message", message)
    config = copy.deepcopy(SMALL)
    config["trainer"]["on_client_error"] = "skip"
    with pytest.warns(UserWarning, match="lost") as warned:
        trainer, _ = run_here(tmp_path, config, lambda sites: FlowerLink(Grid(sites)))
    assert [row["clients"] for row in trainer.history] == [2, 2, 3]
    for words in (("site-1", "round 0", "ConnectionError"), ("site-2", "round 1", "SuperLink")):
        assert any(missing(str(warning.message), *words) is None for warning in warned)
