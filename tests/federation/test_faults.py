"""A lost server, a lost answer, bad updates, a second claim and another config."""

import copy
from contextlib import ExitStack

import pytest
import torch
from helpers.sites import SITES, SMALL, Sockets, app_of, command, serve, worker, written

from fl_lightning.errors import ClientError, UsageError
from fl_lightning.federation.messages import decoded, encoded

SCAFFOLD = copy.deepcopy(SMALL) | {"method": [{"class_path": "SCAFFOLD"}]}
SKIPPING = copy.deepcopy(SCAFFOLD)
SKIPPING["trainer"]["on_client_error"] = "skip"


class Breaking(Sockets):
    """Breaks off after so many messages."""

    def __init__(self, paths, last):
        super().__init__(paths)
        self.last = last

    def send(self, node, packet, seconds):
        if self.number >= self.last:
            raise RuntimeError("the server is lost")
        return super().send(node, packet, seconds)


def test_a_run_whose_server_is_lost_goes_on_to_the_same_bits(tmp_path):
    app, paths = app_of(tmp_path, SCAFFOLD), [tmp_path / f"{k}.sock" for k in range(SITES)]
    with ExitStack() as stack:
        for k in range(SITES):
            stack.enter_context(worker(app, k, tmp_path))
        with pytest.raises(RuntimeError, match="the server is lost"):
            # they have joined, and trained and evaluated round 0; in round 1 one of them is asked to train
            serve(app, Breaking(paths, 3 * SITES + 1))
        ours = serve(app, Sockets(paths), "--ckpt_path", "last")
    config = written(tmp_path / "alone.yaml", SCAFFOLD)
    alone = command("fit", "--config", config, "--trainer.default_root_dir", tmp_path / "fit")
    assert [row["round"] for row in ours.history] == [0, 1, 2]
    for entry, value in alone.server.state.items():
        assert torch.equal(ours.server.state[entry], value), entry


def with_first(change):
    """An alteration of the first parameter of an update."""

    def altered(packet):
        answer = decoded(packet)
        parameters = answer["update"]["parameters"]
        name = next(iter(parameters))
        parameters[name] = change(parameters[name])
        return encoded(answer)

    return altered


def undeclared(packet):
    answer = decoded(packet)
    answer["update"]["buffers"]["images"] = torch.zeros(10**6)
    return encoded(answer)


def test_bad_updates_and_a_second_claim_are_refused_by_name(tmp_path):
    app, paths = app_of(tmp_path, SKIPPING), [tmp_path / f"{k}.sock" for k in range(SITES)]
    link = Sockets([*paths, paths[0]])
    link.altered = {
        0: with_first(lambda value: value * torch.nan),
        1: undeclared,
        2: with_first(lambda value: value + 1e30),
    }
    with ExitStack() as stack:
        for k in range(SITES):
            stack.enter_context(worker(app, k, tmp_path))
        with (
            pytest.warns(UserWarning, match="site") as warned,
            pytest.raises(ClientError, match="only 0 clients are left"),
        ):
            serve(app, link)
    texts = " ".join(str(warning.message) for warning in warned)
    assert "both claim to be site 'site-0'" in texts
    assert "(site site-0), round 0" in texts and "holds nan" in texts
    assert "undeclared entry buffers/images" in texts
    assert "(site site-2), round 0" in texts and "holds 1e+30" in texts


def test_an_update_that_did_not_arrive_was_never_remembered(tmp_path):
    app, paths = app_of(tmp_path, SKIPPING), [tmp_path / f"{k}.sock" for k in range(SITES)]
    link = Sockets(paths)
    link.lost = {2}
    with ExitStack() as stack:
        for k in range(SITES):
            stack.enter_context(worker(app, k, tmp_path))
        trainer = serve(app, link)
    assert [row["clients"] for row in trainer.history] == [2, 3, 3]
    asked = [(node, decoded(packet)) for node, packet in link.sent]
    trained = [(node, message) for node, message in asked if message.get("shared", {}).get("kind") == "train"]
    memories = {k: [message["own"]["memory"] for node, message in trained if node == k] for k in range(SITES)}
    assert memories == {0: [None, 0, 1], 1: [None, 0, 1], 2: [None, None, 1]}


def test_a_site_of_another_config_refuses_the_run_with_the_differing_keys(tmp_path):
    app = app_of(tmp_path, SMALL)
    with worker(app, 0, tmp_path, "--trainer.local_epochs", 7), pytest.raises(UsageError) as refused:
        serve(app, Sockets([tmp_path / "0.sock"]))
    assert "trainer.local_epochs: there 1, here 7" in str(refused.value)
