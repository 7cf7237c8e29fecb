"""Make docs/methods.md from the docstrings of the methods and docs/ledger.yaml.

python docs/make_methods.py [--output FILE]

Citation, equation, summary and arguments come from the docstrings; the URLs of paper and code, the comparison with them
and the tests come from the ledger.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import jinja2
import yaml
from docstring_parser import parse

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fl_lightning import callbacks, methods, optim  # the line above makes them importable

DOCS = Path(__file__).resolve().parent

TEMPLATE = """\
# Methods: what is computed, and how far it is the paper's

This page is made by `python docs/make_methods.py` from the docstrings and `docs/ledger.yaml`; a test fails if it is out
of date or if a method has no entry. In the tables, names in brackets say whose code is meant where it is not the
authors' own, to which the link above a table leads. A dash means that the source says nothing or that there is no such
thing. The last column names the argument or key that changes the behaviour.
{% for part in parts %}
## {{ part.name }}

{{ part.cites }}
{% if part.links %}
{{ part.links }}
{% endif %}{% if part.equation %}
{{ part.equation }}
{% endif %}
{{ part.summary }}
{% if part.arguments %}
| argument | default | meaning |
|---|---|---|
{% for argument in part.arguments -%}
| `{{ argument.name }}` | `{{ argument.default }}` | {{ argument.meaning }} |
{% endfor %}{% endif %}{% if part.remembers %}
Kept for each client, in `client.memory(method)` (callbacks: `trainer.client.memories()[k]["{{ part.name | lower }}"]`):
{% for key, meaning in part.remembers.items() %}
- `{{ key }}`: {{ meaning }}
{%- endfor %}
{% endif %}
| what | paper | code compared with | here | changed by |
|---|---|---|---|---|
{% for row in part.rows -%}
| {{ row | join(" | ") }} |
{% endfor %}
Tested by
{% for file, test in part.tests %}
- [`{{ test }}`](../tests/{{ file }})
{%- endfor %}
{% endfor %}"""


def find(name: str) -> type | None:
    """The class of this name; None for FedAvg, the empty list."""
    return next((vars(module)[name] for module in (methods, optim, callbacks) if name in vars(module)), None)


def markdown(text: str) -> str:
    """A docstring's text as Markdown, on one line."""
    text = re.sub(r":math:`([^`]*)`", lambda math: f"${' '.join(math[1].split())}$", text)
    text = re.sub(r":(?:class|meth|attr):`([^`]*)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def equation(text: str) -> str:
    """The first display formula of a module's docstring, in Markdown; empty if there is none."""
    block = re.search(r"\.\. math::(.*?)(?=\n\S|\Z)", text, re.DOTALL)
    formula = " ".join(block[1].split()) if block else ""
    return f"$$\n{formula}\n$$" if formula else ""


def arguments(kind: type) -> list[dict[str, Any]]:
    """Name, default and meaning of each argument, from signature and docstring."""
    meanings = {item.arg_name: item.description for item in parse(inspect.getdoc(kind) or "").params}
    optional = [p for p in inspect.signature(kind).parameters.values() if p.default is not p.empty]
    return [{"name": p.name, "default": p.default, "meaning": markdown(meanings[p.name] or "")} for p in optional]


def summary(kind: type) -> str:
    """The docstring of a class up to its arguments."""
    text = (inspect.getdoc(kind) or "").split("\nArgs:")[0].split("\nRaises:")[0]
    return "\n\n".join(markdown(paragraph) for paragraph in text.strip().split("\n\n"))


def links(facts: dict[str, Any]) -> str:
    """The URLs of paper and code, in Markdown; empty if there are none."""
    return " · ".join(f"[{key}]({facts[key]})" for key in ("paper", "code") if key in facts)


def entry(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """What the template shows of one method; ``facts`` is its entry in the ledger."""
    kind, tests = find(name), [test.split("::") for test in facts["tests"]]
    part = {"name": name, "links": links(facts), "rows": facts["rows"], "tests": tests}
    if kind is None:
        empty = "FedAvg is the empty list of methods."
        return part | {"cites": facts["cites"] + ".", "summary": empty, "equation": "", "arguments": []}
    about = inspect.getdoc(sys.modules[kind.__module__]) or ""
    own = {"equation": equation(about), "arguments": arguments(kind), "remembers": getattr(kind, "remembers", {})}
    cites = f"{name}: {facts['cites']}." if "cites" in facts else markdown(about.split("\n\n")[0])
    return part | own | {"cites": cites, "summary": summary(kind)}


def make() -> str:
    """The text of docs/methods.md."""
    ledger = yaml.safe_load((DOCS / "ledger.yaml").read_text())
    return jinja2.Template(TEMPLATE).render(parts=[entry(*item) for item in ledger.items()]).rstrip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DOCS / "methods.md")
    parser.parse_args().output.write_text(make())
