"""The page shows what it should, on any screen, without colour and without a network."""

import base64
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from helpers.reports import snapshot, write_run

from fl_lightning.pictures.drawing import bar_style
from fl_lightning.pictures.style import DARK, DASHES, LIGHT, LINE_COLOURS, LINES_DARK, MARKERS, line_style
from fl_lightning.report import page as module
from fl_lightning.report.page import Asked, make_report, package_text
from fl_lightning.report.sources import read_sources

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


def report_of(*roots, **asked):
    return make_report(read_sources(list(map(str, roots)), []), Asked(**asked))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two methods with two seeds each, with all that callbacks leave; the name of one folder is hostile."""
    root = tmp_path_factory.mktemp("runs")
    for method, level in (("FedAvg", 0.5), ("FedUV", 0.7)):
        for seed in range(2):
            folder = root / f"{method}{seed}" / "version_0"
            write_run(folder, method, seed, 12, level=level, measured=seed == 0)
    hostile = {"model": {"class_path": EVIL, "init_args": {"name": EVIL}}}
    write_run(root / "<b>bold" / "version_0", "FedProx", rounds=3, config=hostile, measured=False)
    return root


@pytest.fixture(scope="module")
def made(root):
    before = snapshot(root)
    files = report_of(root, title=f"A {EVIL}", command=["fl-lightning", "report", "runs"]).files("page")
    assert snapshot(root) == before  # a report only reads
    return files


@pytest.fixture(scope="module")
def page(made):
    return Parsed(made["page.html"])


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
    assert "@import" not in made["page.html"] and not re.search(r"url\((?!#)", made["page.html"])
    assert "http-equiv" in made["page.html"] and "default-src 'none'" in made["page.html"]


def test_what_comes_from_files_is_text_and_never_code(page, made):
    assert len(page.all("script")) == 1 and not page.all("b")
    assert EVIL in "".join(page.texts)
    assert EVIL not in made["page.html"]


def test_every_figure_has_its_data_and_the_command_that_makes_it(page, made):
    figures = re.findall(r'<figure id="([^"]+)".*?</figure>', made["page.html"], re.DOTALL)
    assert len(figures) >= 15
    for name, text in ((one, text_of_figure(made, one)) for one in figures):
        assert f"fl-lightning report runs --figure {name} --output {name}.pdf" in text
        (data,) = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', text)
        head, *rows = base64.b64decode(data).decode().splitlines()
        assert rows and all(row.count(",") >= head.count(",") for row in rows), name
        assert text.count("<svg") >= 1 and "aria-label" in text


def text_of_figure(made, name):
    return re.search(rf'<figure id="{re.escape(name)}".*?</figure>', made["page.html"], re.DOTALL)[0]


def test_drawings_are_xml_and_have_no_colour_of_their_own(made):
    """A colour that is no variable would be the same in light and dark."""
    drawings = re.findall(r"<svg viewBox.*?</svg>", made["page.html"], re.DOTALL)
    for drawing in drawings:
        ElementTree.fromstring(drawing.replace("&nbsp;", " "))
        of_own = set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r'href="data:[^"]*"', "", drawing)))
        assert of_own == set()
    assert len(drawings) > 30


def test_sections_follow_from_the_files_that_are_there(root, made, tmp_path):
    text = made["page.html"]
    for heading in (
        "model=ImageClassifier",
        "Who holds what",
        "Spectra",
        "Similarity layer by layer",
        "Drift in detail",
        "Cost",
    ):
        assert f"<h3>{heading}</h3>" in text
    for heading in ("Accuracy by class", "Embedding of the representations", "Terms of the loss", "What was run"):
        assert f"<h3>{heading}</h3>" in text
    folder = write_run(tmp_path / "version_0", rounds=2, measured=False)
    (folder / "plan.npz").unlink()
    (folder / "metrics.csv").write_text("round,test/accuracy\n0,0.1\n1,0.2\n")
    text = report_of(tmp_path).files("page")["page.html"]
    assert re.findall("<h3>([^<]*)</h3>", text) == ["Results", "Accuracy", "What was run"]


def test_a_run_without_a_round_has_a_page(tmp_path):
    folder = write_run(tmp_path / "version_0", measured=False)
    (folder / "metrics.csv").unlink()
    text = report_of(tmp_path).files("page")["page.html"]
    assert "stopped, 0 of 10 rounds" in text


# ------------------------------------------------------------------ seen by anyone
def variables(text):
    """The colours of a page by name: light, and dark."""
    style = text[text.index("<style>") : text.index("</style>")]
    light = re.search(r":root\{(--page:[^}]*)\}", style)[1]
    dark = re.search(r":root\[data-theme=dark\]\{color-scheme:dark;([^}]*)\}", style)[1]
    assert f":root:not([data-theme=light]){{{dark}}}" in style  # what the system prefers is the same
    return [
        dict(one.split(":") for one in block.removeprefix("--").rstrip(";").split(";--")) for block in (light, dark)
    ]


def luminance(colour):
    """The relative luminance of WCAG 2.1."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_of_black_on_white_is_known():
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#ffffff") < 4.5


