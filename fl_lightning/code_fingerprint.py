"""Digests of a user's source code, without its comments.

A user's source files are those outside this package, the standard library and ``site-packages``. They are known by the
names of their modules, so that a project may lie elsewhere on another machine. Nothing here imports such a module.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from fl_lightning.errors import is_users

Code = dict[str, str]
# hexadecimal digits of a digest
DIGEST_LENGTH = 16
SCRIPT = "__main__"
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# specification and source of each module when it was first asked for
_READ: dict[str, tuple[object, bytes | None]] = {}


def code_of(modules: Mapping[str, set[str]]) -> Code:
    """Return a digest of each user's module among some and of all that they import, within functions, too.

    Args:
        modules: names of modules, with the names in each that are used. Of the script itself, only the statements that
            these need count, for each name apart: the other lines say how a run is carried out.
    """
    waiting, code = list(modules), Code()
    while waiting:
        name = waiting.pop()
        if name in code or (text := loaded_source(name)) is None:
            continue
        tree = parsed(text)
        parts = {name: tree}
        if tree is not None and name == SCRIPT:
            parts = {f"{name}.{used}": definitions(tree, {used}) for used in modules[name]}
        for part, part_tree in parts.items():
            code[part] = source_digest(text, part_tree)
            if part_tree is not None:
                waiting += [module for module in imports_of(part_tree, name) if module != SCRIPT]
    return dict(sorted(code.items()))


def digest_now(module: str) -> str | None:
    """Return the digest of a module's present source; None if the user has no such file."""
    text = read_source(module)
    return None if text is None else source_digest(text, parsed(text))


def is_own_module(name: str) -> bool:
    """Return whether a module is the user's, judged by its outermost package; one that cannot be found was."""
    spec = specification(name.split(".")[0])
    places = [] if spec is None else [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return spec is None or any(map(is_users, places))


def loaded_source(module: str) -> bytes | None:
    """Return the source of a user's module when it was first asked for after its import: a file may be edited later."""
    if module not in sys.modules:
        return read_source(module)
    spec, known = getattr(sys.modules[module], "__spec__", None), _READ.get(module)
    if known is None or known[0] is not spec:
        known = _READ[module] = spec, read_source(module)
    return known[1]


def read_source(module: str) -> bytes | None:
    """Return the present source of a user's module; None for any other module."""
    path = source_file(module)
    if path is None or not path.endswith(".py") or not is_users(path):
        return None
    with suppress(OSError):
        return Path(path).read_bytes()
    return None


def source_file(module: str) -> str | None:
    """Return the file of a module, loaded or not; parent packages are not imported."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    top, *rest = module.split(".")
    spec = specification(top)
    for part in rest:
        spec = None if spec is None else PathFinder.find_spec(part, spec.submodule_search_locations or [])
    return None if spec is None else spec.origin


def specification(top: str) -> Any:
    """Return the specification of a module without a parent; None if it cannot be found."""
    importlib.invalidate_caches()  # a file may be new
    with suppress(ImportError, ValueError, AttributeError):
        return find_spec(top)
    return None


# ------------------------------------------------------------------ source as a tree
def parsed(text: bytes) -> ast.Module | None:
    """Return source as a tree; None if it is invalid."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(text)
    return None


def source_digest(text: bytes, tree: ast.Module | None) -> str:
    """Return a digest of source without comments, docstrings and layout; of its bytes if it is invalid."""
    with suppress(RecursionError):
        text = text if tree is None else repr(normalized_ast(tree)).encode("utf-8", "backslashreplace")
    return hashlib.sha256(text).hexdigest()[:DIGEST_LENGTH]


def normalized_ast(value: Any) -> Any:
    """Return a tree as nested tuples, without positions and docstrings.

    Unlike ``ast.dump``, it leaves out empty fields, since each version of Python adds some.
    """
    if isinstance(value, list):
        return tuple(map(normalized_ast, value))
    if not isinstance(value, ast.AST):
        return value
    fields = dict(ast.iter_fields(value))
    if isinstance(value, (ast.Module, *DEFINITIONS)) and ast.get_docstring(value, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    return (
        type(value).__name__,
        *((name, normalized_ast(inner)) for name, inner in fields.items() if inner not in (None, [])),
    )


def imports_of(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield the modules that a module may import anywhere, with the packages around them."""
    package = module if (source_file(module) or "").endswith("__init__.py") else module.rpartition(".")[0]
    names = [module]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            with suppress(ImportError):  # beyond the outermost package
                base = resolve_name("." * node.level + (node.module or ""), package)
                names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    for name in dict.fromkeys(names):
        parts = name.split(".")
        yield from (".".join(parts[:number]) for number in range(1, len(parts) + 1))


def definitions(tree: ast.Module, names: set[str]) -> ast.Module:
    """Return the statements of a script that define some names, and those that these need."""
    wanted, needed, before = set(names), set[ast.stmt](), -1
    while before != len(needed):
        before = len(needed)
        for statement in tree.body:
            if statement not in needed and not assigned_names(statement).isdisjoint(wanted):
                needed.add(statement)
                loads = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
                wanted |= {node.id for node in loads if isinstance(node.ctx, ast.Load)}
    return ast.Module([statement for statement in tree.body if statement in needed], [])


def assigned_names(statement: ast.stmt) -> set[str]:
    """Return the names to which a statement gives a value."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    nodes = list(ast.walk(statement))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.name for node in nodes if isinstance(node, DEFINITIONS)}
    return names | {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
