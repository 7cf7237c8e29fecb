"""Digests of files, and of a user's source code without its comments.

A user's source files are those outside this package, the standard library and ``site-packages``. They are identified by
their module names, so that a project may lie elsewhere on another machine. Nothing here imports such a module.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from fl_lightning.utilities.errors import is_user_code

Code = dict[str, str]
# hexadecimal digits of a digest
DIGEST_LENGTH = 16
SCRIPT = "__main__"
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# specification and source of each module when it was first asked for
_READ: dict[str, tuple[object, bytes | None]] = {}


def code_of(modules: Mapping[str, set[str]]) -> Code:
    """Return a digest of each user's module among ``modules`` and of all their imports, also within functions.

    Args:
        modules: names of modules, with the names in each that are used. Of the script itself, only the statements that
            define these names, or are needed by them, count; the other lines configure the run.
    """
    waiting, code = list(modules), Code()
    while waiting:
        name = waiting.pop()
        if name in code or (text := read_source(name, loaded=True)) is None:
            continue
        tree = parsed(text)
        parts = {name: tree}
        if name == SCRIPT:
            parts = {f"{name}.{defined}": definitions(tree, {defined}) for defined in modules[name]}
        for part, tree in parts.items():
            code[part] = source_digest(tree)
            waiting += [module for module in imports_of(tree, name) if module != SCRIPT]
    return dict(sorted(code.items()))


def digest_now(module: str) -> str | None:
    """Return the digest of a module's present source; None if the user has no such file."""
    text = read_source(module)
    return None if text is None else source_digest(parsed(text))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def file_digest(name: str) -> str | None:
    """Return 16 digits that stand for a file's contents; None if no file of this name can be read."""
    with suppress(OSError, ValueError):
        return file_sha256(Path(name))[:DIGEST_LENGTH] if os.path.isfile(name) else None
    return None


def is_own_module(name: str) -> bool:
    """Return whether a module's outermost package is the user's; a module that cannot be found counts as such."""
    spec = specification(name.split(".")[0])
    places = [] if spec is None else [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return spec is None or any(map(is_user_code, places))


def read_source(module: str, loaded: bool = False) -> bytes | None:
    """Return the present source of a user's module, or the ``loaded`` source; None for any other module.

    A file may be edited after the import, so the source read at the first call counts as the loaded one.
    """
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if loaded and module in sys.modules and module in _READ and _READ[module][0] is spec:
        return _READ[module][1]
    path, text = source_file(module), None
    if path is not None and path.endswith(".py") and is_user_code(path):
        with suppress(OSError):
            text = Path(path).read_bytes()
    if loaded:
        _READ[module] = spec, text
    return text


def source_file(module: str) -> str | None:
    """Return the file of a module, loaded or not; parent packages are not imported."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    top, *submodules = module.split(".")
    spec = specification(top)
    for part in submodules:
        spec = None if spec is None else PathFinder.find_spec(part, spec.submodule_search_locations or [])
    return None if spec is None else spec.origin


def specification(top: str) -> Any:
    """Return the specification of a module without a parent; None if it cannot be found."""
    importlib.invalidate_caches()  # a file may be new
    with suppress(ImportError, ValueError, AttributeError):
        return find_spec(top)
    return None


# ------------------------------------------------------------------ source as a tree
def parsed(text: bytes) -> ast.Module:
    """Return source as a tree; invalid source as one constant."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(text)
    return ast.Module([ast.Expr(ast.Constant(text + b"\n"))], [])


def source_digest(tree: ast.Module) -> str:
    """Return a digest of source without comments, docstrings and layout."""
    text = repr(normalized_ast(tree)).encode("utf-8", "backslashreplace")
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
    filled = [name for name, inner in fields.items() if inner not in (None, [])]
    return (type(value).__name__, *((name, normalized_ast(fields[name])) for name in filled))


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
    """Return the statements of a script that define some names, and all statements that they need."""
    required, number, statements = set(names), -1, list[ast.stmt]()
    while number != len(required):
        number = len(required)
        statements = [part for part in tree.body if required & names_assigned_by(part)]
        for node in ast.walk(ast.Module(statements, [])):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                required.add(node.id)
    return ast.Module(statements, [])


def names_assigned_by(statement: ast.stmt) -> set[str]:
    """Return the names to which a statement of a module gives a value."""
    names = set()
    for node in [statement] if isinstance(statement, DEFINITIONS) else ast.walk(statement):
        match node:
            case ast.Name(name, ast.Store()) | ast.ClassDef(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                names.add(name)
            case ast.alias(name, asname):
                names.add((asname or name).split(".")[0])
    return names
