"""Every public function has an example in its docstring, its arguments and a source."""

import doctest
import sys

import pytest

from fl_lightning import functional as F


@pytest.mark.parametrize("name", F.__all__)
def test_a_function_has_an_example(name):
    """``--doctest-modules`` runs it."""
    function = getattr(F, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name, sys.modules[function.__module__])
    assert test.examples


@pytest.mark.parametrize("name", F.__all__)
def test_a_function_names_its_arguments_and_its_module_has_a_source(name):
    function = getattr(F, name)
    assert "Args:" in function.__doc__ and "Returns:" in function.__doc__
    assert "https://" in sys.modules[function.__module__].__doc__
