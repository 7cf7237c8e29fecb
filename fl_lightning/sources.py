"""What the files of a user say: a digest of his source code without its comments, and one of any other file.

A user's source files are those outside this package, the standard library and ``site-packages``. They are known by the
names of their modules, so that a project may lie elsewhere on another machine. Nothing here imports such a module.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from fl_lightning.errors import is_users

Code = dict[str, str]
# hexadecimal digits of a digest
DIGEST_LENGTH = 16
SCRIPT = "__main__"
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# of each module, its specification and its source, as they were when it was first asked for
_READ: dict[str, tuple[object, bytes]] = {}


def code_of(modules: Mapping[str, set[str]]) -> Code:
    """The user's modules among some and all that they import, within functions, too, each with a digest of its source.

    Args:
        modules: names of modules, with the names in each that are used. Of the script itself, only what these need
            counts, for each apart: its other lines, and a callback more or less, say how a run is carried out.
    """
    waiting, code = list(modules), Code()
    while waiting:
        name = waiting.pop()
        if name in code or (text := loaded_source(name)) is None:
            continue
        parts = {name: parsed_source(text)}
        whole = parts[name]
        if whole is not None and name == SCRIPT:
            parts = {f"{name}.{used}": definitions(whole, {used}) for used in modules[name]}
        for part, tree in parts.items():
            code[part] = digest_of_source(text, tree)
            waiting += () if tree is None else [module for module in imports_of(tree, name) if module != SCRIPT]
    return dict(sorted(code.items()))


def digest_now(module: str) -> str | None:
    """The digest of a module's source as it is now; None where there is no such file of the user's any more."""
    text = read_source(module)
    return None if text is None else digest_of_source(text, parsed_source(text))


def is_own_module(name: str) -> bool:
    """Whether a module is the user's, as far as its first name shows; one that is nowhere was."""
    spec = specification(name.split(".")[0])
    places = [] if spec is None else [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return spec is None or any(map(is_users, places))


def loaded_source(module: str) -> bytes | None:
    """The source of a user's module as it was loaded: as it was when it was first asked for since then.

    A file may be edited while a process runs, which goes on with the code that it has loaded.
    """
    if module not in sys.modules:
        return read_source(module)
    spec, known = getattr(sys.modules[module], "__spec__", None), _READ.get(module)
    if known is None or known[0] is not spec:
        text = read_source(module)
        if text is None:
            return None
        known = _READ[module] = spec, text
    return known[1]


def read_source(module: str) -> bytes | None:
    """The source of a user's module as it is now; None of any other module, and where there is no such file."""
    path = file_of(module)
    if path is None or not path.endswith(".py") or not is_users(path):
        return None
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def file_of(module: str) -> str | None:
    """The file of a module, loaded or not."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    top, *rest = module.split(".")
    spec = specification(top)
    if spec is None or not rest:
        return spec.origin if spec is not None and spec.has_location else None
    for place in spec.submodule_search_locations or ():
        base = os.path.join(place, *rest)
        for path in (os.path.join(base, "__init__.py"), f"{base}.py"):
            if os.path.isfile(path):
                return path
    return None


def specification(top: str) -> Any:
    """Where a module without a parent lies; None where it is nowhere."""
    importlib.invalidate_caches()  # a file may be new
    try:
        return find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None


# ------------------------------------------------------------------ source as a tree
def parsed_source(text: bytes) -> ast.Module | None:
    """Source as a tree; None where it is not valid."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def digest_of_source(text: bytes, tree: ast.Module | None) -> str:
    """A digest of what source says, without comments, docstrings and layout; of its bytes where it is not valid."""
    with suppress(RecursionError):
        text = text if tree is None else repr(outline(tree)).encode("utf-8", "backslashreplace")
    return hashlib.sha256(text).hexdigest()[:DIGEST_LENGTH]


def outline(value: Any) -> Any:
    """A tree as nested tuples, without positions and docstrings.

    Empty fields are left out, as each version of Python adds some. That is why it is not ``ast.dump``.
    """
    if isinstance(value, list):
        return tuple(map(outline, value))
    if not isinstance(value, ast.AST):
        return value
    fields = dict(ast.iter_fields(value))
    if isinstance(value, (ast.Module, *DEFINITIONS)) and ast.get_docstring(value, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    return (
        type(value).__name__,
        *((name, outline(inner)) for name, inner in fields.items() if inner not in (None, [])),
    )


def imports_of(tree: ast.Module, module: str) -> Iterator[str]:
    """The names of the modules that a module may import, wherever it does so, with those that these lie in."""
    package = module if (file_of(module) or "").endswith("__init__.py") else module.rpartition(".")[0]
    names = [module]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:  # beyond the outermost package
                continue
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    for name in dict.fromkeys(names):
        parts = name.split(".")
        yield from (".".join(parts[:number]) for number in range(1, len(parts) + 1))


def definitions(tree: ast.Module, names: set[str]) -> ast.Module:
    """The statements of a script that define some names, and those that these need."""
    needed: set[ast.stmt] = set()
    wanted, before = set(names), -1
    while before != len(needed):
        before = len(needed)
        for statement in tree.body:
            if statement not in needed and not bound_by(statement).isdisjoint(wanted):
                needed.add(statement)
                loads = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
                wanted |= {node.id for node in loads if isinstance(node.ctx, ast.Load)}
    return ast.Module([statement for statement in tree.body if statement in needed], [])


def bound_by(statement: ast.stmt) -> set[str]:
    """The names that a statement gives a value."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    nodes = list(ast.walk(statement))
    imported = (alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names)
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined = {node.name for node in nodes if isinstance(node, DEFINITIONS)}
    return stored | defined | {(alias.asname or alias.name).split(".")[0] for alias in imported}


# ------------------------------------------------------------------ other files
def content_of(name: str) -> str | None:
    """A digest of what a file holds; None where there is no such file that can be read."""
    try:
        state = os.stat(name) if os.path.isfile(name) else None
        return None if state is None else _content(os.path.abspath(name), state.st_mtime_ns, state.st_size)
    except OSError:
        return None


@lru_cache
def _content(path: str, changed: int, size: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()[:DIGEST_LENGTH]
