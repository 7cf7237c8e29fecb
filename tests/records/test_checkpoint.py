"""A checkpoint is taken when all its files are as they were written; else the one before it, and the line says why."""

import io
import json
import pickle
import re
import shutil
import zipfile

import pytest
import torch
from helpers.checkpoints import checkpoints, flip
from helpers.errors import assert_names, refused

from fl_lightning.records.checkpoint import client_files, read, read_weights, valid_checkpoint


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def swap(first, second):
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


DAMAGES = {
    "flipped": (lambda d: flip(d / "last.ckpt"), "last.ckpt was altered"),
    "torn": (lambda d: (d / "last.ckpt").write_bytes((d / "last.ckpt").read_bytes()[:-9]), "last.ckpt has .* bytes"),
    "missing": (lambda d: (d / "last.ckpt").unlink(), "there is no such file"),
    "older": (lambda d: shutil.copy(d / "previous.ckpt", d / "last.ckpt"), "last.ckpt (was altered|has)"),
    "client flipped": (lambda d: flip(d / "clients/0-3.pt"), "clients/0-3.pt was altered"),
    "client empty": (lambda d: (d / "clients/0-3.pt").write_bytes(b""), "clients/0-3.pt has 0 bytes and had"),
    "client missing": (lambda d: (d / "clients/1-3.pt").unlink(), "clients/1-3.pt is missing"),
    "clients swapped": (lambda d: swap(d / "clients/0-3.pt", d / "clients/1-3.pt"), "clients/0-3.pt was altered"),
    "no manifest": (lambda d: (d / "last.ckpt.json").unlink(), "its manifest last.ckpt.json is missing"),
    "torn manifest": (lambda d: (d / "last.ckpt.json").write_text('{"format": 1, "ro'), "last.ckpt.json is damaged"),
    "manifest of another": (lambda d: shutil.copy(d / "previous.ckpt.json", d / "last.ckpt.json"), "last.ckpt"),
    "newer": (lambda d: edit(d / "last.ckpt.json", format=2), "it has format 2, and this version reads 1"),
    "names of clients": (
        lambda d: edit(d / "last.ckpt.json", clients={"../../x.pt": {"size": 1, "sha256": "0"}}),
        "names '../../x.pt', which is no file of a client",
    ),
    "fewer clients": (lambda d: edit(d / "last.ckpt.json", clients={}), "its manifest names other clients"),
    "sizes": (lambda d: edit(d / "last.ckpt.json", history={"size": 1e99, "sha256": "0"}), "last.ckpt.json is damaged"),
    "history": (lambda d: flip(d / "history.jsonl", 0.9), "history.jsonl was altered"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path, damage):
    folder, said = checkpoints(tmp_path).path, []
    spoil, message = DAMAGES[damage]
    spoil(folder)
    found = valid_checkpoint(folder / "last.ckpt", said.append)
    assert found.path.name == "previous.ckpt"
    assert [row["round"] for row in found.history] == [0, 1]
    (line,) = said
    assert line.endswith("previous.ckpt is taken instead") and re.search(message, line)


def test_an_intact_checkpoint_is_taken_without_a_word(tmp_path):
    folder, said = checkpoints(tmp_path).path, []
    found = valid_checkpoint(folder / "last.ckpt", said.append)
    assert (found.path.name, len(found.history), said) == ("last.ckpt", 3, [])


def test_the_rows_of_a_damaged_history_come_from_the_table_that_has_the_same(tmp_path):
    folder, said = checkpoints(tmp_path).path, []
    table = folder.parent / "metrics.csv"
    rows = valid_checkpoint(folder / "last.ckpt", said.append).history
    table.write_text(
        "round,test/loss,time/round,step\n"
        + "".join(f"{row['round']},{row['test/loss']},{row['time/round']},{row['round']}\n" for row in rows)
    )
    (folder / "history.jsonl").unlink()
    assert valid_checkpoint(folder / "last.ckpt", said.append).history == rows
    assert_names(said[0], "history.jsonl", "metrics.csv")
    flip(table, 0.4)
    with refused("history.jsonl"):
        valid_checkpoint(folder / "last.ckpt", said.append)


def test_a_file_that_both_checkpoints_need_ends_in_one_line(tmp_path):
    folder = checkpoints(tmp_path).path
    (folder / "clients/7-1.pt").unlink()
    with refused("clients/7-1.pt", "previous.ckpt", "clients/7-1.pt"):
        valid_checkpoint(folder / "last.ckpt", print)


# ---------------------------------------------------------------------- a checkpoint is data
class Reserves:
    """Its pickle asks for a terabyte."""

    def __reduce__(self):
        return bytearray, (2**40,)


def claiming(numel):
    """A file whose tensor claims more numbers than its record has."""
    buffer = io.BytesIO()
    torch.save({"state_dict": {"w": torch.zeros(7)}}, buffer)
    changed = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(changed, "w") as new:
        for one in old.infolist():
            content = old.read(one)
            # BININT1 of the number of elements and of the shape
            content = (
                content.replace(b"K\x07", b"\x8a\x06" + numel.to_bytes(6, "little"))
                if one.filename.endswith("data.pkl")
                else content
            )
            new.writestr(one.filename, content)
    return changed.getvalue()


def compressed():
    """A file of a megabyte whose record unpacks to a gigabyte."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}) + bytes(2**24))
        archive.writestr("archive/version", "3")
    return buffer.getvalue()


def saved(contents, **how):
    buffer = io.BytesIO()
    torch.save(contents, buffer, **how)
    return buffer.getvalue()


HOSTILE = {
    "claims a tensor of 10 TB": lambda: claiming(10**13 // 4),
    "is compressed": compressed,
    "asks for a terabyte": lambda: saved({"state_dict": {}, "x": Reserves()}),
    "expands one number": lambda: saved({"state_dict": {"w": torch.zeros(1).expand(2**42)}}),
    "is of the format before 1.6": lambda: saved({"state_dict": {}}, _use_new_zipfile_serialization=False),
    "runs code": lambda: saved({"state_dict": print}),
    "is cut": lambda: saved({"state_dict": {"w": torch.zeros(500)}})[:-300],
    "is a flipped bit": lambda: saved({"state_dict": {"w": torch.zeros(500)}}).replace(bytes(1000), b"\1" + bytes(999)),
    "is no file of torch": lambda: b"hello",
    "is empty": lambda: b"",
    "is a damaged zip": lambda: b"PK\x03\x04" + bytes(400) + b"PK\x05\x06" + bytes(18),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_is_hostile_or_damaged_is_one_line(tmp_path, what):
    path = tmp_path / "given.ckpt"
    path.write_bytes(HOSTILE[what]())
    for reads, key in ((read_weights, "weights"), (lambda path: valid_checkpoint(path, print), "ckpt_path")):
        with refused(f"{key}=", "given.ckpt") as caught:
            reads(path)
        text = str(caught.value)
        assert "\n" not in text and len(text) - len(str(path)) < 200


@pytest.mark.parametrize("name", ["../../x.pt", "/x.pt", "1-2.pt", "0-1.pt\n", "a", 3, "0-1.ckpt"])
def test_a_file_of_a_client_may_not_leave_the_folder(tmp_path, name):
    contents = {"state_dict": {}, "server": {}, "round": 1, "clients": {0: name}}
    torch.save(contents, tmp_path / "last.ckpt")
    with refused("last.ckpt", repr(name)):
        client_files(tmp_path / "last.ckpt", contents)
    with refused("last.ckpt", repr(name)):
        valid_checkpoint(tmp_path / "last.ckpt", print)


def test_weights_with_a_manifest_are_verified(tmp_path):
    folder = checkpoints(tmp_path).path
    assert "state_dict" in read_weights(folder / "last.ckpt")
    shutil.copy(folder / "previous.ckpt", folder / "last.ckpt")
    with refused("weights=", "last.ckpt"):
        read_weights(folder / "last.ckpt")
    assert read(folder / "previous.ckpt")["round"] == 2