@pytest.mark.parametrize("dark", [0, 1])
def test_all_text_has_a_contrast_of_4_5(made, dark):
    colours = variables(made["page.html"])[dark]
    for ground in ("page", "card", "band"):
        for text in ("ink", "quiet", "link", "good", "bad"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for text in ("ink", "mark"):
        assert contrast(colours[text], colours["mark-ground"]) >= 4.5, text
    for at in range(len(LINE_COLOURS)):
        assert contrast(colours[f"line-{at}"], colours["card"]) >= 3, at


@pytest.mark.parametrize("name", ["page.css", "page.html.j2", "page.js"])
def test_no_colour_is_set_but_by_variables(name):
    text = re.sub(r"@media print\{.*", "", package_text(name))
    assert re.findall(r"(?<![&\w])#(?:[0-9a-fA-F]{3}){1,2}\b", text) == []
    assert set(re.findall(r"var\(--([a-z-]+)\)", text)) <= {*LIGHT, "font"} and LIGHT.keys() == DARK.keys()


def test_curves_differ_without_colour():
    assert len(LINE_COLOURS) == len(LINES_DARK)
    styles = [line_style(at) for at in range(len(DASHES) * len(MARKERS))]
    assert len({(one["linestyle"], one["marker"]) for one in styles}) == len(styles)


def test_the_page_fits_a_phone(made, page):
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    # what is wider than the screen scrolls by itself
    assert made["page.html"].count('<div class="scroll"') == len(page.all("table"))
    assert all("width" not in attributes for attributes in page.all("svg"))


# ------------------------------------------------------------------ with scripts
def test_a_drawing_tells_a_script_what_its_data_tell_a_reader(made):
    figure = text_of_figure(made, "model-imageclassifier-test-accuracy")
    (data,) = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', figure)
    head, *rows = [line.split(",") for line in base64.b64decode(data).decode().splitlines()]
    axes = [json.loads(unescape(one)) for one in re.findall(r"data-axes='([^']*)'", figure)]
    assert [one["labels"][0].split(" ")[0] for one in axes] == ["round", "MB", "seconds"]
    labels = dict(re.findall(r'<li data-curve="(\d+)"><svg.*?</svg>([^<]*)</li>', figure))
    told = {(labels[str(at)], f"{x:g}"): y for at, *line in axes[0]["curves"] for x, y in zip(*line, strict=True)}
    written = {(row[0], row[1]): 100 * float(row[head.index("test/accuracy")]) for row in rows}
    assert told == pytest.approx(written, rel=1e-4) and len(told) == 24
    # the box of the axes lies within the drawing, and what is toggled is there
    left, top, right, bottom = axes[0]["box"]
    _, _, width, height = map(float, re.search(r'viewBox="([^"]+)"', figure)[1].split(" "))
    assert 0 < left < right < width and 0 < top < bottom < height
    assert {f'<g data-curve="{at}"' in figure for at in labels} == {True}


def test_without_scripts_nothing_is_hidden_but_the_button_of_the_theme(made, page):
    assert [attributes["id"] for _, attributes in page.elements if "hidden" in attributes] == ["theme"]
    assert not page.all("input") and len(page.all("button")) == 1  # what needs a script is made by the script
    assert "fetch(" not in package_text("page.js") and "XMLHttpRequest" not in package_text("page.js")


# ------------------------------------------------------------------ other forms
def test_the_tables_are_the_same_in_every_form(made):
    numbers = set(re.findall(r"\d\d\.\d\d ± \d\.\d\d", made["page.html"]))
    assert len(numbers) >= 3
    assert numbers <= set(re.findall(r"\d\d\.\d\d ± \d\.\d\d", made["page.md"]))
    assert {f"${one.replace('±', chr(92) + 'pm')}$" for one in numbers} <= set(
        re.findall(r"\$\d\d\.\d\d \\pm \d\.\d\d\$", made["page.tex"])
    )
    assert made["page.csv"].startswith("title,table,caption")


def test_no_two_figures_have_one_name(root):
    names = [card.name for *_, card in report_of(root).cards()]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)


def test_names_that_are_equal_are_numbered(root, monkeypatch):
    def twice(section, prefix):
        for *place, card in original(section, prefix):
            yield *place, card
            yield *place, replace(card)

    original = module.cards_of
    monkeypatch.setattr(module, "cards_of", twice)
    names = [card.name for *_, card in report_of(root).cards()]
    assert len(names) == len(set(names))


def test_bars_differ_in_their_colour_or_their_hatch():
    assert len({(style["facecolor"], style["hatch"]) for style in map(bar_style, range(64))}) == 64
