"""What the project says of itself agrees."""

import re
from pathlib import Path

import yaml

import fl_lightning

ROOT = Path(__file__).resolve().parent.parent


def test_the_citation_has_the_version_and_the_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fl_lightning.__version__
    assert f"license = {citation['license']}\n" in (ROOT / "setup.cfg").read_text()
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_changes_have_the_present_version():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" and fl_lightning.__version__ in headings


def test_the_extras_that_contributors_are_told_of_are_there():
    (extras,) = re.findall(r'-e "\.\[([\w,]+)\]"', (ROOT / "CONTRIBUTING.md").read_text())
    assert all(f"\n{extra} =\n" in (ROOT / "setup.cfg").read_text() for extra in extras.split(","))
