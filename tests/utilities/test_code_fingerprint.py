"""Which source files of a user a run depends on, and what counts of them."""

import importlib
import sys

import pytest

from fl_lightning.utilities.code_fingerprint import code_of, digest_now, is_own_module

METHOD = '''
"""A method."""
import json
from .helpers import shrink  # its own

class Mine:
    """Shrinks values."""

    def act(self, value):
        from project.late import shift
        return shift(shrink(value))
'''
FILES = {
    "project/__init__.py": "",
    "project/method.py": METHOD,
    "project/helpers.py": "from project import numbers\n\ndef shrink(value):\n    return value * numbers.SHARE\n",
    "project/numbers.py": "SHARE = 0.5\n",
    "project/late.py": "def shift(value):\n    return value + 1\n",
    "project/other.py": "def unused():\n    return 3\n",
}
NAMES = ["project", "project.helpers", "project.late", "project.method", "project.numbers"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a package that can be imported; after the test it is forgotten."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "project"
    for name in [name for name in sys.modules if name.split(".")[0] == "project"]:
        del sys.modules[name]


def code():
    return code_of({"project.method": {"Mine"}})


def test_all_that_a_module_imports_counts_wherever_it_does_so(project):
    assert list(code()) == NAMES
    importlib.import_module("project.method")
    assert list(code()) == NAMES  # some of them are loaded now
    (project / "late.py").unlink()
    assert digest_now("project.late") is None and list(code()) == [name for name in NAMES if name != "project.late"]


def test_a_change_in_any_of_them_is_one(project):
    for name in NAMES:
        before = code()
        path = project / "__init__.py" if name == "project" else project / f"{name.split('.')[1]}.py"
        path.write_text(f"{path.read_text()}\nANOTHER = 1\n")
        assert [one for one in NAMES if digest_now(one) != before[one]] == [name]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('"""A method."""', '"""A method that does\n\nmore."""', True),
        ('    """Shrinks values."""\n', "", True),
        ("# its own", "# of the project", True),
        ("shift(shrink(value))", "shift(\n            shrink(value)\n        )", True),
        ("return shift", "return -shift", False),
        (")", "", False),  # no valid code
    ],
)
def test_what_the_code_does_counts_and_not_its_comments_docstrings_and_layout(project, old, new, same):
    before = digest_now("project.method")
    assert old in METHOD
    (project / "method.py").write_text(METHOD.replace(old, new))
    assert (digest_now("project.method") == before) is same


def test_a_file_counts_as_it_was_loaded_until_it_is_loaded_again(project):
    module = importlib.import_module("project.numbers")
    before = code()
    (project / "numbers.py").write_text("SHARE = 0.25\n")
    assert code() == before and digest_now("project.numbers") != before["project.numbers"]
    importlib.reload(module)
    assert code()["project.numbers"] == digest_now("project.numbers")


def test_the_package_the_standard_library_and_installed_packages_do_not_count():
    names = ("fl_lightning.core.method", "json", "torch", "nowhere.at.all")
    assert code_of({name: set() for name in names}) == {}
    assert [is_own_module(name) for name in names] == [False, False, False, True]


SCRIPT = """
import math
import plots
SCALE = 2
def half(x): return x / SCALE
class Net:
    def step(self, x): return half(x) + math.pi
class Stops:
    def __init__(self): self.at = math.e - ROUNDS
def main():
    fit(Net(), max_rounds=ROUNDS)
ROUNDS = 3
main()
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("ROUNDS = 3", "ROUNDS = 9", True),
        ("max_rounds=ROUNDS", "max_rounds=9", True),
        ("SCALE = 2", "SCALE = 3", False),
        ("math.pi", "math.e", False),
    ],
)
def test_of_the_script_only_what_the_objects_need_counts(tmp_path, monkeypatch, old, new, same):
    def digest(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        main = type(sys)("__main__")
        main.__file__, main.__spec__ = str(path), importlib.machinery.ModuleSpec("__main__", None)
        monkeypatch.setitem(sys.modules, "__main__", main)
        return code_of({"__main__": {"Net"}}), code_of({"__main__": {"Net", "Stops"}})

    assert SCRIPT.count(old) == 1
    alone, beside_another = digest(SCRIPT)
    assert list(alone) == ["__main__.Net"]
    assert beside_another.items() > alone.items()
    assert (alone == digest(SCRIPT.replace(old, new))[0]) is same
