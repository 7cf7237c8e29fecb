"""Every public function has an example in its docstring, and the examples run."""

import doctest
import sys

import pytest

from fl_lightning import functional as F


@pytest.mark.parametrize("name", F.__all__)
def test_the_example_of_a_function_runs(name):
    function = getattr(F, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name, sys.modules[function.__module__])
    assert test.examples, f"{name} has no example"
    report = []
    assert doctest.DocTestRunner().run(test, out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("name", F.__all__)
def test_a_function_names_its_arguments_and_its_module_has_a_source(name):
    function = getattr(F, name)
    assert "Args:" in function.__doc__ and "Returns:" in function.__doc__
    assert "https://" in sys.modules[function.__module__].__doc__
