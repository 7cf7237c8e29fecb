"""What clients keep: in memory up to a limit, then on disk, and the same when it comes back."""

from contextlib import suppress

import pytest
import torch
from helpers.runs import assert_same_bits, plain_sgd_model
from helpers.workers import together

from fl_lightning.client.memory import Memories
from fl_lightning.methods import MOON, SCAFFOLD, FedBN, Local


def remember(memories, k, numbers=1000):
    memories.visited(k)["method"] = {"state": {"w": torch.full((numbers,), float(k))}, "pool": [torch.ones(2)], "n": k}
    memories.settle(k)


def test_beyond_the_limit_the_least_recently_visited_lie_on_disk():
    memories = Memories(limit=3 * 4100)
    for k in range(10):
        remember(memories, k)
    assert list(memories) == list(range(10))
    folder = memories._scratch.path
    assert {int(path.stem) for path in folder.glob("*.pt")} == set(range(7))
    assert memories[2]["method"]["state"]["w"].eq(2).all()
    assert memories[2]["method"]["n"] == 2
    memories.close()
    assert not folder.exists()


def test_a_visit_to_what_lies_on_disk_changes_it_for_good():
    memories = Memories(limit=4100)
    for k in range(3):
        remember(memories, k)
    memories.visited(0)["method"]["state"]["w"] += 5
    memories.settle(0)
    remember(memories, 2)
    assert memories[0]["method"]["state"]["w"].eq(5).all()
    memories.close()


class StruckError(Exception):
    """Of a visit that fails."""


def fail_in_a_visit(memories, k, change):
    with suppress(StruckError), memories.visit(k):
        change(memories.visited(k).setdefault("method", {}))
        assert memories[k] is memories.visited(k)
        raise StruckError


def replace_in(memory):
    memory["state"]["w"] = torch.zeros(1)
    memory["pool"].append(torch.zeros(1))
    memory["new"] = 1


def write_into(memory):
    memory["state"]["w"] += 5


@pytest.mark.parametrize("limit", [float("inf"), 0.0], ids=["held", "on disk"])
@pytest.mark.parametrize("change", [replace_in, write_into])
def test_a_visit_that_fails_changes_nothing(limit, change):
    memories = Memories(limit)
    remember(memories, 3)
    fail_in_a_visit(memories, 3, change)
    kept = memories[3]["method"]
    assert kept["state"]["w"].eq(3).all()
    assert (len(kept["pool"]), kept["n"], len(kept)) == (1, 3, 3)
    fail_in_a_visit(memories, 4, lambda memory: memory.update(n=1))
    assert list(memories) == [3]
    assert 4 not in memories
    memories.close()


def test_a_visit_that_is_dropped_changes_nothing():
    memories = Memories()
    remember(memories, 0)
    with memories.visit(0):
        replace_in(memories.visited(0)["method"])
        memories.drop(0)
    assert memories[0]["method"]["state"]["w"].eq(0).all()


def test_a_client_without_memory_takes_no_place():
    memories = Memories()
    memories.visited(3).setdefault("method", {})
    memories.settle(3)
    assert len(memories) == 0


def test_a_memory_that_is_sent_is_gone_here_and_complete_there(tmp_path):
    def follow(workers):
        memories = Memories(limit=0)
        if workers.rank == 0:
            remember(memories, 4)
            remember(memories, 6)
        memories.note_owners([{4, 6}, set()])
        # client 5 has no memory, and client 6 stays
        memories.follow([[6], [4, 5]], workers)
        memories.write(tmp_path / str(workers.rank), 3, workers)
        return memories

    here, there = together(2, follow)
    assert here.owners == there.owners == {4: 1, 6: 0}
    assert (list(here), list(there)) == ([6], [4])
    assert there[4]["method"]["pool"][0].tolist() == [1.0, 1.0]
    # the new owner writes it with the next checkpoint
    assert here.files == there.files == {4: "4-3.pt", 6: "6-3.pt"}
    assert (tmp_path / "0" / "6-3.pt").exists()
    assert (tmp_path / "1" / "4-3.pt").exists()
    here.close()
    there.close()


@pytest.mark.parametrize("method", [SCAFFOLD, MOON, FedBN, Local])
def test_no_limit_changes_a_bit(run, method):
    given = {"participation": 0.5, "max_rounds": 4}
    held, _ = run([method()], model=plain_sgd_model(), **given)
    spilled, trainer = run([method()], model=plain_sgd_model(), client_memory=0.0, **given)
    assert_same_bits(held, spilled)
    assert not trainer.client.memories()._scratch.path.exists()
