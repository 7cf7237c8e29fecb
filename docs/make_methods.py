"""Make docs/methods.md, a page for each group of methods, and docs/libraries.md, the methods of other libraries.

python docs/make_methods.py [--output FOLDER]

Citation, equation, summary and arguments come from the docstrings; changes, URLs of paper and code, the comparison with
them and the tests come from docs/ledger.yaml; costs and effects on the spectra come from the cells of the
leaderboard. The methods of other libraries come from docs/libraries.yaml, and what was measured of them from
experiments/libraries.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import jinja2
import yaml
from docstring_parser import parse

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fl_lightning import callbacks, methods, models, optim  # the line above makes them importable
from fl_lightning.bench import load_suite
from fl_lightning.bench.cells_csv import stored_cells

DOCS = Path(__file__).resolve().parent
ROBUST_SUITE = DOCS.parent / "experiments" / "robust"
MEASURED = DOCS.parent / "experiments" / "libraries"
RANK = "rank/representation/effective"
# metrics of the last round by seed
Runs = dict[int, dict[str, float]]
# code with which the ledger compares methods of other authors
OTHERS = {"Chainer", "FL-bench", "Flower", "NIID-Bench", "PFLlib", "TFF", "fedjax", "fluke", "logit-adj-pytorch"}
OTHERS |= {"FLoRA", "FedBABU", "FedDecorr", "FedDyn", "FedEx-LoRA", "FedSOL", "FedUV", "MOON", "baseline of FLoRA"}
OTHERS |= {"Blades", "ByzFL", "FedETF's code", "FedRep's code", "RB-LoRA", "a port", "centered clipping's code", "flgo"}
OTHERS |= {"FLSim", "NVFlare", "Plato"}

# groups of methods, each with a page of its own: title and content
GROUPS = {
    "drift": ("Client drift", "Local training that stays near the common objective, and the server's step."),
    "representations": ("Representations", "Terms on activations, representations or predictions of a client's model."),
    "labels": ("Label skew", "Classifiers, logits and client weights for clients whose classes differ."),
    "personal": ("Personal models", "Parts of the model, or whole models, that stay with each client."),
    "adapters": ("Low-rank adapters", "Aggregation of LoRA adapters of a frozen model."),
    "robust": ("Robust aggregation and attacks", "Rules that see each client's update, and attackers to test them."),
    "asynchronous": ("Asynchronous servers", "Methods for updates of clients that trained from older models."),
}

INDEX = """\
# Methods

