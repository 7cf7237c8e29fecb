"""The page shows what it should, on any screen, without colour and without a network."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from helpers.reports import figures_of, report_of, snapshot, write_run

from fl_lightning.plotting.drawing import bar_style
from fl_lightning.plotting.style import DASHES, MARKERS, line_style

pytest_plugins = ["helpers.report_fixtures"]

EVIL = "</script><script>alert(1)</script>"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Parsed(HTMLParser):
    """The elements of a page; refuses one that is not closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The report of two methods with two seeds each, with all that callbacks leave; one folder has a hostile name."""
    root = tmp_path_factory.mktemp("runs")
    for method, level in (("FedAvg", 0.5), ("FedUV", 0.7)):
        for seed in range(2):
            folder = root / f"{method}{seed}" / "version_0"
            write_run(folder, method, seed, 12, level=level, measured=seed == 0)
    hostile = {"model": {"class_path": EVIL, "init_args": {"name": EVIL}}}
    write_run(root / "<b>bold" / "version_0", "FedProx", rounds=3, config=hostile, measured=False)
    before = snapshot(root)
    files = report_of(tmp_path_factory.mktemp("report"), root, arguments=["--title", f"A {EVIL}"])
    assert snapshot(root) == before  # a report only reads
    return files


@pytest.fixture(scope="module")
def page(made):
    return Parsed(made["html"])


def test_the_page_is_well_formed_and_ids_are_unique(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        target = attributes.get("href", "")
        assert not target.startswith("#") or target[1:] in ids


def test_nothing_on_the_page_is_fetched(made, page):
    for tag, attributes in page.elements:
        for key in ("src", "href", "xlink:href", "data", "action", "srcset"):
            assert attributes.get(key, "#").startswith(("#", "data:")), (tag, attributes)
    assert "@import" not in made["html"] and not re.search(r"url\((?!#)", made["html"])
    assert "http-equiv" in made["html"] and "default-src 'none'" in made["html"]


def test_what_comes_from_files_is_text_and_never_code(page, made):
    assert len(page.all("script")) == 1 and not page.all("b")
    assert EVIL in "".join(page.texts)
    assert EVIL not in made["html"]


def test_every_figure_has_its_data(made):
    figures = figures_of(made)
    assert 15 <= len(figures) == made["html"].count("<figure")  # no two have one name
    for name, (text, (head, *rows)) in figures.items():
        assert re.fullmatch(r"[a-z0-9.-]+", name)
        assert rows and all(len(row) >= len(head) for row in rows), name
        assert text.count("<svg") >= 1 and "aria-label" in text


def test_sections_follow_from_the_files_that_are_there(made, tmp_path, report):
    headings = re.findall("<h3>([^<]*)</h3>", made["html"])
    assert {"Who holds what", "Spectra", "Drift in detail", "Cost", "Accuracy by class"} <= {*headings}
    folder = write_run(tmp_path / "version_0", rounds=2, measured=False)
    (folder / "plan.npz").unlink()
    (folder / "metrics.csv").write_text("round,test/accuracy\n0,0.1\n1,0.2\n")
    assert re.findall("<h3>([^<]*)</h3>", report()["html"]) == ["Results", "Configurations and runs"]


def test_drawings_are_xml_and_have_no_colour_of_their_own(made):
    """A colour that is no variable would be the same in light and dark."""
    drawings = re.findall(r"<svg viewBox.*?</svg>", made["html"], re.DOTALL)
    for drawing in drawings:
        ElementTree.fromstring(drawing.replace("&nbsp;", " "))
        of_own = set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r'href="data:[^"]*"', "", drawing)))
        assert of_own == set()
    assert len(drawings) > 30


def test_warnings_are_one_line_that_unfolds(tmp_path, report):
    for name in ("a/version_0", "a/version_1"):  # one seed
        write_run(tmp_path / name, seed=0, rounds=2, measured=False)
    (found,) = re.findall('id="warnings"><summary>([^<]*)</summary>(.*?)</details>', report()["html"], re.DOTALL)
    assert found[0].startswith("1 warning:") and found[1].count("<li>") == 1


# ------------------------------------------------------------------ seen by anyone
def test_curves_and_bars_differ_without_colour():
    styles = [line_style(at) for at in range(len(DASHES) * len(MARKERS))]
    assert len({(one["linestyle"], one["marker"]) for one in styles}) == len(styles)
    assert len({(style["facecolor"], style["hatch"]) for style in map(bar_style, range(64))}) == 64


def test_the_page_fits_a_phone(made, page):
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    # what is wider than the screen scrolls by itself
    assert made["html"].count('<div class="scroll"') == len(page.all("table"))
    assert all("width" not in attributes for attributes in page.all("svg"))


# ------------------------------------------------------------------ with scripts
def test_a_drawing_has_the_numbers_of_its_data_for_a_script(made):
    figure, (head, *rows) = figures_of(made)["model-imageclassifier-test-accuracy"]
    axes = [json.loads(unescape(one)) for one in re.findall(r"data-axes='([^']*)'", figure)]
    assert [one["labels"][0].split(" ")[0] for one in axes] == ["round", "MB", "seconds"]
    told = {(label, f"{x:g}"): y for label, *line in axes[0]["curves"] for x, y in zip(*line, strict=True)}
    written = {(row[0], row[1]): 100 * float(row[head.index("test/accuracy")]) for row in rows}
    assert told == pytest.approx(written, rel=1e-4) and len(told) == 24
    # the box of the axes lies within the drawing
    left, top, right, bottom = axes[0]["box"]
    _, _, width, height = map(float, re.search(r'viewBox="([^"]+)"', figure)[1].split(" "))
    assert 0 < left < right < width and 0 < top < bottom < height


def test_without_scripts_nothing_is_hidden(page):
    assert not any("hidden" in attributes for _, attributes in page.elements)
    assert not page.all("input") and not page.all("button")  # the script makes its own controls


# ------------------------------------------------------------------ other forms
def test_the_tables_are_the_same_in_every_form(made):
    number = re.compile(r"\d\d\.\d\d ± \d\.\d\d")
    numbers = set(number.findall(made["html"]))
    assert len(numbers) >= 3 and numbers <= set(number.findall(made["md"]))
    assert {f"${one.replace('±', chr(92) + 'pm')}$" for one in numbers} <= set(
        re.findall(r"\$\d\d\.\d\d \\pm \d\.\d\d\$", made["tex"])
    )
