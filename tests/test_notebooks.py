"""The notebooks of the guide run unchanged, with the stored outputs."""

import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS))
make_notebooks = pytest.importorskip("make_notebooks", reason="ipykernel and nbclient are not installed")
nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
pytest.importorskip("pandas", reason="pandas is not installed")

NOTEBOOKS = sorted(make_notebooks.NOTEBOOKS.glob("*.ipynb"))


def told(notebook):
    """Of each cell its place in the order, the streams it writes to, and the kinds of the values it shows."""
    return [
        (
            cell.execution_count,
            {output.name for output in cell.outputs if output.output_type == "stream"},
            [sorted(output.data) for output in cell.outputs if output.output_type != "stream"],
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored(tmp_path, monkeypatch, path):
    monkeypatch.delenv("PL_GLOBAL_SEED")  # as in a user's kernel
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert told(make_notebooks.executed(path, tmp_path)) == told(nbformat.read(path, as_version=4))


def test_stored_notebooks_warn_of_nothing_and_are_of_no_machine():
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "own_parts"]
    for path in NOTEBOOKS:
        assert not re.search(r"Warning|\.py:|/site-packages/", path.read_text()), path
