"""The permitted contents of messages, and refused messages."""

import io
import math
import socket
import threading
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.sites import until

from fl_lightning.federation import framing
from fl_lightning.federation.framing import BadMessageError, receive, relayed, send
from fl_lightning.federation.serialization import check_tensors, decoded, encoded, scrubbed
from fl_lightning.federation.server import over_sites
from fl_lightning.federation.site import listening
from fl_lightning.storage.serializable import packed
from fl_lightning.utilities.errors import ClientError

STATE = {"weight": torch.zeros(2, 3), "steps": torch.tensor(4)}


def test_tensors_and_plain_values_come_back_as_they_were_and_nothing_beside_them():
    whole = torch.randn(1000, dtype=torch.float64)
    value = {
        "a": [1, 0.1, None, True, "ü", np.float64(0.5)],
        3: (1.5, {"b": math.inf}, torch.Size([2])),
        "c": {"d": torch.tensor([0.1, -0.0, math.inf, math.nan], dtype=torch.bfloat16), "e": whole[:6].view(2, 3).t()},
        "f": [
            torch.tensor(True),
            torch.zeros(0, 3, dtype=torch.int64),
            torch.tensor([1 + 2j]),
            torch.ones(1).expand(3),
        ],
    }
    message = encoded(value)
    assert str(decoded(message)) == str(value) and whole[7:].numpy().tobytes() not in message
    assert decoded(message)["c"]["e"].dtype == torch.float64
    with pytest.raises(BadMessageError, match="Own"):
        encoded({"a": [Own()]})


class Own:
    """Nothing that a message may hold."""


def compressed():
    file = io.BytesIO()
    stored = zipfile.ZipFile(io.BytesIO(encoded(torch.zeros(10**5))))
    with stored, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in stored.namelist():
            archive.writestr(name, stored.read(name))
    return file.getvalue()


def nested(depth, times):
    value = 0
    for _ in range(depth):
        value = [value] * times
    return packed(value).numpy().tobytes()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"{", "not consist of tensors"),
        (b"", "not consist of tensors"),
        (encoded(1)[:-9], "not consist of tensors"),
        (packed(Own()).numpy().tobytes(), "not consist of tensors"),
        (compressed(), "bytes; at most"),
        (packed(torch.zeros(1).expand(10**12)).numpy().tobytes(), "larger tensors"),
        pytest.param(
            packed(torch.eye(3).to_sparse()).numpy().tobytes(),
            "cannot hold a Tensor",
            marks=pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants"),
        ),
        (packed(torch.ones(3, device="meta")).numpy().tobytes(), "cannot hold a Tensor"),
        (nested(30, 1), "24 deep"),
        (nested(20, 10), "1,048,576 values"),
        (encoded("x" * 20_000), "at most 10,000 are accepted"),
    ],
    # an id from the bytes of an archive would differ from process to process
    ids=["brace", "empty", "cut", "class", "compressed", "expanded", "sparse", "meta", "deep", "wide", "text"],
)
def test_a_bad_message_is_refused(message, why):
    with pytest.raises(BadMessageError, match=why):
        decoded(message, limit=10_000)


def test_a_message_goes_through_a_socket_within_its_limit():
    message = encoded({"x": torch.arange(1000.0)})
    for limit, refused in ((10**6, False), (3000, True)):
        here, there = socket.socketpair()
        with here, there:
            thread = threading.Thread(target=send, args=(here, message))
            thread.start()
            if refused:
                with pytest.raises(BadMessageError, match=r"at most 3,000 are accepted"):
                    receive(there, limit)
                there.recv(10**6)
            else:
                assert receive(there, limit) == message
            thread.join()


def test_a_worker_that_ends_in_a_long_visit_may_be_restarted_within_the_patience(tmp_path, monkeypatch):
    path, now = tmp_path / "worker.sock", [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: time.sleep(0.01))
    monkeypatch.setattr(framing, "time", clock)

    def serve(answer):
        with listening(path) as server, server.accept()[0] as connection:
            receive(connection)
            now[0] += 1000
            if answer:
                send(connection, answer)

    def restarted():
        serve(b"")
        serve(b"done")

    threading.Thread(target=restarted, daemon=True).start()
    until(path.exists)
    assert relayed(str(path), b"visit", patience=60) == b"done"


@pytest.mark.parametrize(
    ("entry", "why"),
    [(torch.zeros(3, 2), r"weight is \(3, 2\)"), (torch.zeros(2, 3).double(), "float64"), (None, "lacks weight")],
)
def test_a_state_of_other_entries_is_refused_by_name(entry, why):
    state = STATE | {"weight": entry} if entry is not None else {"steps": STATE["steps"]}
    with pytest.raises(BadMessageError, match=why):
        check_tensors("the state", state, STATE, 1e9, [*STATE])


def test_of_an_exception_only_its_place_is_told():
    def step():
        raise ValueError("patient Jane Doe")

    try:
        try:
            step()
        except ValueError as error:
            raise ClientError(f"client 0, round 1: {error}") from error
    except ClientError as error:
        text = scrubbed(error)
    assert "Jane" not in text and "ValueError at test_packets.py" in text and "(step)" in text
    assert scrubbed(ClientError("the loss became nan")) == "the loss became nan"


def test_a_site_without_a_value_is_left_out_of_its_mean_but_not_one_whose_loss_is_nan():
    sites = {
        "a": (10, {"auroc": 0.5, "loss": 1.0}),
        "b": (30, {"auroc": 0.9, "loss": 1.0}),
        "c": (60, {"auroc": math.nan}),
    }
    found = over_sites(sites)
    assert (found["auroc"], found["auroc/clients"], found["sites/worst/auroc"]) == (pytest.approx(0.8), 2, 0.5)
    errors = over_sites({"a": (1, {"test/mse": 1.0}), "b": (1, {"test/mse": 9.0})})
    assert errors["sites/worst/test/mse"] == 9.0
    for site in ("0", "c"):  # before and after the others
        diverged = over_sites(dict(sorted({**sites, site: (60, {"loss": math.nan})}.items())))
        assert math.isnan(diverged["loss"]) and math.isnan(diverged["sites/worst/loss"])
