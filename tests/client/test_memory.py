"""What clients keep: in memory up to a limit, then on disk, and the same when it comes back."""

import tempfile
from functools import partial

import pytest
import torch
from helpers.errors import refused, warned
from helpers.notes import noted
from helpers.runs import fitted
from helpers.tiny import TinyData, TinyModule, clients, variant
from helpers.without_values import WithoutValues

from fl_lightning import Method
from fl_lightning.callbacks import Callback
from fl_lightning.client import ClientStateStore
from fl_lightning.core.systems import SystemsHeterogeneity


class Remembers(Method):
    """Writes to a tensor, a list and a number that it remembers; one visit of client 1 fails after that."""

    def __init__(self, fails_in=None):
        self.fails_in = fails_in

    def on_client_start(self, client):
        memory = client.memory(self)
        if not memory:
            memory.update(w=torch.zeros(1000), deep={"list": [torch.zeros(1)]}, n=0)
        noted.append((client.info.id, memory["w"].max().item(), len(memory["deep"]["list"]), memory["n"]))

    def on_client_end(self, client):
        memory = client.memory(self)
        memory["w"] += 1
        memory["deep"]["list"].append(torch.zeros(1))
        memory["n"] = memory["n"] + 1
        if client.info.id == 1 and client.visit.fit_progress.round == self.fails_in:
            memory["w"] = torch.full((2,), 9.0)
            raise ValueError("after it has written")


TWELVE = partial(clients, TinyData(12), 3, 3, 3, 3)
fit = partial(fitted, model=TinyModule, data=TWELVE, max_rounds=3, local_steps=1, enable_progress_bar=False)


@pytest.mark.parametrize("limit", [1024.0, 0.0], ids=["held", "on disk"])
def test_a_visit_finds_what_the_last_one_left_and_one_that_fails_changes_nothing(tmp_path, limit):
    trainer = fit(tmp_path, [Remembers(fails_in=1)], client_memory=limit, on_client_error="skip")
    visits = [[(k, float(n), n + 1, n) for k in range(4)] for n in range(3)]
    visits[2][1] = visits[1][1]
    assert noted == [visit for round_ in visits for visit in round_]
    assert [row.get("clients/failed", 0) for row in trainer.history] == [0, 1, 0]


def test_a_memory_on_disk_ends_with_the_run(tmp_path):
    trainer = fit(tmp_path, [Remembers()], client_memory=0.0)
    with refused("trainer.client_memory=0.0"):
        trainer.client.memories()[0]


def test_a_visit_whose_update_is_lost_changes_nothing(tmp_path):
    with warned("round 0"):
        fit(tmp_path, [Remembers()], systems=SystemsHeterogeneity(dropout_after=1.0))
    assert noted == 3 * [(k, 0.0, 1, 0) for k in range(4)]


class Lists(Callback):
    """Notes the clients whose memories lie on disk."""

    def __init__(self, folder):
        self.folder = folder

    def on_round_end(self, trainer):
        noted.append(sorted(path.stem for path in self.folder.rglob("*.pt")))


def test_beyond_the_limit_the_least_recently_visited_lie_on_disk_until_the_run_ends(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    # room for the memories of two of the four clients, in GiB
    fit(tmp_path, [Remembers()], client_memory=2 * 4100 / 2**30, callbacks=[Lists(tmp_path / "temporary")])
    listed = [one for one in noted if isinstance(one, list)]
    assert listed[0] == ["0", "1"] and all({"0", "1"} <= {*names} for names in listed)
    assert not list((tmp_path / "temporary").iterdir())


LooksAtMemory = variant(Method, on_client_start=lambda self, client: client.memory(self))


def test_a_client_that_remembers_nothing_takes_no_place(tmp_path):
    assert len(fit(tmp_path, [LooksAtMemory()]).client.memories()) == 0


def test_a_memory_moves_to_a_gpu_and_back_through_pinned_memory_with_one_wait(monkeypatch):
    pinned, waits = [], []

    class Stream:
        def __init__(self, device):
            self.device = device

        def synchronize(self):
            waits.append(self.device)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.shape) or tensor)
    device = torch.device("cuda", 0)
    with WithoutValues():
        store = ClientStateStore(device=device)
        for visit in range(2):
            with store.committing(3):
                memory = store.visited(3)
                assert all(value.device == device for value in memory.get("own", {}).get("w", []))
                memory["own"] = {"w": [torch.zeros(2, 3, device=device), torch.zeros(5, device=device)], "n": visit}
            assert len(waits) == visit + 1
            kept = store[3]["own"]
            assert kept["n"] == visit and {value.device.type for value in kept["w"]} == {"cpu"}
    assert pinned == [(2, 3), (5,)] and waits == [device] * 2
