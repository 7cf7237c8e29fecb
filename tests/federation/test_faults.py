"""A lost server, a lost answer, bad updates, a second claim and another config."""

import copy
import math
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from helpers.errors import assert_names, refused, warned
from helpers.runs import assert_same_bits
from helpers.sites import (
    ROUNDS,
    SITES,
    SMALL,
    Here,
    Sockets,
    alone,
    app_of,
    message_of,
    run_here,
    serve,
    sites_here,
    until,
    worker,
    workers,
)
from helpers.tiny import variant

from fl_lightning.federation import site
from fl_lightning.federation.data import Sites
from fl_lightning.federation.framing import as_records, client_app, encoded_error, of_records
from fl_lightning.federation.serialization import decoded, encoded
from fl_lightning.federation.server import FlowerBackend
from fl_lightning.utilities.errors import ClientError

SCAFFOLD = copy.deepcopy(SMALL) | {"method": [{"class_path": "SCAFFOLD"}]}
SKIPPING = copy.deepcopy(SCAFFOLD)
SKIPPING["trainer"]["on_client_error"] = "skip"

pytestmark = pytest.mark.usefixtures("one_parser", "undrawn")


class Breaking(Here):
    """Fails after some number of messages."""

    def __init__(self, sites, last):
        super().__init__(sites)
        self.last = last

    def send(self, node, packet):
        if self.number >= self.last:
            raise RuntimeError("the server is lost")
        return super().send(node, packet)


def test_a_run_whose_server_is_lost_goes_on_to_the_same_bits(tmp_path):
    app = app_of(tmp_path, SCAFFOLD)
    with sites_here(app, tmp_path) as sites:
        with pytest.raises(RuntimeError, match="the server is lost"):
            # all join, train and evaluate in round 0; in round 1 only one receives a message
            serve(app, Breaking(sites, 3 * SITES + 1))
        ours = serve(app, Here(sites), "--ckpt_path", "last")
    assert [row["round"] for row in ours.history] == [0, 1, 2]
    assert_same_bits(ours.server.state, alone(tmp_path, SCAFFOLD).server.state)


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


class Bad(Here):
    """Alters the updates of the sites in several ways."""

    altered = {  # noqa: RUF012
        0: with_first(lambda value: value * torch.nan),
        1: undeclared,
        2: with_first(lambda value: value + 1e30),
    }


def test_bad_updates_and_a_second_claim_are_refused_by_name(tmp_path):
    few = pytest.raises(ClientError, match="min_clients")
    with pytest.warns(UserWarning, match="site") as warned, few:
        run_here(tmp_path, SKIPPING, lambda sites: Bad([*sites, sites[0]]))
    texts = [str(warning.message) for warning in warned]
    assert any("both claim to be site 'site-0'" in text for text in texts)
    for name, why in (
        ("site-0", "holds nan"),
        ("site-1", "undeclared entry buffers/images"),
        ("site-2", "holds 1e+30"),
    ):
        assert any(f"(site {name}), round 0" in text and why in text for text in texts)


def without_payload(packet):
    answer = decoded(packet)
    del answer["update"]["payload"]
    return encoded(answer)


def test_a_site_that_leaves_out_a_part_of_its_update_fails_alone(tmp_path):
    with warned("site-0", "payload"):
        trainer, _ = run_here(tmp_path, SKIPPING, variant(Here, altered={0: without_payload}))
    assert [row["clients"] for row in trainer.history] == [SITES - 1] * ROUNDS


def test_a_site_whose_labels_stand_for_other_classes_is_refused_by_name():
    def answer(name, *classes):
        facts = {"num_examples": 4, "batches": 1, "evaluation": {}, "class_names": classes}
        return {"name": name, "facts": facts, "declared": []}

    clients = FlowerBackend(Sites(["oslo", "lima", "rome"]), None, "", print)
    clients._admit(1, answer("oslo", "benign", "malignant"), {1, 2})
    clients._admit(3, answer("rome"), {1, 2})
    with refused("site 'lima'", "malignant, benign", "'oslo'", "data.classes"):
        clients._admit(2, answer("lima", "malignant", "benign"), {1, 2})
    assert clients.nodes == {0: 1, 2: 3}
    endless = answer("lima")
    endless["facts"]["num_examples"] = math.inf
    with refused("malformed"):
        clients._admit(2, endless, {1, 2})


def test_an_update_that_did_not_arrive_was_never_remembered(tmp_path):
    app = app_of(tmp_path, SKIPPING)
    with sites_here(app, tmp_path) as sites:
        link = Here(sites)
        link.lost = {2}
        trainer = serve(app, link)
    assert [row["clients"] for row in trainer.history] == [2, 3, 3]
    asked = [(node, message_of(packet)) for node, packet in link.sent]
    trained = [(node, message) for node, message in asked if message.get("shared", {}).get("kind") == "train"]
    memories = {k: [message["own"]["memory"] for node, message in trained if node == k] for k in range(SITES)}
    assert memories == {0: [None, 0, 1], 1: [None, 0, 1], 2: [None, None, 1]}


