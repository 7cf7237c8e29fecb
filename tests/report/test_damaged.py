"""Whatever has become of a run's folder, the page is made, and what is left out is named."""

import io
import json
import os
import shutil
import sys
import zipfile

import numpy as np
import pytest
import yaml
from helpers.errors import refused
from helpers.reports import write_run

from fl_lightning.bench.results import CellResult
from fl_lightning.cli.report import main
from fl_lightning.report.page import Asked, make_report
from fl_lightning.report.reading import load_arrays
from fl_lightning.report.run import read_run
from fl_lightning.report.sources import read_sources
from fl_lightning.report.studies import StoredCell, folder_of, run_of

FILES = ("metrics.csv", "config.yaml", "environment.json", "plan.npz", "spectra.npz", "cost.csv", "changes.yaml")
HEAD = "round,test/accuracy,test/loss\n"
EVIL = "</script><b>x"


def replaced(how):
    """A damage by which something else is in the file's place."""

    def damage(path):
        path.unlink()
        how(path)

    return damage


def text(given):
    return lambda path: path.write_bytes(given if isinstance(given, bytes) else f"{given}\n".encode())


def arrays(**given):
    return lambda path: np.savez(path, **given)


def claiming(number, there=0):
    """A damage by which the header of an array claims this many numbers of a byte, where there may be fewer."""

    def damage(path):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|i1", "fortran_order": False, "shape": (number,)})
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("rounds.npy", "w") as file:
            file.write(header.getvalue())
            for _ in range(there // 2**20):
                file.write(bytes(2**20))

    return damage


def marked(place, value):
    """A damage by which a byte of the archive's list says that its first member is encrypted, or packed otherwise."""

    def damage(path):
        np.savez(path, rounds=[0])
        content = bytearray(path.read_bytes())
        content[content.find(b"PK\1\2") + place] = value
        path.write_bytes(content)

    return damage


ANY_FILE = {
    "binary": text(bytes(range(256)) * 9),
    "zeros": text(bytes(100)),
    "not UTF-8": text(b"round: \xe4"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a folder": replaced(os.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a link to itself": replaced(lambda path: path.symlink_to(path)),
    "a link to nothing": replaced(lambda path: path.symlink_to("nowhere")),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
}
ROUNDS = ("inf", "-inf", "nan", "1e400", "-1", "1e30", "0.5", "text", "")
SECTIONS = ("3", "abc", "[1, [2]]", ".inf", "2001-01-01", "!!binary aGVsbG8=", "{class_path: X, init_args: 3}")
SHAPES = ((), (2,), (2, 0), (2, 2, 3), (2, 3, 4, 5), (2, 2, 2, 2, 2))
OWN = {
    "metrics.csv": {
        **{f"round {one}": text(f"{HEAD}0,0.1,2\n{one},0.2,1\n2,0.3,1\n") for one in ROUNDS},
        **{f"loss {one}": text(f"{HEAD}0,0.1,{one}\n1,0.2,{one}\n") for one in ("inf", "-inf", "nan", "1e308")},
        "empty": text(b""),
        "no rounds": text("name,price\na,1\n"),
        "long cell": text(f"{HEAD}0,{'1' * 200_000},1\n"),
        "long head": text(f"round,{'x' * 200_000}\n0,1\n"),
    },
    "config.yaml": {
        **{f"{key} {one}": text(f"{key}: {one}") for key in ("trainer", "model", "data") for one in SECTIONS},
        **{
            f"method {one}": text(f"method: {one}")
            for one in ("3", "abc", "{class_path: [1]}", "[{class_path: X, dict_kwargs: 1}]")
        },
        **{f"all {one}": text(one) for one in ("3", "[1]", "a: [", "a: !Foo 3", "? [a]\n: 1", "&a {x: *a}")},
        "code": text("a: !!python/object/apply:os.mkdir [pwned]"),
        "aliases": text("a: &a [x, x]\n" + "".join(f"{i}: &a [*a, *a, *a]\n" for i in range(40))),
        "deep": text(f"a: {'[' * 5000}{']' * 5000}"),
        "digits": text(f"seed_everything: 0x{'f' * 6000}"),
        "large": text("#" * 2**22 + "\na: 1"),
    },
    "environment.json": {
        **{f"all {one}": text(one) for one in ("3", "[1]", '"a"', "null", "{", "[" * 100_000)},
        **{
            f"{key} {one}": text(json.dumps({key: one}))
            for key, one in (("versions", 3), ("versions", {"torch": [1]}), ("gpus", "a"), ("plan_hash", [1]))
        },
    },
    "plan.npz": {
        "text": arrays(label_counts=np.array([["a", "b"]])),
        "objects": arrays(label_counts=np.array([[{}]], dtype=object)),
        "below 0": arrays(label_counts=-np.ones((2, 2))),
        "nan": arrays(label_counts=np.full((2, 2), np.nan)),
        **{f"axes {len(one)}": arrays(label_counts=np.ones(one)) for one in ((2,), (2, 3, 4))},
        "complex": arrays(label_counts=np.ones((2, 2), complex)),
    },
    "spectra.npz": {
        **{f"axes {len(one)}": arrays(rounds=[0, 1], classifier=np.ones(one)) for one in SHAPES if len(one) != 2},
        "nothing": arrays(rounds=[0, 1], classifier=np.ones((2, 0))),
        "too much": arrays(rounds=[0], classifier=np.ones((1, 1_000_001), np.int8)),
        "objects": arrays(rounds=[0], classifier=np.array([{}], dtype=object)),
        "text": arrays(rounds=["a"], classifier=np.ones((1, 2))),
        "fractions": arrays(rounds=[0.5], classifier=np.ones((1, 2))),
        "below 0": arrays(rounds=[-1], classifier=np.ones((1, 2))),
        "two axes of rounds": arrays(rounds=[[0]], classifier=np.ones((1, 2))),
        "complex": arrays(rounds=[0], classifier=np.ones((1, 2), complex)),
        "a claim": claiming(10**12),
        "a smaller claim": claiming(10**7),
        "encrypted": marked(8, 1),
        "packed otherwise": marked(10, 99),
    },
    "cost.csv": {
        "cells": text("round,flops\n0,1,2\n"),
        "a long cell": text(f'round,flops\n0,"{"1" * 200_000}"\n'),
        "no rounds": text("name\na\n"),
    },
    "changes.yaml": {
        "a number": text("3"),
        "no changes": text("- {rounds_done: 1, changes: 3}"),
        "no rounds": text("- {}"),
    },
}
DAMAGES = {f"{file}, {name}": (file, how) for file in FILES for name, how in {**ANY_FILE, **OWN[file]}.items()}


def whole_run(folder, **config):
    """A run with a file of each kind, and few metrics."""
    write_run(folder, rounds=3, clients=2, measured=False, config=config)
    (folder / "metrics.csv").write_text(f"{HEAD}0,0.1,2\n1,0.2,1\n2,0.3,1\n")
    np.savez(folder / "spectra.npz", rounds=[0, 1], classifier=[[2, 1], [8, 4]])
    (folder / "cost.csv").write_text("round,methods,flops\n0,fedavg,2.5e9\n")
    (folder / "changes.yaml").write_text("- {rounds_done: 1, changes: {a: {before: 1, now: 2}}}\n")
    return folder


def report_of(root):
    return make_report(read_sources([str(root)], []), Asked())


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("template") / "version_0")


def test_every_damage_of_every_file_is_named_and_the_page_is_made(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole_run(tmp_path / "runs" / "whole" / "version_0")
    folders = {}
    for number, (case, (file, how)) in enumerate(DAMAGES.items(), 1):
        folders[case] = folder = tmp_path / "runs" / f"a {file}" / f"version_{number}"
        shutil.copytree(template, folder)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        # what is drawn has a curve or a map of its own, and the others are seeds of one configuration
        own = case.partition(", ")[2] in OWN[file] and file in ("metrics.csv", "spectra.npz")
        config["method" if own else "seed_everything"] = [{"class_path": f"Own{number}"}] if own else number
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        how(folder / file)
    made = report_of(tmp_path / "runs")
    page = made.files("page")["page.html"]
    for case, folder in folders.items():
        name, (file, _) = f"{folder.parent.name}/{folder.name}", DAMAGES[case]
        said = [one.partition(f"{name}: ")[2] for one in made.warnings if f"{name}: " in one]
        named = "test/loss was" if ", loss" in case else file
        assert any(one.startswith(named) for one in said), (case, said)
        assert name in page, case
    assert not any(one.startswith("whole/") and "left out" in one for one in made.warnings)
    assert not (tmp_path / "pwned").exists()


def test_measurements_of_every_kind_with_other_axes_are_not_drawn(tmp_path):
    """Each kind of drawing, with arrays of one to five axes in the place of what a callback leaves."""
    names = {
        "spectra.npz": ("classifier", "local_classifier"),
        "layer_similarity.npz": ("to_global", "between_clients", "between_rounds"),
        "layer_alignment.npz": ("global",),
        "per_class.npz": ("before", "confusion_after"),
        "drift.npz": ("dissimilarity", "layer_norms", "norms", "pairwise"),
        "embedding.npz": ("global",),
    }
    for number, shape in enumerate(one for one in SHAPES if one):
        folder = write_run(tmp_path / str(number) / "version_0", rounds=2, seed=number, measured=False)
        for file, of_file in names.items():
            np.savez(
                folder / file,
                rounds=[0, 1],
                labels=np.full(shape, np.nan),
                **{name: np.ones(shape) for name in of_file},
            )
    made = report_of(tmp_path)
    said = {one.removesuffix(" is not drawn.") for one in made.warnings}
    assert {
        "0/version_0: spectra.npz: classifier of shape (2,)",
        "3/version_0: drift.npz: norms of shape (2, 3, 4, 5)",
    } <= said
    assert len([one for one in made.warnings if "is not drawn" in one]) >= 40
    assert "page.html" in made.files("page")


@pytest.mark.parametrize("damage", [claiming(10**12), claiming(10**9), claiming(2**27, 2**27)])
def test_an_archive_that_claims_too_much_is_refused_before_it_is_read(damage, tmp_path, monkeypatch):
    damage(tmp_path / "a.npz")
    assert (tmp_path / "a.npz").stat().st_size < 2**18
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(ValueError, match=r"size that it claims|bytes, more than"):
        load_arrays(tmp_path / "a.npz")


# ------------------------------------------------------------------ names
@pytest.mark.parametrize(
    "name", [b"\xff\xfe", b"a\nb", b"\x1b[31m", b"x" * 250, EVIL.replace("/", "").encode(), b"$\\foo$"]
)
def test_names_of_folders_and_files_are_texts(name, tmp_path, capsys):
    named = os.fsdecode(name)
    run = whole_run(tmp_path / "runs" / named / "version_0")
    np.savez(run / f"{named[:200]}.npz", rounds=[0, 1], **{ascii(named)[1:-1]: [1.0, 2.0]})
    (run / "metrics.csv").write_bytes(b"round,test/accuracy," + name.replace(b"\n", b"\1") + b"\n0,0.5,1\n1,0.5,1\n")
    (run / "failures").mkdir()
    (run / "failures" / f"round-1-client-{named[:50]}.pt").touch()
    main(["report", str(tmp_path / "runs"), "--output", str(tmp_path / "page.html")])
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1
    for path in tmp_path.glob("page.*"):
        content = path.read_text(encoding="utf-8")
        assert "\x1b" not in content and "a\nb" not in content
        assert path.suffix in (".csv", ".tex") or "<b>" not in content


def test_texts_of_files_are_no_code_on_any_page(tmp_path):
    evil = f"{EVIL}\n% \udcff"
    run = whole_run(tmp_path / "a" / "version_0", model={"class_path": EVIL, "init_args": {"a": f"{EVIL}\n"}})
    told = {**dict.fromkeys(("processor", "git_revision", "python"), evil), "plan_hash": "\udcff"}
    (run / "environment.json").write_text(json.dumps({**told, "versions": {evil: evil}, "command": [evil]}))
    np.savez(run / "layer_similarity.npz", rounds=[0], layers=[[evil, "$\\foo"]], between_rounds=[[0.5, 0.5]])
    (run / "changes.yaml").write_text(f"- {{rounds_done: 1, changes: {{'{EVIL}': {{before: \"a\\n% b\", now: 2}}}}}}\n")
    for name, content in report_of(tmp_path).files("page").items():
        content.encode(errors="backslashreplace")
        assert name.endswith((".csv", ".tex")) or EVIL not in content
        assert not name.endswith(".tex") or "\n% b" not in content


# ------------------------------------------------------------------ folders
def test_a_run_that_vanishes_while_it_is_read_is_named_and_left_out(tmp_path, monkeypatch):
    from fl_lightning.report import sources

    for name in "ab":
        whole_run(tmp_path / name / "version_0")

    def vanishing(folder, name):
        if name == "a/version_0":
            shutil.rmtree(folder)
        return read_run(folder, name)

    monkeypatch.setattr(sources, "read_run", vanishing)
    made = report_of(tmp_path)
    assert [run.name for section in made.sections for run in section.runs] == ["b/version_0"]
    assert any(one.startswith("a/version_0 cannot be read and is left out") for one in made.warnings)


def test_a_run_that_vanishes_after_it_was_read_is_in_the_page(tmp_path):
    folder = whole_run(tmp_path / "a" / "version_0")
    found = read_sources([str(tmp_path)], [])
    shutil.rmtree(folder)
    assert "a/version_0" in make_report(found, Asked()).files("page")["page.html"]


def test_where_no_run_is_left_one_line_says_why(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "metrics.csv").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "runs"), "--output", str(tmp_path / "page.html")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "metrics.csv cannot be read" in line and "give a folder" in line
    assert not (tmp_path / "page.html").exists()


def test_links_in_a_circle_end_and_a_folder_that_cannot_be_looked_into_is_named(tmp_path, monkeypatch):
    whole_run(tmp_path / "a" / "version_0")
    (tmp_path / "a" / "round").symlink_to(tmp_path)
    (tmp_path / "locked").mkdir()
    scan = os.scandir

    def refusing(path):
        if os.path.basename(path) == "locked":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = read_sources([str(tmp_path)], [])
    assert [run.name for run in found.runs] == ["a/version_0"]
    (note,) = found.notes
    assert "locked" in note and "Permission denied" in note


def test_a_file_of_another_program_is_no_run(tmp_path):
    (tmp_path / "metrics.csv").write_text("name,price\na,1\n")
    with refused("metrics.csv", "give a folder"):
        read_sources([str(tmp_path)], [])


def test_a_cell_whose_folder_cannot_be_read_has_the_numbers_of_the_study(tmp_path):
    broken, other = (tmp_path / "cell-digest" / name for name in ("version_10", "version_old"))
    for folder in (broken, other):
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("name,price\n")
    result = CellResult("cell", "digest", "done", values={0: 0.5})
    assert folder_of(result, tmp_path) == broken
    run = run_of(StoredCell({"method": "FedAvg"}, 0, ()), result, "test/accuracy", tmp_path)
    assert run.values("test/accuracy") == {0: 0.5}
    (note,) = run.notes
    assert "metrics.csv" in note and "numbers are those of the study" in note
