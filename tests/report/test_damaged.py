"""Whatever has happened to the folder of a run, the page is made, and what is left out is named."""

import io
import os
import zipfile

import numpy as np
import pytest
from helpers.benches import outcome, toy_suite
from helpers.errors import assert_names
from helpers.reports import report_of, undraw, warnings_of, write_run

pytest_plugins = ["helpers.report_fixtures"]

HEAD = "round,test/accuracy,test/loss\n"
EVIL = "</script><b>x"


def text(given):
    return lambda path: path.write_bytes(given if isinstance(given, bytes) else f"{given}\n".encode())


def arrays(**given):
    return lambda path: np.savez(path, **given)


def instead(how):
    """Something else is in the file's place."""
    return lambda path: (path.unlink(), how(path))


def claim(path):
    """An archive whose header claims more numbers than any memory holds."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|i1", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rounds.npy", header.getvalue())


# a file, and what has happened to it: a representative of each kind
DAMAGES = {
    "metrics without rounds": ("metrics.csv", text("name,price\na,1")),
    "metrics a pipe": ("metrics.csv", instead(os.mkfifo)),
    "config cut": ("config.yaml", text("a: [")),
    "config of another kind": ("config.yaml", text("trainer: abc")),
    "config with code": ("config.yaml", text("a: !!python/object/apply:os.mkdir [pwned]")),
    "config a link to nothing": ("config.yaml", instead(lambda path: path.symlink_to("nowhere"))),
    "environment of another kind": ("environment.json", text('{"versions": 3}')),
    "plan nan": ("plan.npz", arrays(label_counts=np.full((2, 2), np.nan))),
    "spectra cut": ("spectra.npz", lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])),
    "spectra of other axes": ("spectra.npz", arrays(rounds=[0, 1], classifier=np.ones((2, 3, 4, 5)))),
    "spectra too large": ("spectra.npz", claim),
    "cost not UTF-8": ("cost.csv", text(b"round: \xe4")),
    "changes of another kind": ("changes.yaml", text("3")),
}


def whole_run(folder, **config):
    """A run with a file of each kind, and few metrics."""
    write_run(folder, rounds=3, clients=2, measured=False, config=config)
    (folder / "metrics.csv").write_text(f"{HEAD}0,0.1,2\n1,0.2,1\n2,0.3,1\n")
    np.savez(folder / "spectra.npz", rounds=[0, 1], classifier=[[2, 1], [8, 4]])
    (folder / "cost.csv").write_text("round,methods,flops\n0,fedavg,2.5e9\n")
    (folder / "changes.yaml").write_text("- {rounds_done: 1, changes: {a: {before: 1, now: 2}}}\n")
    return folder


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """The report of a whole run and of a run for each damage."""
    root = tmp_path_factory.mktemp("damaged")
    whole_run(root / "runs" / "whole" / "version_0")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for number, (case, (file, how)) in enumerate(DAMAGES.items(), 1):
            folder = whole_run(root / "runs" / case / "version_0", seed_everything=number)
            how(folder / file)
        files = report_of(root, "runs")
    assert not (root / "pwned").exists()
    return files


@pytest.mark.parametrize("case", DAMAGES)
def test_each_damage_is_named_and_the_page_is_made(damaged, case):
    name, (file, _) = f"{case}/version_0: ", DAMAGES[case]
    said = [one.partition(name)[2] for one in warnings_of(damaged) if name in one]
    assert any(one.startswith(file) for one in said), said
    assert f"{case}/version_0" in damaged["html"]


def test_a_whole_run_among_damaged_ones_has_all_its_numbers(damaged):
    assert not any("whole/" in one and "left out" in one for one in warnings_of(damaged))
    (line,) = (one for one in damaged["runs.csv"].splitlines() if "whole/version_0" in one)
    assert ",finished,3,test/accuracy,0.3,0.3," in line


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a\nb", b"\x1b[31m", EVIL.replace("/", "").encode(), b"$\\foo$"])
def test_names_of_folders_and_files_are_texts(name, tmp_path, capsys, monkeypatch):
    undraw(monkeypatch)
    named = os.fsdecode(name)
    run = whole_run(tmp_path / "runs" / named / "version_0")
    np.savez(run / f"{named}.npz", rounds=[0, 1], **{ascii(named)[1:-1]: [1.0, 2.0]})
    (run / "metrics.csv").write_bytes(b"round,test/accuracy," + name.replace(b"\n", b"\1") + b"\n0,0.5,1\n1,0.5,1\n")
    files = report_of(tmp_path, tmp_path / "runs")
    assert len(capsys.readouterr().out.splitlines()) == 1
    for ending, content in files.items():
        assert "\x1b" not in content and "a\nb" not in content
        assert ending.endswith(("csv", "tex")) or "<b>" not in content


def test_where_no_run_is_left_one_line_tells_why(tmp_path, report, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.csv").touch()
    with pytest.raises(SystemExit) as ended:
        report(root=tmp_path / "runs")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and not list(tmp_path.glob("page.*"))
    assert_names(line, "metrics.csv", "folder")


def test_a_cell_whose_folder_is_damaged_has_the_numbers_of_the_study(tmp_path, report, monkeypatch, capsys):
    from helpers.benches import run_command

    suite = toy_suite(tmp_path)
    monkeypatch.chdir(tmp_path)

    def answer(cell, on_round):
        folder = tmp_path / "out" / cell["folder"] / "version_0"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("name,price\n")
        return outcome([0.25, 0.5], run_dir=str(folder))

    run_command(monkeypatch, capsys, ["bench", suite.path, "--output", "out"], answer)
    files = report(root=tmp_path / "out")
    assert files["runs.csv"].count(",test/accuracy,0.5,0.5,") == 4
    assert sum("metrics.csv" in one for one in warnings_of(files)) >= 1