@pytest.mark.parametrize("answer", ["lost: on the way", encoded_error("failed", "no worker of the site answers")])
def test_a_node_whose_first_answer_is_lost_or_whose_worker_is_not_there_yet_is_asked_again(tmp_path, answer):
    config = copy.deepcopy(SMALL)
    config["trainer"]["max_rounds"] = 1

    class Late(Here):
        def receive(self, messages):
            return {number: answer if number == "1" else own for number, own in super().receive(messages).items()}

    with pytest.warns(UserWarning, match="node 0"):
        trainer, _ = run_here(tmp_path, config, Late)
    assert [row["clients"] for row in trainer.history] == [SITES]


def test_a_node_without_the_socket_of_a_worker_is_refused_with_the_remedy(monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.setattr("flwr.app.Message", lambda content, reply_to: content)
    metadata = SimpleNamespace(message_type="train")
    message = SimpleNamespace(content=as_records(encoded({"kind": "join"})), metadata=metadata)
    answer = client_app()(message, SimpleNamespace(node_config={}))
    clients = FlowerBackend(Sites(["oslo"]), None, "", print)
    with refused("node 7 refuses the run", "--node-config"):
        clients._admit(7, decoded(of_records(answer)), {7})


def test_a_site_of_another_config_refuses_the_run_with_the_differing_keys(tmp_path):
    app = app_of(tmp_path, SMALL)
    with sites_here(app, tmp_path, 1, "--trainer.local_epochs", 7) as sites, refused("trainer.local_epochs", "1", "7"):
        serve(app, Here(sites))


def test_a_site_of_another_version_refuses_the_run(tmp_path, monkeypatch):
    app = app_of(tmp_path, SMALL)
    with sites_here(app, tmp_path, 1) as sites, refused("fl_lightning", "'0.0.1'"):
        monkeypatch.setattr("fl_lightning.federation.serialization.__version__", "0.0.1")
        serve(app, Here(sites))


def test_a_worker_that_is_killed_in_a_visit_is_given_the_message_again_and_the_bits_are_those_of_fit(
    tmp_path, monkeypatch
):
    """Over sockets, with workers in processes. The client's memory has not advanced by the first attempt."""
    app, paths, begun = app_of(tmp_path, SCAFFOLD), [tmp_path / f"{k}.sock" for k in range(SITES)], tmp_path / "begun"
    train = site.Site.train

    def hanging(self, shared, own):
        answer = train(self, shared, own)
        if self.name == "site-1" and shared["round"] == 1 and not begun.exists():
            begun.touch()  # its visit is over, and its memory written
            threading.Event().wait()
        return answer

    monkeypatch.setattr(site.Site, "train", hanging)
    with ExitStack() as stack:
        first = stack.enter_context(workers(app, tmp_path))

        def kill():
            until(begun.exists)
            first[1].kill()
            first[1].join()
            stack.enter_context(worker(app, 1, tmp_path))

        killing = threading.Thread(target=kill)
        killing.start()
        ours = serve(app, Sockets(paths))
        killing.join()
    assert_same_bits(ours.server.state, alone(tmp_path, SCAFFOLD).server.state)
    said = (tmp_path / "0.log").read_text()
    assert_names(said, "site-0", str(tmp_path / "0.sock"), f"round 0/{ROUNDS - 1}", f"round {ROUNDS - 1}/{ROUNDS - 1}")


class Slow(Here):
    """Node 1 answers the messages of round 0 when round 2 begins; node 2 joins in round 1."""

    def nodes(self):
        rounds = [message_of(packet).get("shared", {}).get("round", 0) for _, packet in self.sent]
        self.absent = set() if max(rounds, default=0) else {2}
        return super().nodes()

    def receive(self, messages):
        answers = super().receive(messages)
        for number in [*answers]:
            node, packet = self.sent[int(number) - 1]
            if node == 1 and message_of(packet).get("shared", {}).get("round") == 0 and not self.seen_of_round(2):
                self.answers[number] = answers.pop(number)
        return answers

    def seen_of_round(self, round_):
        return any(message_of(packet).get("shared", {}).get("round") == round_ for _, packet in self.sent)


def test_a_late_site_is_asked_nothing_more_until_it_has_answered_and_a_new_one_joins(tmp_path):
    config = copy.deepcopy(SKIPPING)
    config["trainer"]["max_rounds"] = 4
    with warned("site-2"), pytest.warns(UserWarning, match="no answer within 0.5 s"):
        trainer, link = run_here(tmp_path, config, Slow, deadline=0.5, join_within=0.5)
    asked = [(message_of(packet).get("shared", {}), node) for node, packet in link.sent]
    trained = [
        sorted(node for message, node in asked if (message.get("kind"), message.get("round")) == ("train", t))
        for t in range(4)
    ]
    assert trained == [[0, 1], [0], [0, 2], [0, 1, 2]]
    assert [row["clients"] for row in trainer.history] == [1, 1, 2, 3]
