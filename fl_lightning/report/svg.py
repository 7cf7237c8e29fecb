"""Figures of matplotlib as SVG within a page: in its colours, light or dark, and with its fonts."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

from fl_lightning.pictures.style import FONT, LIGHT, LINE_COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {LIGHT["ink"]: "ink", LIGHT["grid"]: "grid", LIGHT["quiet"]: "quiet", LIGHT["card"]: "card"}
COLOURS |= {colour: f"line-{at}" for at, colour in enumerate(LINE_COLOURS)}
OF_PAGE = re.compile("|".join(COLOURS))
# what matplotlib writes around the drawing itself
AROUND = re.compile(r"<metadata>.*?</metadata>|<style type=\"text/css\">.*?</style>|<!--.*?-->", re.DOTALL)
NUMBERS = re.compile(r"-?\d+\.\d{3,}")
SIZE = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')


def inline(figure: Figure, name: str, told: str) -> str:
    """A figure as an ``<svg>`` element; the same text for the same figure.

    Args:
        figure: the figure, drawn with :func:`fl_lightning.pictures.style.settings`.
        name: what the ids within the drawing begin with; of one page, each figure has its own.
        told: what the figure shows, for those who do not see it.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    # savefig would draw it twice, in order to lay it out
    FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = AROUND.sub("", file.getvalue()[file.getvalue().index("<svg") :])
    text = OF_PAGE.sub(lambda found: f"var(--{COLOURS[found[0]]})", text)
    text = text.replace(f"'{FONT}', sans-serif", "var(--font)")
    text = re.sub(r'(?<= d=")[^"]*|(?<= x=")[^"]*|(?<= y=")[^"]*', lambda one: rounded(one[0]), text)
    text = own_ids(text, name)
    head = f'<svg viewBox="{SIZE.search(text)[1]}" role="img" aria-label="{escape(told)}">'  # type: ignore[index]
    return re.sub(r"\s*\n\s*", "\n", SIZE.sub(lambda _: head, text, count=1)).strip()


def rounded(numbers: str) -> str:
    """Coordinates with two decimals, which is a hundredth of a point."""
    return NUMBERS.sub(lambda found: f"{float(found[0]):.2f}", numbers)


def own_ids(text: str, name: str) -> str:
    """A drawing whose ids are a name and a number; those that nothing refers to are dropped."""
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    short = {one: f"{name}-{at}" for at, one in enumerate(used)}
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{short[found[1]]}"' if found[1] in short else "", text)
    text = re.sub(r'(?:xlink:)?href="#([^"]+)"', lambda found: f'href="#{short[found[1]]}"', text)
    text = re.sub(r"url\(#([^)]+)\)", lambda found: f"url(#{short[found[1]]})", text)
    return text.replace("xlink:href", "href")
