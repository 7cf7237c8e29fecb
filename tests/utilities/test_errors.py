"""What is said of an error, and where it was raised."""

import json
import os
import re
from functools import partial

import pytest
import torch
from helpers.bad_input import OUT_OF_RANGE
from helpers.errors import refused
from torch.utils.data import DataLoader

import fl_lightning
from fl_lightning import callbacks, data, methods, models
from fl_lightning.cli.entry_point import end_with_status
from fl_lightning.client.taps import resolve_taps
from fl_lightning.models import MLP
from fl_lightning.utilities.errors import (
    ClientError,
    UsageError,
    UsageErrors,
    check_all,
    is_user_code,
    require,
    texts_of,
    truncate,
    with_location,
)


def caught(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def theirs():
    return torch.nn.functional.linear(torch.ones(2, 3), torch.ones(2, 2))


def test_the_place_is_the_innermost_one_in_the_users_code():
    line = theirs.__code__.co_firstlineno + 1
    assert with_location(caught(theirs)).startswith(f"RuntimeError at test_errors.py:{line} (theirs): ")
    assert with_location(caught(lambda: json.loads("{"))).startswith("JSONDecodeError at test_errors.py:")


def test_without_code_of_the_user_it_is_the_innermost_place():
    error = caught(lambda: json.loads("{"))
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    assert with_location(error).startswith("JSONDecodeError at decoder.py:")
    assert with_location(ValueError("never raised")) == "ValueError: never raised"
    assert with_location(KeyError()) == "KeyError"
    assert with_location(ClientError("client 3 is lost")) == "client 3 is lost"


def test_libraries_are_not_the_users():
    modules = (os, torch, pytest, json, fl_lightning)
    assert [is_user_code(module.__file__) for module in modules] == len(modules) * [False]
    assert is_user_code(__file__)


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise ValueError("row 0 is bad")


@pytest.mark.thorough  # torch waits for the process for five seconds
def test_an_error_in_a_process_of_a_loader_has_its_place_there():
    line = Broken.__getitem__.__code__.co_firstlineno + 1
    error = caught(lambda: list(DataLoader(Broken(), num_workers=1)))
    assert with_location(error) == f"ValueError at test_errors.py:{line} (__getitem__): row 0 is bad"


def test_what_several_checks_refuse_is_told_at_once_and_once():
    def refuse(key):
        require(False, key, 0, "give 1")

    check_all([])
    with pytest.raises(UsageErrors) as several:
        check_all([partial(refuse, "a"), partial(refuse, "b"), partial(refuse, "a")])
    assert texts_of(several.value) == ["a=0: give 1", "b=0: give 1"]
    with pytest.raises(UsageError) as one:
        check_all([partial(refuse, "a"), lambda: None])
    assert texts_of(one.value) == ["a=0: give 1"] and not isinstance(one.value, UsageErrors)


def test_a_wrong_tap_lists_the_layers_one_on_each_line(capsys):
    network = MLP(64, [8] * 8)

    def command():
        resolve_taps(network, {"early": "nope"}, {})

    with pytest.raises(SystemExit):
        end_with_status(command)
    first, *names = capsys.readouterr().err.splitlines()
    assert first.startswith("error: trainer.taps: early='nope'")
    assert {name.strip(" ,") for name in names} <= {path for path, _ in network.named_modules()} and len(names) > 5


def test_of_a_text_that_is_too_long_the_first_sentence_and_the_end_stay_whole():
    text = f"The first sentence (e.g. this one) is kept. {'Another follows. ' * 30}Set this."
    assert re.fullmatch(r"The first sentence \(e\.g\. this one\) is kept\. \.\.\. .*Set this\.", truncate(text, 120))


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_argument_out_of_its_range_is_refused_by_class_name_and_value(name):
    (kind,) = [getattr(part, name) for part in (callbacks, data, methods, models) if hasattr(part, name)]
    for arguments in OUT_OF_RANGE[name]:
        *_, (argument, value) = arguments.items()
        with refused(f"{name}.{argument}={value!r}"):
            kind(**arguments)
