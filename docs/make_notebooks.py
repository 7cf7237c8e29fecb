"""Run the notebooks of the guide, and store their outputs: python docs/make_notebooks.py."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"
# a warning of a library about how it could draw its bars would be stored, too
QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found"}


def executed(path: Path, folder: str | Path) -> Any:
    """The notebook with the outputs that its cells have in a new kernel, which works in a folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True)
    client.execute(cwd=str(folder), env={**os.environ, **QUIET})
    # the version of Python and the like, which would change with each machine
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main() -> None:
    """Run each notebook in an empty folder."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, folder), path)


if __name__ == "__main__":
    main()
