"""Light and dark colours, and line styles that distinguish curves without colour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# colours of texts and backgrounds, with a contrast of at least 4.5 : 1
LIGHT = {
    **{"page": "#f6f7f9", "card": "#ffffff", "band": "#eef1f5", "ink": "#1b2028", "quiet": "#545d69"},
    **{"link": "#0b57b0", "rule": "#c9d0d9", "grid": "#dfe4ea", "mark": "#8a4b00", "mark-ground": "#fff4e0"},
    **{"good": "#116329", "bad": "#a40e26"},
}
DARK = {
    **{"page": "#11151b", "card": "#191f27", "band": "#222a34", "ink": "#e8ecf1", "quiet": "#a3adba"},
    **{"link": "#86b9ff", "rule": "#3b4552", "grid": "#2e3742", "mark": "#ffc46b", "mark-ground": "#33270f"},
    **{"good": "#6fdc8c", "bad": "#ff9aa2"},
}
# colours of curves and bars, with a contrast of at least 3 : 1 against a card
LINE_COLOURS = ("#1f5fbf", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490", "#be185d", "#4b5563")
LINES_DARK = ("#7ab7ff", "#ff9d6b", "#6fdc8d", "#d2a8ff", "#e3c15a", "#5fd4e4", "#ff8ec6", "#b6c2cf")
# lengths of strokes and gaps in widths of the line; with the markers they distinguish 35 curves
DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2", "9 3")
MARKERS = ("", "o", "s", "^", "D", "v", "P")
# hatches of lines, since each dot would be a separate path
HATCHES = ("", "///", "\\\\\\", "---", "xx", "|||", "++", "/")
FONT = "DejaVu Sans"
# fallback fonts, if installed
FALLBACKS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans SC", "Noto Sans JP", "WenQuanYi Micro Hei", "Microsoft YaHei"),
    *("PingFang SC", "Hiragino Sans", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS", "Noto Emoji", "Segoe UI Emoji"),
)


def variables(colours: Mapping[str, str], lines: tuple[str, ...]) -> str:
    """Return colours as CSS variables."""
    named = {**colours, **{f"line-{number}": colour for number, colour in enumerate(lines)}}
    return "".join(f"--{name}:{value};" for name, value in named.items())


_INK = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "axes.edgecolor")
# settings of matplotlib while a figure is drawn and saved
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(_INK, LIGHT["ink"]),
    # TrueType fonts in PDFs, as journals require, instead of Type 3
    "pdf.fonttype": 42,
    **{"svg.fonttype": "none", "text.parse_math": False},
    **{"font.sans-serif": [FONT], "font.size": 9, "axes.titlesize": 9.5},
    **{"axes.grid": True, "grid.color": LIGHT["grid"], "grid.linewidth": 0.7, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.6, "hatch.linewidth": 0.6},
    **{"axes.linewidth": 0.8, "axes.unicode_minus": False, "savefig.transparent": True},
}


def line_style(at: int) -> dict[str, Any]:
    """Return matplotlib's arguments for curve number ``at``."""
    dash = DASHES[at % len(DASHES)]
    style: Any = (0, tuple(map(float, dash.split()))) if dash else "solid"
    # the first few differ in their strokes alone
    marker = MARKERS[at // len(DASHES) % len(MARKERS)]
    return {
        "color": LINE_COLOURS[at % len(LINE_COLOURS)],
        "linestyle": style,
        "marker": marker or None,
        "markersize": 3.5,
    }
