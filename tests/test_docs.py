"""The documents agree with the code and with each other."""

import ast
import inspect
import re
import shlex
import sys
from pathlib import Path

import lightning.pytorch
import pytest
import torch
import yaml
from helpers.runs import small_data, small_model, small_trainer
from helpers.tiers import sample
from lightning.pytorch import LightningModule

import fl_lightning
from fl_lightning import callbacks, data, methods, models, optim
from fl_lightning.cli import main

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from class_examples import example_of  # noqa: E402, found through the path above
from make_methods import find  # noqa: E402


def test_the_citation_has_the_version_and_the_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fl_lightning.__version__
    assert f"license = {citation['license']}\n" in (ROOT / "setup.cfg").read_text()
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_changes_have_the_present_version():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" and fl_lightning.__version__ in headings


LEDGER = yaml.safe_load((ROOT / "docs" / "ledger.yaml").read_text())


def test_every_method_has_an_entry_in_the_ledger_with_whole_rows_and_tests_that_exist():
    assert set(LEDGER) >= {"FedAvg", "CCVR", *methods.__all__, *optim.__all__}
    for name, entry in LEDGER.items():
        assert name == "FedAvg" or find(name) is not None
        assert entry["rows"] and entry["tests"]
        for row in entry["rows"]:
            assert len(row) == 5 and all(isinstance(cell, str) and cell for cell in row), row
        for test in entry["tests"]:
            file, function = test.split("::")
            assert re.search(rf"^def {function}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test


def test_every_method_is_compared_with_other_libraries_or_missing_for_a_reason():
    facts = yaml.safe_load((ROOT / "docs" / "libraries.yaml").read_text())
    compared, libraries = facts["methods"], facts["libraries"]
    assert compared.keys() >= LEDGER.keys()
    for name, entries in compared.items():
        here = name in LEDGER or find(name) is not None
        assert here + ("missing" in entries) == 1, name
        found = entries.keys() - {"missing"}
        assert found <= libraries.keys() and (here or len(found) > 1), name
    assert {"FedAMP", "FedFomo", "FedPAC", "FedGen"} <= {name for name, one in compared.items() if "missing" in one}


def python_of(page):
    """The Python code of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)


def test_a_switch_is_an_argument_or_a_key():
    for name in LEDGER.keys() - {"FedAvg"}:
        arguments = inspect.signature(find(name)).parameters
        for *_, switch in LEDGER[name]["rows"]:
            for part in re.split(r", (?![^[]*\])", switch) if switch != "-" else ():
                key = re.match("[a-z_.0-9]*", part)[0]
                assert key in arguments or key.partition(".")[0] in ("trainer", "model", "data"), (switch, key)


def test_the_ledger_and_the_docstrings_name_the_same_sources():
    """Local is from no paper, FedAvg is in the ledger alone, and server optimizers share one module."""
    of_modules = {}
    for name, entry in LEDGER.items():
        urls = {(key.capitalize(), entry[key]) for key in ("paper", "code") if key in entry}
        assert ("paper" in entry) == (name != "Local")
        if name != "FedAvg":
            of_modules.setdefault(find(name).__module__, set()).update(urls)
    for module, urls in of_modules.items():
        assert set(re.findall(r"^(Paper|Code): (\S+)", inspect.getdoc(sys.modules[module]), re.MULTILINE)) == urls


@pytest.mark.vectorized
def test_the_architecture_names_files_and_functions_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "fl_lightning"
    known = {f"{path.name}/" if path.is_dir() else path.name for path in package.rglob("*")}
    named = re.findall(r"`((?:\w+/)?\w+\.py|\w+/)`", text)
    assert [name for name in named if name.split("/")[-1] not in known and name not in known] == []
    defined = {name for path in package.rglob("*.py") for name in definitions(ast.parse(path.read_text()))}
    others = {*dir(LightningModule), *dir(lightning.pytorch), *(name.removesuffix("/") for name in known)}
    assert {*re.findall(r"`((?:[A-Z]\w+\.)?\w+)`", text)} <= defined | others


def definitions(tree, prefix=""):
    """Names that a module or a class defines: its own with the class before it, and the public ones also alone."""
    for part in tree.body:
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", part)]
        for name in (getattr(target, "id", getattr(target, "name", "")) for target in targets):
            yield f"{prefix}{name}"
            if not name.startswith("_"):
                yield name
        if isinstance(part, ast.ClassDef):
            yield from definitions(part, f"{part.name}.")


def test_the_modules_that_are_stable_have_a_page_each():
    stable = re.findall(
        r"^\| \[`(fl_lightning\.[\w.]+)`\]\((api/\w+\.md)\)", (ROOT / "docs/stability.md").read_text(), re.M
    )
    pages = [
        (module, f"api/{page.name}")
        for page in (ROOT / "docs" / "api").glob("*.md")
        for module in re.findall(r"automodule:: (\S+)", page.read_text())
    ]
    assert sorted(stable) == sorted(pages)


@pytest.mark.parametrize("workers", sample([1, 2], 1))
def test_the_callbacks_of_the_guide_log_what_they_say(tmp_path, workers):
    names = {}
    for code in python_of("own_callback"):
        exec(code, names)
    callbacks = [names[name]() for name in ("ClassAccuracy", "Personal", "Similarity")]
    trainer = small_trainer(tmp_path, callbacks=callbacks, max_rounds=2, devices=workers)
    data = small_data(eval_batch_size=50)
    trainer.fit(small_model(), data)
    counts = torch.cat([y for _, y in data.test_dataloader()]).bincount()
    accuracies = [trainer.metrics[f"class/{c}/accuracy"] for c in range(10)]
    whole = sum(float(n) * a for n, a in zip(counts, accuracies, strict=True)) / len(data.test_dataloader().rows)
    assert whole == pytest.approx(trainer.metrics["test/accuracy"])
    assert trainer.metrics["personal/accuracy"] > trainer.metrics["test/accuracy"]
    assert 0 < trainer.metrics["cka/round"] < 1
    assert "personal/accuracy" not in trainer.history[0]


EXAMPLES = {
    name: example_of(getattr(part, name))
    for part in (methods, callbacks, data, models, optim)
    for name in part.__all__
    if example_of(getattr(part, name)) is not None
}
CONFIGS = [config for config, _ in EXAMPLES.values()]
# all methods and all callbacks in one list each; one example of every other key per config
TOGETHER = {
    "method": [item for config in CONFIGS for item in config.get("method", [])],
    "trainer": {"callbacks": [item for one in CONFIGS for item in one.get("trainer", {}).get("callbacks", [])]},
}
APART = [[config[key] for config in CONFIGS if key in config] for key in ("data", "model")]
NUMBERS = range(max(map(len, APART)))


@pytest.mark.parametrize("numbers", sample([NUMBERS[:1], NUMBERS[1:]], NUMBERS[:1]), ids=str)
def test_the_examples_of_classes_are_parsed(numbers, tmp_path, capsys, one_parser):
    optimizers = [config["trainer"] for config in CONFIGS if "server_optimizer" in config.get("trainer", {})]
    for number in numbers:
        used, model = (part[number % len(part)] for part in APART)
        config = {"data": used, "model": model, "trainer": optimizers[number % len(optimizers)]}
        if number == 0:
            config |= {"method": TOGETHER["method"], "trainer": {**TOGETHER["trainer"], **config["trainer"]}}
        (tmp_path / "example.yaml").write_text(yaml.safe_dump(config))
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--config", str(tmp_path / "example.yaml"), "--print_config"])
        assert ended.value.code == 0, capsys.readouterr().err


CALLBACKS = (ROOT / "docs" / "callbacks.md").read_text()


@pytest.mark.thorough
def test_the_commands_of_the_callbacks_leave_the_files_they_name(tmp_path, monkeypatch, undrawn):
    """All in one run, with the additions of all commands."""
    lines = [shlex.split(line) for line in re.findall(r"^python cli\.py (.*)$", CALLBACKS, re.MULTILINE)]
    assert all(line[:2] == ["fit", "--config"] and (ROOT / line[2]).is_file() for line in lines)
    added = [argument for line in lines for argument in line[3:]]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    main(["fit", *lines[0][1:3], *added, "--trainer.max_rounds=1", "--data.train_size=150", "--data.test_size=60"])
    files = re.findall(r"^- `(\w+\.(?:npz|csv))`", CALLBACKS, re.MULTILINE)
    assert len(files) == len(lines)
    for file in files:
        assert (tmp_path / "runs/fedavg/version_0" / file).is_file(), file
