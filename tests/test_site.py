"""The documentation builds as a site without a warning, and each of its pages can be reached."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.pages import needs_browser, of_level, requests_but, shown, text_of

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


@needs_browser
@pytest.mark.parametrize("page", ["index", "methods", "api/data"])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_is_readable_and_alone(site, page, width, theme):
    found = text_of((site / f"{page}.html").as_uri(), width, theme)
    assert found["console"] == []
    assert requests_but(found, site.as_uri()) == []
    assert found["page"] <= found["screen"]  # nothing has to be scrolled sideways
    assert (found["pictures"] or page == "methods") and all(found["pictures"])
    assert found["texts"] > 50 and found["contrast"] >= 4.5, found["where"]
    assert (found["background"] == "rgb(255, 255, 255)") == (theme == "light")


@needs_browser
def test_a_browser_typesets_the_formulas_without_another_machine(site):
    typeset = """document.querySelectorAll("mjx-container").length >= document.querySelectorAll(".math").length
        && JSON.stringify({formulas: document.querySelectorAll("mjx-container").length,
            failed: document.querySelectorAll("mjx-merror, [data-mjx-error]").length})"""
    found = shown((site / "methods.html").as_uri(), (1280, 1600), typeset)
    assert found["formulas"] > 20 and found["failed"] == 0
    assert of_level(found, "error") == []
    assert requests_but(found, site.as_uri()) == []
