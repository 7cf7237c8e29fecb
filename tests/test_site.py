"""The documentation builds as a site without a warning, and each of its pages can be reached."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for name in ("sphinx", "furo", "myst_nb", "sphinx-mathjax-offline"):
    pytest.importorskip(name, reason='the extra "docs" is not installed')
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(place)]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return place


def test_every_page_is_in_the_site_and_in_its_contents(site):
    contents = (site / "index.html").read_text()
    for page in (path for kind in ("*.md", "*.ipynb") for path in (ROOT / "docs").rglob(kind)):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (site / name).is_file()
        assert name == "index.html" or f'href="{name}"' in contents, name


def test_links_within_the_site_lead_to_a_page_and_to_a_place_on_it(site):
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    for page, text in pages.items():
        for link in set(re.findall(r'href="(?!https?:|#|data:|mailto:)([^"]+)"', text)):
            path, _, place = link.partition("#")
            target = (page.parent / path.partition("?")[0]).resolve()
            assert target.exists(), (page.name, link)
            assert not place or target not in pages or f'id="{place}"' in pages[target], (page.name, link)


def test_the_docstrings_are_in_the_pages_of_classes_and_functions(site):
    for page, name in (("core", "trainer.FederatedTrainer.fit"), ("functional", "functional.linear_cka")):
        assert f'id="fl_lightning.{name}"' in (site / "api" / f"{page}.html").read_text()
    assert "<strong>lambda_</strong>" in (site / "api" / "methods.html").read_text()  # the underscore is kept


def test_no_page_asks_another_machine_for_anything(site):
    for page in site.rglob("*.html"):
        assert not re.findall(r'(?:src|<link[^>]* href)="https?://[^"]*"', page.read_text()), page.name


def test_formulas_are_typeset(site):
    for page in ("methods", "theory"):
        text = (site / f"{page}.html").read_text()
        assert 'class="math notranslate' in text and "$$" not in text, page
