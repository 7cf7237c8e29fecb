"""A lost server, a lost answer, bad updates, a second claim and another config."""

import copy
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from helpers.errors import refused
from helpers.sites import SITES, SMALL, Sockets, alone, app_of, assert_same_bits, serve, until, worker, workers

from fl_lightning.errors import ClientError, UsageError
from fl_lightning.federation import site
from fl_lightning.federation.data import Sites
from fl_lightning.federation.messages import decoded, encoded
from fl_lightning.federation.relay import client_app
from fl_lightning.federation.server import ClientsAtSites
from fl_lightning.federation.wire import Packet, as_records, of_records

SCAFFOLD = copy.deepcopy(SMALL) | {"method": [{"class_path": "SCAFFOLD"}]}
SKIPPING = copy.deepcopy(SCAFFOLD)
SKIPPING["trainer"]["on_client_error"] = "skip"


class Breaking(Sockets):
    """Breaks off after so many messages."""

    def __init__(self, paths, last):
        super().__init__(paths)
        self.last = last

    def send(self, node, packet):
        if self.number >= self.last:
            raise RuntimeError("the server is lost")
        return super().send(node, packet)


def test_a_run_whose_server_is_lost_goes_on_to_the_same_bits(tmp_path):
    app, paths = app_of(tmp_path, SCAFFOLD), [tmp_path / f"{k}.sock" for k in range(SITES)]
    with workers(app, tmp_path):
        with pytest.raises(RuntimeError, match="the server is lost"):
            # they have joined, and trained and evaluated round 0; in round 1 one of them is asked to train
            serve(app, Breaking(paths, 3 * SITES + 1))
        ours = serve(app, Sockets(paths), "--ckpt_path", "last")
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


def test_bad_updates_and_a_second_claim_are_refused_by_name(tmp_path):
    app, paths = app_of(tmp_path, SKIPPING), [tmp_path / f"{k}.sock" for k in range(SITES)]
    link = Sockets([*paths, paths[0]])
    link.altered = {
        0: with_first(lambda value: value * torch.nan),
        1: undeclared,
        2: with_first(lambda value: value + 1e30),
    }
    link.altered[3] = link.altered[0]  # it may be the first to answer
    with (
        workers(app, tmp_path),
        pytest.warns(UserWarning, match="site") as warned,
        pytest.raises(ClientError, match="only 0 clients are left"),
    ):
        serve(app, link)
    texts = " ".join(str(warning.message) for warning in warned)
    assert "both claim to be site 'site-0'" in texts
    assert "(site site-0), round 0" in texts and "holds nan" in texts
    assert "undeclared entry buffers/images" in texts
    assert "(site site-2), round 0" in texts and "holds 1e+30" in texts


def test_a_site_whose_labels_stand_for_other_classes_is_refused_by_name():
    def answer(name, *classes):
        facts = {"num_examples": 4, "batches": 1, "evaluation": {}, "class_names": classes}
        return {"name": name, "facts": facts, "declared": []}

    clients = ClientsAtSites(Sites(["oslo", "lima", "rome"]), None, {}, print)
    clients._admit(1, answer("oslo", "benign", "malignant"), {1, 2})
    clients._admit(3, answer("rome"), {1, 2})
    with refused("site 'lima'", "malignant, benign", "'oslo'", "data.classes"):
        clients._admit(2, answer("lima", "malignant", "benign"), {1, 2})
    assert clients.nodes == {0: 1, 2: 3}


def test_an_update_that_did_not_arrive_was_never_remembered(tmp_path):
    app, paths = app_of(tmp_path, SKIPPING), [tmp_path / f"{k}.sock" for k in range(SITES)]
    link = Sockets(paths)
    link.lost = {2}
    with workers(app, tmp_path):
        trainer = serve(app, link)
    assert [row["clients"] for row in trainer.history] == [2, 3, 3]
    asked = [(node, decoded(packet)) for node, packet in link.sent]
    trained = [(node, message) for node, message in asked if message.get("shared", {}).get("kind") == "train"]
    memories = {k: [message["own"]["memory"] for node, message in trained if node == k] for k in range(SITES)}
    assert memories == {0: [None, 0, 1], 1: [None, 0, 1], 2: [None, None, 1]}


def test_a_node_whose_first_answer_is_lost_is_asked_again(tmp_path):
    config = copy.deepcopy(SMALL)
    config["trainer"]["max_rounds"] = 1
    app = app_of(tmp_path, config)

    class Lossy(Sockets):
        def receive(self, messages):
            return {
                number: "lost: on the way" if number == "1" else a for number, a in super().receive(messages).items()
            }

    link = Lossy([tmp_path / f"{k}.sock" for k in range(SITES)])
    with workers(app, tmp_path), pytest.warns(UserWarning, match="node 0: lost: on the way"):
        trainer = serve(app, link)
    assert [row["clients"] for row in trainer.history] == [SITES]


