"""What a message may hold, and what is refused of one."""

import math
import socket
import threading

import pytest
import torch

from fl_lightning.errors import ClientError
from fl_lightning.federation.agreement import check_state, scrubbed
from fl_lightning.federation.messages import decoded, encoded
from fl_lightning.federation.server import over_sites
from fl_lightning.federation.wire import BadMessageError, Packet, receive, send

STATE = {"weight": torch.zeros(2, 3), "steps": torch.tensor(4)}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0.1, -0.0, math.inf, math.nan], dtype=torch.bfloat16),
        torch.tensor([[0.1, 1e-45]]),
        torch.randn(3, 2, dtype=torch.float64).t(),
        torch.tensor(True),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor([1 + 2j]),
    ],
)
def test_tensors_keep_their_bits(tensor):
    (same,) = decoded(encoded([tensor]))
    assert same.dtype == tensor.dtype and same.shape == tensor.shape
    bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (same, tensor) if value.numel()]
    assert not bits or torch.equal(*bits)


def test_plain_values_and_containers_come_back_as_they_were():
    value = {
        "a": [1, 0.1, None, True, "ü"],
        3: (1.5, {"b": math.inf}),
        "c/d": torch.ones(1),
        "c": {"d": torch.zeros(1)},
    }
    assert str(decoded(encoded(value))) == str(value)


def test_nothing_but_tensors_and_plain_values_is_sent():
    with pytest.raises(TypeError, match="a/0 is a object"):
        encoded({"a": [object()]})


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (Packet("{"), "not JSON"),
        (Packet('{"tensor":["float32",2]}', b"1234"), "ends within a tensor"),
        (Packet("null", b"1"), "1 undeclared bytes"),
        (Packet('{"tensor":["object",1]}', b"12345678"), "the type 'object'"),
        (Packet('{"tensor":["float32",-1]}'), r"the shape \[-1\]"),
        (Packet('{"tensor":["float32",0,1e3]}'), "the shape"),
        (Packet(f'{{"tensor":["float32",0,{2**70}]}}'), "the shape"),
        (Packet('{"tensor":[]}'), "the type None"),
        (Packet('{"list":[]}'), "no known kind"),
        (Packet('{"dict":[[[],1]]}'), "no known kind"),
        (Packet("{}"), "no known kind"),
        (Packet("[" * 30 + "]" * 30), "24 deep"),
        (Packet('"' + "x" * 2000 + '"'), "at most 1,000 are taken"),
    ],
)
def test_a_bad_message_is_refused(packet, why):
    with pytest.raises(BadMessageError, match=why):
        decoded(packet, limit=1000)


def test_a_message_goes_through_a_socket_within_its_limit():
    packet = encoded({"x": torch.arange(1000.0)})
    for limit, refused in ((10**6, False), (3000, True)):
        here, there = socket.socketpair()
        with here, there:
            thread = threading.Thread(target=send, args=(here, packet))
            thread.start()
            if refused:
                with pytest.raises(BadMessageError, match=r"at most 3,000 are taken"):
                    receive(there, limit)
                there.recv(10**6)
            else:
                assert receive(there, limit) == packet
            thread.join()


@pytest.mark.parametrize(
    ("entry", "why"),
    [(torch.zeros(3, 2), r"weight is \(3, 2\)"), (torch.zeros(2, 3).double(), "float64"), (None, "lacks weight")],
)
def test_a_state_of_other_entries_is_refused_by_name(entry, why):
    state = STATE | {"weight": entry} if entry is not None else {"steps": STATE["steps"]}
    with pytest.raises(BadMessageError, match=why):
        check_state("the state", state, STATE, 1e9, [*STATE])


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
    assert math.isnan(over_sites({**sites, "c": (60, {"loss": math.nan})})["loss"])
