"""A frozen base is shared between module, server and reference models, and stored once in the folder of a run."""

import shutil

import pytest
import torch
from helpers.checkpoints import flip
from helpers.errors import refused, warned
from helpers.runs import Stops, assert_same_bits, history, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn

from fl_lightning import Method
from fl_lightning.callbacks import BestCheckpoint, Callback
from fl_lightning.core.lazy_copies import share_memory
from fl_lightning.methods import MOON, FedCKA
from fl_lightning.utilities.errors import ClientError

BASE = ["base.weight", "base.bias"]
# of the numbers of the base
SIZE = 4 * 9 * 4000


class Adapted(TinyModule):
    """A small trained part behind a large frozen one."""

    def build(self):
        self.base = nn.Linear(8, 4000).requires_grad_(False)

    def forward(self, x):
        return super().forward(x + 0.01 * self.base(x)[:, :8])

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch))


class Writes(Adapted):
    """Changes the bias of its base from the third round on, at the client with fewer examples."""

    def on_train_epoch_end(self):
        if self.trainer.current_epoch >= 2 and self.trainer.num_training_batches == 1:
            self.base.bias.data = self.base.bias.data + 1.0


class Watches(Callback):
    """Counts comparisons from the second round on, and checks in each visit what shares memory."""

    def __init__(self, patch):
        self.calls, self.visits, self.counts, equal = 0, 0, False, torch.equal

        def counted(*args):
            self.calls += self.counts
            return equal(*args)

        patch.setattr(torch, "equal", counted)

    def on_round_start(self, trainer):
        self.counts = True

    def on_client_end(self, trainer, client):
        self.visits += 1
        models = [dict(model.named_parameters()) for model in client.references.models.values()]
        for name in BASE:
            assert share_memory(client.live[name], trainer.server.state[name])
            assert share_memory(client.live[name], client.received[name])
            assert all(share_memory(model[name], client.live[name]) for model in models)

    def on_round_end(self, trainer):
        self.counts = False


def fit(folder, model=Adapted, methods=(), ckpt_path=None, stop=None, seed=0, weights=None, **kwargs):
    torch.manual_seed(seed)
    kwargs["callbacks"] = [*kwargs.get("callbacks", ()), *([Stops(stop)] if stop is not None else [])]
    given = {"max_rounds": 4, "name": "run", "taps": {"representation": "body", "early.0": "body"}, **kwargs}
    trainer = small_trainer(folder, **given)
    module = model()
    try:
        trainer.fit(module, clients(TinyData(11, test=(6,)), 8, 3), list(methods), ckpt_path, weights)
    except ClientError:
        assert stop is not None
    return trainer


def files(folder):
    return folder / "run/version_0/checkpoints"


def saved(folder, name):
    return torch.load(files(folder) / name, weights_only=True)


def test_an_untouched_base_is_neither_copied_nor_compared_in_a_visit(tmp_path, monkeypatch):
    watch = Watches(monkeypatch)
    fit(tmp_path, methods=[MOON(), FedCKA(layers=1)], callbacks=[watch])
    assert (watch.calls, watch.visits) == (0, 8)


def test_the_base_is_stored_once_and_the_final_model_is_whole(tmp_path):
    best = BestCheckpoint(monitor="test/loss")
    trainer = fit(tmp_path, methods=[MOON(), FedCKA(layers=1)], callbacks=[best])
    for name in ("last.ckpt", "previous.ckpt", "best.ckpt", *(f"clients/{k}-4.pt" for k in (0, 1))):
        assert (files(tmp_path) / name).stat().st_size < SIZE / 4, name
    assert sorted(saved(tmp_path, "frozen.pt")) == sorted(BASE)
    assert_same_bits(saved(tmp_path, "model.ckpt")["state_dict"], trainer.server.state)
    whole = Adapted()
    whole.load_state_dict(saved(tmp_path, "model.ckpt")["state_dict"])
    torch.manual_seed(1)
    data, last = clients(TinyData(11, test=(6,)), 8, 3), files(tmp_path) / "last.ckpt"
    with warned("ckpt_path=", "method=[]", "moon"):
        measured = small_trainer(tmp_path).test(Adapted(), data, last)
    assert measured["test/loss"] == trainer.metrics["test/loss"]


@pytest.mark.parametrize("model", [Adapted, Writes])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_resumed_run_has_the_bits_of_a_whole_one_whatever_the_module_began_with(tmp_path, model, devices):
    methods = [MOON(), FedCKA(layers=1)]
    fit(tmp_path / "begun", model, max_rounds=1, seed=5)
    weights = files(tmp_path / "begun") / "last.ckpt"
    whole = fit(tmp_path / "whole", model, methods, weights=weights)
    assert whole.server.state["base.weight"].equal(saved(tmp_path / "begun", "model.ckpt")["state_dict"]["base.weight"])
    fit(tmp_path, model, methods, weights=weights, stop=2)
    shutil.copytree(tmp_path / "run", tmp_path / "copied/run")
    again = fit(tmp_path, model, methods, "last", seed=9, devices=devices)
    moved = fit(tmp_path / "copied", model, methods, "last", seed=9)
    for trainer in (again, moved):
        assert_same_bits(whole.server.state, trainer.server.state)
        assert history(whole) == history(trainer)
    for folder in (tmp_path, tmp_path / "copied"):
        assert_same_bits(saved(folder, "frozen.pt"), saved(tmp_path / "whole", "frozen.pt"))