def test_a_node_whose_worker_does_not_listen_yet_is_asked_again(tmp_path):
    config = copy.deepcopy(SMALL)
    config["trainer"]["max_rounds"] = 1
    app, paths = app_of(tmp_path, config, join_within=30.0), [tmp_path / f"{k}.sock" for k in range(SITES)]
    with ExitStack() as stack:
        stack.enter_context(workers(app, tmp_path, SITES - 1))
        until(lambda: all(path.exists() for path in paths[:-1]))

        class Late(Sockets):
            def receive(self, messages):
                answers = super().receive(messages)
                if any(isinstance(a, Packet) and "no worker of the site answers" in a.text for a in answers.values()):
                    stack.enter_context(worker(app, SITES - 1, tmp_path))
                    until(paths[-1].exists)
                return answers

        with pytest.warns(UserWarning, match="node 2 could not join: no worker of the site answers"):
            trainer = serve(app, Late(paths, patience=1))
    assert [row["clients"] for row in trainer.history] == [SITES]


def test_a_node_without_the_socket_of_a_worker_is_refused_with_the_remedy(monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.setattr("flwr.app.Message", lambda content, reply_to: content)
    metadata = SimpleNamespace(message_type="train")
    message = SimpleNamespace(content=as_records(encoded({"kind": "join"})), metadata=metadata)
    answer = client_app()(message, SimpleNamespace(node_config={}))
    clients = ClientsAtSites(Sites(["oslo"]), None, {}, print)
    with refused("node 7 refuses the run", "--node-config"):
        clients._admit(7, decoded(of_records(answer)), {7})


def test_a_site_of_another_config_refuses_the_run_with_the_differing_keys(tmp_path):
    app = app_of(tmp_path, SMALL)
    with worker(app, 0, tmp_path, "--trainer.local_epochs", 7), pytest.raises(UsageError) as refused:
        serve(app, Sockets([tmp_path / "0.sock"]))
    assert "trainer.local_epochs: there 1, here 7" in str(refused.value)


def test_a_worker_that_is_killed_in_a_visit_is_given_the_message_again_and_the_bits_are_those_of_fit(
    tmp_path, monkeypatch
):
    """Its client's memory has not advanced by the first attempt."""
    app, paths, begun = app_of(tmp_path, SCAFFOLD), [tmp_path / f"{k}.sock" for k in range(SITES)], tmp_path / "begun"
    train = site.Site.train

    def hanging(self, shared, own):
        answer = train(self, shared, own)
        if self.name == "site-1" and shared["round"] == 1 and not begun.exists():
            begun.touch()  # its visit is over, and its memory written
            time.sleep(60)
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


class Slow(Sockets):
    """Node 1 answers what it is asked in round 0 when round 2 begins; node 2 comes in round 1."""

    def nodes(self):
        rounds = [decoded(packet).get("shared", {}).get("round", 0) for _, packet in self.sent]
        self.gone = set() if max(rounds, default=0) else {2}
        return super().nodes()

    def receive(self, messages):
        answers = super().receive(messages)
        for number in [*answers]:
            node, packet = self.sent[int(number) - 1]
            if node == 1 and decoded(packet).get("shared", {}).get("round") == 0 and not self.seen_of_round(2):
                self.answers[number] = answers.pop(number)
        return answers

    def seen_of_round(self, round_):
        return any(decoded(packet).get("shared", {}).get("round") == round_ for _, packet in self.sent)


def test_a_late_site_is_asked_nothing_more_until_it_has_answered_and_a_new_one_joins(tmp_path):
    config = copy.deepcopy(SKIPPING)
    config["trainer"]["max_rounds"] = 4
    app, paths = app_of(tmp_path, config, deadline=4.0, join_within=3.0), [tmp_path / f"{k}.sock" for k in range(SITES)]
    link = Slow(paths)
    with workers(app, tmp_path):
        until(lambda: all(path.exists() for path in paths))
        with pytest.warns(UserWarning, match="no answer within 4 s"):
            trainer = serve(app, link)
    asked = [(decoded(packet).get("shared", {}), node) for node, packet in link.sent]
    trained = [
        sorted(node for message, node in asked if (message.get("kind"), message.get("round")) == ("train", t))
        for t in range(4)
    ]
    assert trained == [[0, 1], [0], [0, 2], [0, 1, 2]]
    assert [row["clients"] for row in trainer.history] == [1, 1, 2, 3]


def test_sites_refuse_a_bad_state_by_name(tmp_path):
    app = app_of(tmp_path, SKIPPING)
    bad = [lambda value: value[:1], lambda value: value * torch.nan, lambda value: value + 1e30]

    class Bad(Sockets):
        def send(self, node, packet):
            message = decoded(packet)
            if "shared" in message:
                state = message["shared"]["state"]
                name = next(iter(state))
                state[name] = bad[node](state[name])
            return super().send(node, encoded(message))

    few = pytest.raises(ClientError, match="only 0 clients")
    with workers(app, tmp_path), pytest.warns(UserWarning, match="site") as warned, few:
        serve(app, Bad([tmp_path / f"{k}.sock" for k in range(SITES)]))
    texts = " ".join(str(warning.message) for warning in warned)
    for k, why in enumerate(("is (1, 64) torch.float32", "holds nan", "holds 1e+30")):
        assert f"(site site-{k}), round 0: it refuses: the state: encoder.layers.1.0.weight {why}" in texts
        assert why in (tmp_path / f"{k}.log").read_text()