The methods combine [as a list](composing.md#methods), and a coefficient of 0 gives FedAvg, bit for bit, unless stated
otherwise. [Another table](libraries.md) shows which libraries have them. Each name leads to the method's equation,
arguments, tests, and differences between this package, the paper and published code.
{% for group, (title, content) in groups.items() %}
## {{ title }}

{{ content }} [Details](methods_{{ group }}.md)

| method | idea | changes | costs in addition to FedAvg | effective rank |
|---|---|---|---|---|
{% for part in parts if part.group == group -%}
| {{ part.overview | join(" | ") }} |
{% endfor %}{% endfor %}
*Costs*: floating-point operations of a local step, bytes that the clients send, and client memory between visits, in
sizes of the model. *Effective rank*: of the representations of digits after the last round, as a difference to FedAvg
on equal seeds and partitions: the mean, and in brackets the least and the largest of {{ seeds }} seeds. A
higher rank [does not mean a higher accuracy](findings.md#rank-and-accuracy-over-the-methods-no-consistent-relation).
Other data, networks and coefficients lead to other numbers;
[the papers' figures](paper_figures.md) have spectra of CIFAR-10, and [speed](speed.md#what-a-method-costs) has seconds.
All numbers are from the [leaderboard](leaderboard.md), which compares the methods' accuracies.

```{toctree}
:hidden:
{% for group in groups %}
methods_{{ group }}
{%- endfor %}
```
"""

PAGE = """\
# {{ title }}

{{ content }}
[All methods](methods.md) are in one table, with their costs and effective ranks.

The last table of a method lists the differences between this package, the paper and published code: the authors', to
which the link above the table leads, and code by others, whose name is in brackets. A dash means that the source does
not mention it, a dagger (†) that we could not read the paper's text. Its last column names the argument or key that
changes the behaviour.
{{ about }}{% for part in parts %}
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
| what | here | paper | authors' code | code by others | changed by |
|---|---|---|---|---|---|
{% for row in part.rows -%}
| {{ row | join(" | ") }} |
{% endfor %}
Tested by
{% for file, test in part.tests %}
- [`{{ test }}`](../tests/{{ file }})
{%- endfor %}
{% endfor %}"""

ROBUST = """
## Which rule withstands which attack

Test accuracy in percent, mean of the last five rounds and standard deviation over {{ seeds }} seeds, of
[one suite](../experiments/robust/suite.yaml):

| rule | {{ attacks | join(" | ") }} |
|---|{{ "---:|" * (attacks | length) }}
{% for row in rows -%}
| {{ row | join(" | ") }} |
{% endfor %}
{{ protocol | wordwrap(120) }}

SignFlip ruins the mean. MultiKrum, and NNM before TrimmedMean, leave the attackers out and average the others. Where
nobody attacks, the rules that drop clients or coordinates lose accuracy: under label skew, clients with rare classes
look like attackers. CenteredClipping equals the mean there, since its radius exceeds the honest changes. ALIE stays
within the spread of the honest changes, and costs little here.

Put the attack before `NNM`, and the rule last: `trainer.fit(model, data, ALIE(share=0.2), NNM(f=2), TrimmedMean(f=2))`.
The attackers are no part of the clients that `PersonalAccuracy` and `Scores` measure.
[Your own aggregation](own_aggregation.md) shows how to write another rule.
"""

# libraries in the README's table of features
COMPARED = ("Flower", "fluke", "pfl-research", "PFLlib")

LIBRARIES = """\
# Methods here and in other libraries

Which libraries have which methods, found by reading their files at the commits below, on {{ read }}. A method is
listed if it is here or in two of the libraries. A number refers to a measured difference from the paper.

| method | {{ libraries | join(" | ") }} | here |
|---|{{ "---|" * (libraries | length) }}---|
{% for row in rows -%}
| {{ row | join(" | ") }} |
{% endfor %}
FedFomo, FedPAC and FedGen are not available here.

## Measured differences

Small programs for [fluke](../experiments/libraries/fluke_methods.py),
[PFLlib](../experiments/libraries/pfllib_methods.py) and [FL-bench](../experiments/libraries/flbench_methods.py) run the
libraries' own classes on a small model and store what they measure. They use fluke 0.8.1 from PyPI, whose methods are
those of the commit below, and the other libraries at their commits.

{% for remark in remarks -%}
{{ loop.index }}. {{ remark }}
{% endfor %}
## Features

What each library has besides methods, by a file that has it; a dash means that we found none. In fluke, two equal runs
differ by {{ resumed[0] }} in their weights, and one that resumes after half of its rounds by {{ resumed[1] }}.

| feature | here | {{ compared | join(" | ") }} |
|---|---|{{ "---|" * (compared | length) }}
{% for row in feature_rows -%}
| {{ row | join(" | ") }} |
{% endfor %}
## Commits

| library | commit | of |
|---|---|---|
{% for name, (url, commit, date) in sources.items() -%}
| [{{ name }}]({{ url }}) | [`{{ commit[:8] }}`]({{ url }}/tree/{{ commit }}) | {{ date }} |
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


def measured() -> dict[str, dict[str, Runs]]:
    """The metrics of the last round of each seed, by data set and the method's name."""
    suite = load_suite("leaderboard")
    (cells, results), found = stored_cells(suite.finished, suite), dict[str, dict[str, Runs]]()
    for cell in sorted(cells, key=lambda cell: cell.seed):
        if results[cell.digest].state == "done":
            runs = found.setdefault(cell.labels["data"], {}).setdefault(cell.labels["method"], {})
            runs[cell.seed] = results[cell.digest].metrics
    return found


def spread(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """Mean and standard deviation."""
    deviation = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.fmean(values):.{digits}f}{deviation}"


def link(name: str, facts: dict[str, Any] | None, text: str | None = None) -> str:
    """Return a link to a method's section; the plain name without an entry in the ledger."""
    return f"[{text or name}](methods_{facts['group']}.md#{name.lower()})" if facts else name


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


def rank(own: Runs, fedavg: Runs) -> str:
    """The effective rank: FedAvg's own, else the difference to it; mean, least and largest over the seeds."""
    values = [run[RANK] - (0 if own is fedavg else fedavg[seed][RANK]) for seed, run in own.items() if seed in fedavg]
    sign = "" if own is fedavg else "+"
    mean, least, most = (f"{one:{sign}.1f}" for one in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({least} to {most})"


def entry(name: str, facts: dict[str, Any], runs: dict[str, Runs]) -> dict[str, Any]:
    """Return the template's values for one method, from its ``facts`` in the ledger and the ``runs`` of all methods."""
    kind, tests = find(name), [test.split("::") for test in facts["tests"]]
    rows = [(what, here, paper, *by_author(code, OTHERS), switch) for what, paper, code, here, switch in facts["rows"]]
    part = {"name": name, "group": facts["group"], "links": links(facts), "rows": rows, "tests": tests}
    changes = ", ".join(facts.get("changes", ["nothing"]))
    numbers = (
        (cost(runs[name][min(runs[name])], runs["FedAvg"][0]), rank(runs[name], runs["FedAvg"]))
        if name in runs
        else ("-", "-")
    )
    averages = "Averages the clients' weights by their examples."
    part["overview"] = [link(name, facts), sentence(kind) if kind else averages, changes, *numbers]
    if kind is None:
        empty = "FedAvg is the empty list of methods."
        return part | {"cites": facts["cites"] + ".", "summary": empty, "equation": "", "arguments": []}
    about = inspect.getdoc(sys.modules[kind.__module__]) or ""
    own = {"equation": equation(about), "arguments": arguments(kind), "memory_keys": getattr(kind, "memory_keys", {})}
    cites = f"{name}: {facts['cites']}." if "cites" in facts else markdown(about.split("\n\n")[0])
    return part | own | {"cites": cites, "summary": summary(kind)}


def by_author(code: str, others: set[str]) -> tuple[str, str]:
    """Divide statements about code into those about the authors' code and those about ``others``, named in brackets."""
    parts: dict[bool, list[str]] = {False: [], True: []}
    for part in code.split("; "):
        parts[any(bracket.split(", ")[0] in others for bracket in re.findall(r"\(([^()]*)\)", part))].append(part)
    return "; ".join(parts[False]) or "-", "; ".join(parts[True]) or "-"


def make() -> dict[str, str]:
    """Return the text of docs/methods.md and of each group's page, by file."""
    ledger, digits = yaml.safe_load((DOCS / "ledger.yaml").read_text()), measured()["Digits"]
    parts = [entry(name, facts, digits) for name, facts in ledger.items()]
    index = jinja2.Template(INDEX).render(groups=GROUPS, parts=parts, seeds=len(digits["FedAvg"]))
    pages = {"methods.md": index.rstrip() + "\n"}
    for group, (title, content) in GROUPS.items():
        of_group = [part for part in parts if part["group"] == group]
        about = make_robust() if group == "robust" else ""
        page = jinja2.Template(PAGE).render(title=title, content=content, about=about, parts=of_group)
        pages[f"methods_{group}.md"] = page.rstrip() + "\n"
    return pages


def make_robust() -> str:
    """Return the table of rules by attacks, with its protocol."""
    suite = load_suite(ROBUST_SUITE / "suite.yaml")
    cells, results = stored_cells(ROBUST_SUITE / "robust-suite.cells.csv", suite)
    accuracies = defaultdict[tuple[str, str], list[float]](list)
    for cell in cells:
        values = results[cell.digest].values
        last = [values[round_] for round_ in sorted(values)[-5:]]
        accuracies[cell.labels["rule"], cell.labels["attack"]].append(statistics.fmean(last))
    attacks, rules = suite.axes["attack"], suite.axes["rule"]
    rows = [[rule, *(spread(accuracies[rule, attack], 100) for attack in attacks)] for rule in rules]
    (protocol,) = suite.notes
    facts = {"attacks": [*attacks], "rows": rows, "seeds": len(suite.seeds), "protocol": protocol}
    return jinja2.Template(ROBUST).render(facts) + "\n"


def make_libraries() -> str:
    """The text of docs/libraries.md."""
    facts, ledger = (yaml.safe_load((DOCS / f"{name}.yaml").read_text()) for name in ("libraries", "ledger"))
    sources, values = facts["libraries"] | facts["others"], measured_values()
    rows, remarks = [], list[str]()
    for name, entries in facts["methods"].items():
        cells = []
        for library, (url, commit, _) in facts["libraries"].items():
            entry = entries.get(library, "-")
            file, *remark = [entry] if isinstance(entry, str) else entry
            remarks += [f"{name} in {library}: {text.format(*values[library, name])}." for text in remark]
            number = f" ({len(remarks)})" if remark else ""
            cells.append("-" if file == "-" else f"[yes]({url}/blob/{commit}/{file}){number}")
        here = f"no: {entries['missing']}" if "missing" in entries else "yes"
        rows.append([name, *cells, link(name, ledger[name], "yes") if name in ledger else here])
    feature_rows = []
    for name, entries in facts["features"].items():
        links = {library: "{}/blob/{}/".format(*sources[library]) for library in COMPARED}
        others = [f"[yes]({links[one]}{entries[one]})" if one in entries else "-" for one in COMPARED]
        feature_rows.append([name, f"[yes]({entries['here']})" if "here" in entries else "-", *others])
    made = {"rows": rows, "remarks": remarks, "compared": COMPARED, "feature_rows": feature_rows, "sources": sources}
    made["resumed"] = values["fluke", "resumed runs"]
    return jinja2.Template(LIBRARIES).render(**facts | made).rstrip() + "\n"


def measured_values() -> dict[tuple[str, str], list[str]]:
    """The numbers that the programs in experiments/libraries have stored, by library and method."""
    values = {}
    for path in sorted(MEASURED.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                values[row["library"], row["method"]] = [f"{float(x):.2g}" for x in row["values"].split()]
    return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DOCS)
    folder = parser.parse_args().output
    for file, text in make().items():
        (folder / file).write_text(text)
    (folder / "libraries.md").write_text(make_libraries())