def test_what_a_client_writes_to_travels_and_is_stored_with_each_checkpoint(tmp_path):
    trainer = fit(tmp_path, Writes, max_rounds=5)
    begun = saved(tmp_path, "frozen.pt")
    sent = [row["bytes/up"] for row in trainer.history]
    assert len({*sent[:2]}) == 1 and {size - sent[0] for size in sent[2:]} == {4 * 4000}
    # the mean over 8 and 3 examples, of changes of 0 and 1 in three rounds
    change = trainer.server.state["base.bias"] - begun["base.bias"]
    torch.testing.assert_close(change, torch.full_like(change, 3 * 3 / 11))
    held = saved(tmp_path, "last.ckpt")
    assert held["frozen"]["names"] == ["base.weight"]
    assert torch.equal(held["server"]["state"]["base.bias"], trainer.server.state["base.bias"])
    assert_same_bits(saved(tmp_path, "model.ckpt")["state_dict"], trainer.server.state)


class Assigns(Method):
    """Adds 1 to the bias of the base, by one of the server's hooks in some rounds."""

    def __init__(self, hook, *rounds):
        self.hook, self.rounds = hook, rounds

    def on_fit_start(self, server):
        self.add("on_fit_start", server)

    def on_round_start(self, server):
        self.add("on_round_start", server)

    def on_round_end(self, server, payload):
        self.add("on_round_end", server)

    def add(self, hook, server):
        if hook == self.hook and server.round in self.rounds:
            server.assign({"base.bias": server.state["base.bias"] + 1})


class Received(Callback):
    """Notes the client of each round and the bias of the base that it has received."""

    def __init__(self):
        self.seen = []

    def on_client_end(self, trainer, client):
        assert torch.equal(client.live["base.bias"], client.received["base.bias"])
        self.seen.append((client.info.id, float(client.received["base.bias"][0])))


@pytest.mark.parametrize(("hook", "round_", "first"), [("on_round_start", 2, 2), ("on_round_end", 2, 3)])
def test_what_a_server_hook_assigns_is_shared_and_travels_once_to_each_client(
    tmp_path, monkeypatch, hook, round_, first
):
    received = Received()
    trainer = fit(
        tmp_path,
        methods=[Assigns(hook, round_)],
        callbacks=[received, Watches(monkeypatch)],
        max_rounds=8,
        cohort_size=1,
    )
    begun = received.seen[0][1]
    later = [k for k, _ in received.seen[first:]]
    assert {*later} == {0, 1}
    assert [value - begun for _, value in received.seen] == pytest.approx([0] * first + [1] * len(later))
    sizes = [row["bytes/down"] for row in trainer.history]
    expected = [0] * first + [4 * 4000 * (k not in later[:place]) for place, k in enumerate(later)]
    assert [size - sizes[0] for size in sizes] == expected


def test_what_a_method_assigns_before_the_first_round_is_known_to_all(tmp_path, monkeypatch):
    received = Received()
    trainer = fit(tmp_path, methods=[Assigns("on_fit_start", 0)], callbacks=[received, Watches(monkeypatch)])
    torch.manual_seed(0)
    assert {value for _, value in received.seen} == {float(Adapted().base.bias[0] + 1)}
    assert len({row["bytes/down"] for row in trainer.history}) == 1


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("hook", "rounds"), [("on_round_end", (0, 1, 2, 3)), ("on_round_start", (1,))])
def test_assigned_values_are_in_each_checkpoint_and_a_resumed_run_goes_on_with_them(tmp_path, hook, rounds, devices):
    methods, how = [MOON(), Assigns(hook, *rounds)], {"cohort_size": 1}
    whole = fit(tmp_path / "whole", methods=methods, **how)
    fit(tmp_path, methods=methods, stop=2, **how)
    again = fit(tmp_path, methods=methods, ckpt_path="last", seed=9, devices=devices, **how)
    assert_same_bits(whole.server.state, again.server.state)
    assert history(whole) == history(again)
    assert whole.server.known == again.server.known != {}
    held = saved(tmp_path, "last.ckpt")
    assert held["frozen"]["names"] == ["base.weight"]
    for state in (held["state_dict"], held["server"]["state"], saved(tmp_path, "model.ckpt")["state_dict"]):
        assert torch.equal(state["base.bias"], again.server.state["base.bias"])


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_a_checkpoint_without_its_base_is_refused_in_one_line(tmp_path, damage, weights):
    fit(tmp_path)
    path = files(tmp_path) / "last.ckpt"
    flip(path.with_name("frozen.pt")) if damage == "altered" else path.with_name("frozen.pt").unlink()
    key = "weights" if weights else "ckpt_path"
    with refused(f"{key}=", "frozen.pt", damage) as caught:
        fit(tmp_path, max_rounds=5, **{key: path})
    assert "\n" not in str(caught.value)
