"""A parser's page of errors becomes one line."""

import pytest

from fl_lightning.cli.messages import known_for, parameters, shorten, subclasses, wanted
from fl_lightning.method import Method


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("typing.Literal['a', 'b']", "a or b"),
        ("typing.Literal['a', 'b'], NoneType", "a or b or null"),
        ("<class 'float'>", "a value of type float"),
        ("<class 'int'>, NoneType", "a value of type int or null"),
    ],
)
def test_types_are_said_in_words(kind, words):
    assert wanted(kind) == words


def test_a_constructors_arguments_include_those_of_the_base_that_takes_the_rest():
    assert parameters("fl_lightning.methods.FedProx") == ["mu"]
    names = parameters("fl_lightning.data.PACS")
    assert {"test_per_class", "image_size", "root", "batch_size", "num_clients"} <= set(names)
    assert "kwargs" not in names


def test_known_classes_are_ours_and_concrete():
    names = {kind.__name__ for kind in subclasses(Method)}
    assert {"FedProx", "MOON"} <= names
    assert "MethodList" not in names
    assert known_for("fit.method").startswith("one of DPFedAvg, DeCov")
    assert known_for("fit.model") == "one of ImageClassifier, or "
    assert known_for("fit.weights") == ""


def test_the_inner_message_is_told_with_key_value_and_hint():
    text = """
        Parser key "method": Does not validate ... class_path 'fl_lightning.methods.FedProx': Parser key "mu":
        Expected a <class 'float'>. Got value: x - and more"""
    assert shorten(text) == "FedProx.mu='x': give a value of type float"
    text = """Parser key "data": class_path 'fl_lightning.methods.FedProx': Option 'nu' is not accepted"""
    assert shorten(text) == "data: FedProx has no 'nu'; it takes mu"
    assert shorten("unrecognized arguments: a.yaml --x") == "a.yaml: no key stands before it; give --config a.yaml"
    assert shorten("unrecognized arguments: 3") == "3: no key stands before it; give --KEY before its value"
    assert shorten("the following arguments are required: fit.data").startswith("data: it is required; give a config")
    assert shorten("unrecognized arguments: --x") == "no such key (--help lists them): --x"


def test_what_is_not_known_stays_on_one_line():
    assert shorten("first\n  second") == "first second"


@pytest.mark.parametrize(
    ("inner", "line"),
    [
        (
            "Problem with given class_path 'fl_lightning.callbacks.EarlyStopping': "
            "the following arguments are required: monitor - Not a valid",
            "EarlyStopping.monitor: it is required; give a value",
        ),
        (
            "Problem with given class_path 'mine.Nope': No module named 'mine' - Expected a",
            "callbacks='mine.Nope': No module named 'mine'; give one of BatchNormGap, BestCheckpoint",
        ),
        (
            "Problem with given class_path 'mine.Nope': module 'mine' has no attribute 'Nope' - Expected a",
            "callbacks='mine.Nope': module 'mine' has no attribute 'Nope'; give one of BatchNormGap, BestCheckpoint",
        ),
        (
            "Import path does not correspond to a subclass of Callback - Expected a Given value: collections.Counter",
            "callbacks='collections.Counter': it is no subclass of Callback; give one of BatchNormGap, BestCheckpoint",
        ),
    ],
)
def test_a_class_that_cannot_be_built_is_one_line_with_a_hint(inner, line):
    text = f'Parser key "callbacks": Does not validate against any of the Union subtypes Errors: - {inner}'
    assert shorten(text).startswith(line)
