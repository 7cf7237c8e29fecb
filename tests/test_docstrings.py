"""The names in the docstrings are those of the code, and variables say what they hold."""

import ast
import builtins
import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path

from docstring_parser import parse

import fl_lightning

PACKAGE = Path(fl_lightning.__file__).parent
# house rule: a variable says what it holds
FORBIDDEN = {"one", "given", "found", "told", "short"}
VAGUE = """
known own some held whole there here others other rest all_ both either each new old made kept left seen said wanted
asked taken used needed passed stored written read lost ours theirs mine same more most first last former present begun
ready done past apart alone shown chosen begin plain clean what thing things it them data item tmp
"""
# counts that may only fall
MOST_VAGUE, MOST_LONG_COMPREHENSIONS = 11, 126


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


def assigned(tree):
    """Variables that code assigns or loops over, with their lines."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return [(node.id, node.lineno) for node in names]


def long_comprehension_lines(tree, lines):
    """Numbers of the lines of 100 characters or more that hold a comprehension."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)):
            yield from (i for i in range(node.lineno, node.end_lineno + 1) if len(lines[i - 1]) >= 100)


def test_variables_say_what_they_hold_and_long_comprehensions_are_statements():
    forbidden, vague, long = [], 0, 0
    for path in PACKAGE.rglob("*.py"):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        tree = ast.parse(text)
        vague += sum(variable in VAGUE.split() for variable, _ in assigned(tree))
        long += len({*long_comprehension_lines(tree, text.splitlines())})
        arguments = [(node.arg, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.arg)]
        names = [*assigned(tree), *arguments]
        forbidden += [f"{name}:{line} {variable}" for variable, line in names if variable in FORBIDDEN]
    assert forbidden == []
    assert vague <= MOST_VAGUE and long <= MOST_LONG_COMPREHENSIONS
