"""The names in the docstrings are those of the code."""

import builtins
import inspect
import pkgutil
import re
from importlib import import_module

from docstring_parser import parse

import fl_lightning


def documented():
    """Classes and functions of the package, and the functions of its classes, by qualified name."""
    for info in pkgutil.walk_packages(fl_lightning.__path__, "fl_lightning."):
        if info.name.endswith("__main__"):
            continue
        module = import_module(info.name)
        for part in vars(module).values():
            if getattr(part, "__module__", "") == info.name and (inspect.isclass(part) or inspect.isfunction(part)):
                members = vars(part).values() if inspect.isclass(part) else ()
                functions = (getattr(member, "__func__", member) for member in members)
                for own in (part, *filter(inspect.isfunction, functions)):
                    yield f"{info.name}.{own.__qualname__}", own


def attributes(kind):
    """Names that a class or one of its bases assigns, annotates or defines."""
    code = "".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("fl_lightning"))
    return {*dir(kind), *re.findall(r"\bself\.(\w+)\b(?=[^=\n]*=)", code), *re.findall(r"^ {4}(\w+):", code, re.M)}


def test_args_and_attributes_are_names_of_the_code():
    wrong, checked = [], 0
    for name, part in documented():
        for entry in parse(vars(part).get("__doc__") or part.__doc__ or "").params:
            kind, *_ = entry.args
            known = attributes(part) if kind == "attribute" else inspect.signature(part).parameters
            checked += 1
            wrong += [f"{name}: {kind} {one}" for one in re.findall(r"\w+", entry.arg_name) if one not in known]
    assert wrong == [] and checked > 500


def test_what_docstrings_raise_are_names_of_the_code():
    known = {*dir(builtins), "pickle.UnpicklingError", *(part.__name__ for _, part in documented())}
    raised = {(name, entry.type_name) for name, part in documented() for entry in parse(part.__doc__ or "").raises}
    assert [where for where in sorted(raised) if where[1] not in known] == [] and len(raised) > 100
