"""Reports of a test's own folder."""

import pytest

from helpers.reports import report_of, undraw


@pytest.fixture
def report(tmp_path, tmp_path_factory, monkeypatch):
    """``report(*arguments, root=...)`` is the report of the runs in a folder, without its drawings."""
    undraw(monkeypatch)
    monkeypatch.setattr("sys.argv", ["cli.py"])
    output = tmp_path_factory.mktemp("report")
    return lambda *arguments, root=tmp_path: report_of(output, root, arguments=arguments)
