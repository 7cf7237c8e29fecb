"""Makes docs/methods.md of the docstrings of the methods and of docs/ledger.yaml: python docs/make_methods.py"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import jinja2
import yaml
from docstring_parser import parse

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fl_lightning import callbacks, methods, optim  # found through the path above

DOCS = Path(__file__).resolve().parent

TEMPLATE = """\
# Methods: what is computed, and how far it is the paper's

Made by `python docs/make_methods.py` from the docstrings and `docs/ledger.yaml`; a test fails where it is out of date,
or where a method has no entry. The column of the authors' code names other codes where there is none or they differ.
{% for part in parts %}
## {{ part.name }}

{{ part.cites }}
{% if part.equation %}
{{ part.equation }}
{% endif %}
{{ part.summary }}
{% if part.arguments %}
| argument | default | meaning |
|---|---|---|
{% for argument in part.arguments -%}
| `{{ argument.name }}` | `{{ argument.default }}` | {{ argument.meaning }} |
{% endfor %}{% endif %}
| what | the paper | the authors' code | here | switch |
|---|---|---|---|---|
{% for row in part.rows -%}
| {{ row | join(" | ") }} |
{% endfor %}
Proved by
{% for file, test in part.tests %}
- [`{{ test }}`](../tests/{{ file }})
{%- endfor %}
{% endfor %}"""


def find(name: str) -> type | None:
    """The class of this name; None for FedAvg, the empty list."""
    return next((vars(module)[name] for module in (methods, optim, callbacks) if name in vars(module)), None)


def markdown(text: str) -> str:
    """A docstring's inline marks in Markdown, on one line."""
    text = re.sub(r":math:`([^`]*)`", lambda found: f"${' '.join(found[1].split())}$", text)
    text = re.sub(r":(?:class|meth|attr):`([^`]*)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def equation(text: str) -> str:
    """The first display formula of a module's docstring."""
    found = re.search(r"\.\. math::(.*?)(?=\n\S|\Z)", text, re.DOTALL)
    lines = " ".join(found[1].split()) if found else ""
    return f"$$\n{lines}\n$$" if lines else ""


def arguments(kind: type) -> list[dict[str, Any]]:
    """Name, default and meaning of each argument, from signature and docstring."""
    said = {item.arg_name: item.description for item in parse(inspect.getdoc(kind) or "").params}
    given = [p for p in inspect.signature(kind).parameters.values() if p.default is not p.empty]
    return [{"name": p.name, "default": p.default, "meaning": markdown(said[p.name] or "")} for p in given]


def summary(kind: type) -> str:
    """What stands before the arguments."""
    text = (inspect.getdoc(kind) or "").split("\nArgs:")[0].split("\nRaises:")[0]
    return "\n\n".join(markdown(paragraph) for paragraph in text.strip().split("\n\n"))


def entry(name: str, found: dict[str, Any]) -> dict[str, Any]:
    kind, tests = find(name), [test.split("::") for test in found["tests"]]
    part = {"name": name, "rows": found["rows"], "tests": tests}
    if kind is None:
        return part | {"cites": found["cites"] + ".", "summary": "The empty list.", "equation": "", "arguments": []}
    about = inspect.getdoc(sys.modules[kind.__module__]) or ""
    own = {"equation": equation(about), "arguments": arguments(kind)}
    return part | own | {"cites": markdown(about.split("\n\n")[0]), "summary": summary(kind)}


def make() -> str:
    """The text of docs/methods.md."""
    ledger = yaml.safe_load((DOCS / "ledger.yaml").read_text())
    return jinja2.Template(TEMPLATE).render(parts=[entry(*item) for item in ledger.items()]).rstrip() + "\n"


if __name__ == "__main__":
    (DOCS / "methods.md").write_text(make())
