"""Make docs/methods.md from the docstrings of the methods, docs/ledger.yaml and the cells of experiments/overview.

python docs/make_methods.py [--output FILE]

Citation, equation, summary and arguments come from the docstrings; changes, URLs of paper and code, the comparison with
them and the tests come from the ledger; costs and effects on the spectra come from the cells,
which ``python cli.py bench experiments/overview/suite.yaml --save experiments/overview`` stores.
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

from fl_lightning import callbacks, methods, models, optim  # the line above makes them importable
from fl_lightning.bench import load_suite
from fl_lightning.bench.cells_csv import read_cells, stored_cells

DOCS = Path(__file__).resolve().parent
OVERVIEW = DOCS.parent / "experiments" / "overview"
RANK = "rank/representation/effective"

TEMPLATE = """\
# Methods: computations, and differences from the papers

| method | idea | changes | costs in addition to FedAvg | effective rank |
|---|---|---|---|---|
{% for part in parts -%}
| {{ part.overview | join(" | ") }} |
{% endfor %}
*Costs*: floating-point operations of a local step, bytes that the clients send, and client memory between visits, in
sizes of the model. *Effective rank*: of the representations after the last round, as a difference to FedAvg on equal
seeds and partitions: the mean, and in brackets the least and the largest of five seeds. A higher rank
[does not mean a higher accuracy](findings.md#on-digits-a-higher-rank-does-not-go-with-a-higher-accuracy).
Other data, networks and coefficients lead to other numbers;
[the papers' figures](paper_figures.md) have spectra of CIFAR-10, and [speed](speed.md#what-a-method-costs) has seconds.
All numbers are from [one suite](../experiments/overview/suite.yaml):

{{ protocol | wordwrap(120) }}

The methods combine [as a list](composing.md#methods), and a coefficient of 0 gives FedAvg, bit for bit, unless stated
otherwise. Below, a table for each method lists the differences between paper, published code and this package. Names in
brackets identify code by others; the link above a table leads to the authors' code. A dash means that the source does
not mention it, a dagger (†) that we could not read the paper's text. The last column names the argument or key that
changes the behaviour.
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
{% endfor %}{% endif %}{% if part.memory_keys %}
Kept for each client, in `client.memory(method)` (callbacks: `trainer.client.memories()[k]["{{ part.name | lower }}"]`):
{% for key, meaning in part.memory_keys.items() %}
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
    return next((vars(module)[name] for module in (methods, optim, callbacks, models) if name in vars(module)), None)


def markdown(text: str) -> str:
    """A docstring's text as Markdown, on one line."""
    text = re.sub(r":math:`([^`]*)`", lambda math: f"${' '.join(math[1].split())}$", text)
    text = re.sub(r":(?:class|meth|attr):`([^`]*)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def equation(text: str) -> str:
    """Return the first display formula of a module's docstring, in Markdown; may be empty."""
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


def sentence(kind: type) -> str:
    """The first sentence of a class's docstring."""
    return re.split(r"(?<!\\)[.:;]\s", summary(kind))[0].rstrip(".") + "."


def links(facts: dict[str, Any]) -> str:
    """Return the URLs of paper and code, in Markdown; may be empty."""
    return " · ".join(f"[{key}]({facts[key]})" for key in ("paper", "code") if key in facts)


def measured() -> dict[str, list[dict[str, float]]]:
    """The metrics of the last round of each seed, by the method's name."""
    suite, file = load_suite(OVERVIEW / "suite.yaml"), OVERVIEW / "overview-suite.cells.csv"
    results, found = read_cells(file), {}
    for cell in sorted(stored_cells(file, suite), key=lambda cell: cell.seed):
        found.setdefault(cell.labels["method"], []).append(results[cell.digest].metrics)
    return found


def cost(own: dict[str, float], fedavg: dict[str, float]) -> str:
    """Return the additional costs of a method in a round, compared with FedAvg."""
    operations = 100 * own["cost/flops_extra"] / (own["cost/flops"] - own["cost/flops_extra"])
    sent, kept = own["bytes/up"] / fedavg["bytes/up"], own["cost/client_state"] * own["clients"] / fedavg["bytes/up"]
    parts = {
        f"{operations:+.0f} % operations": round(operations) != 0,
        f"sends {sent:.2f} times as much" if sent else "sends nothing": abs(sent - 1) > 0.005,
        f"keeps {kept:.2f} of a model": kept > 0,
    }
    return ", ".join(text for text, differs in parts.items() if differs) or "nothing"


def rank(own: list[dict[str, float]], fedavg: list[dict[str, float]]) -> str:
    """The effective rank: FedAvg's own, else the difference to it; mean, least and largest over the seeds."""
    values = [one[RANK] - (0 if own is fedavg else base[RANK]) for one, base in zip(own, fedavg, strict=True)]
    sign = "" if own is fedavg else "+"
    mean, least, most = (f"{one:{sign}.1f}" for one in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({least} to {most})"


def entry(name: str, facts: dict[str, Any], runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the template's values for one method, from its ``facts`` in the ledger and the ``runs`` of all methods."""
    kind, tests = find(name), [test.split("::") for test in facts["tests"]]
    part = {"name": name, "links": links(facts), "rows": facts["rows"], "tests": tests}
    changes = ", ".join(facts.get("changes", ["nothing"]))
    numbers = (cost(runs[name][0], runs["FedAvg"][0]), rank(runs[name], runs["FedAvg"])) if name in runs else ("-", "-")
    averages = "Averages the clients' weights by their examples."
    part["overview"] = [f"[{name}](#{name.lower()})", sentence(kind) if kind else averages, changes, *numbers]
    if kind is None:
        empty = "FedAvg is the empty list of methods."
        return part | {"cites": facts["cites"] + ".", "summary": empty, "equation": "", "arguments": []}
    about = inspect.getdoc(sys.modules[kind.__module__]) or ""
    own = {"equation": equation(about), "arguments": arguments(kind), "memory_keys": getattr(kind, "memory_keys", {})}
    cites = f"{name}: {facts['cites']}." if "cites" in facts else markdown(about.split("\n\n")[0])
    return part | own | {"cites": cites, "summary": summary(kind)}


def make() -> str:
    """The text of docs/methods.md."""
    ledger, runs = yaml.safe_load((DOCS / "ledger.yaml").read_text()), measured()
    (protocol,) = load_suite(OVERVIEW / "suite.yaml").notes
    parts = [entry(name, facts, runs) for name, facts in ledger.items()]
    return jinja2.Template(TEMPLATE).render(parts=parts, protocol=protocol).rstrip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DOCS / "methods.md")
    parser.parse_args().output.write_text(make())
