"""Tables of text, as Markdown and as LaTeX with booktabs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fl_lightning.errors import printable

DAGGER = "†"
NONE = "-"
# what Markdown takes for a mark: an underscore does not stand within a word, a bracket begins a link's address
SPECIAL = re.compile(r"[|*\\`~]|(?<![^\W_])_|_(?![^\W_])|(?<=\])\(|&(?=[#\w]+;)")
IN_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}


@dataclass(frozen=True)
class Text:
    """What a table has in one place.

    Args:
        text: the text.
        bold: whether it is in bold.
        marks: dagger and numbers of footnotes.
    """

    text: str
    bold: bool = False
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sheet:
    """A table of text.

    Args:
        caption: what it shows.
        names: names of the columns on the left, which say what a row is.
        groups: name of each column, or group of columns, and the names within a group.
        lines: the rows.
        notes: footnotes by number.
        title: what begins its caption in LaTeX; in Markdown it stands above.
    """

    caption: str
    names: Sequence[str]
    groups: Sequence[tuple[str, Sequence[str]]]
    lines: Sequence[Sequence[Text]]
    notes: dict[str, str] = field(default_factory=dict)
    title: str = ""


def markdown(sheet: Sheet) -> Iterator[str]:
    """The lines of a table in Markdown, whose first column of a group has the group's name."""
    heads = [*sheet.names]
    for name, inner in sheet.groups:
        heads += [name, *inner[1:]]
    yield from (prose(sheet.caption), "", f"| {' | '.join(map(in_markdown, heads))} |")
    yield f"|{' --- |' * len(sheet.names)}{' ---: |' * (len(heads) - len(sheet.names))}"
    for line in sheet.lines:
        yield f"| {' | '.join(map(marked, line))} |"
    yield ""
    for number, note in sheet.notes.items():
        yield f"- [{number}] {in_markdown(note)}"
    if sheet.notes:
        yield ""


def marked(text: Text) -> str:
    """A text in Markdown, with its marks."""
    shown = f"**{in_markdown(text.text)}**" if text.bold else in_markdown(text.text)
    dagger = "".join(mark for mark in text.marks if mark == DAGGER)
    return " ".join([shown + dagger, *(f"[{mark}]" for mark in text.marks if mark != DAGGER)])


def in_markdown(text: str) -> str:
    """A text that Markdown shows as it is, within a table or outside."""
    return SPECIAL.sub(r"\\\g<0>", printable(text)).replace("<", "&lt;")


def prose(text: str) -> str:
    """A text for a reader of Markdown, on one line and without HTML; what else it marks is as its author wants it."""
    return re.sub("<(?=[A-Za-z/!?])", "&lt;", printable(text))


def latex(sheet: Sheet) -> Iterator[str]:
    """The lines of a table in LaTeX, which needs the package booktabs."""
    widths = [len(inner) or 1 for _, inner in sheet.groups]
    caption = f"{sheet.title}. {sheet.caption}" if sheet.title else sheet.caption
    yield from (r"\begin{table}", r"\centering", f"\\caption{{{in_latex(caption)}}}")
    yield from (f"\\begin{{tabular}}{{{'l' * len(sheet.names)}{'r' * sum(widths)}}}", r"\toprule")
    yield from latex_head(sheet, widths)
    yield r"\midrule"
    for line in sheet.lines:
        row = " & ".join(map(marked_in_latex, line))
        # else it would be an argument of the command before
        yield f"{'{}' * row.startswith(('[', '*'))}{row} \\\\"
    yield from (r"\bottomrule", r"\end{tabular}")
    for number, note in sheet.notes.items():
        yield f"\n{{\\footnotesize $^{{{number}}}$ {in_latex(note)}}}"
    yield from (r"\end{table}", "")


def latex_head(sheet: Sheet, widths: Sequence[int]) -> Iterator[str]:
    """The rows above the numbers: groups with a rule below each, and the names within them."""
    names = [in_latex(name) for name in sheet.names]
    if not any(inner for _, inner in sheet.groups):
        yield f"{' & '.join([*names, *(in_latex(name) for name, _ in sheet.groups)])} \\\\"
        return
    spans = [
        f"\\multicolumn{{{w}}}{{c}}{{{in_latex(name)}}}" for w, (name, _) in zip(widths, sheet.groups, strict=True)
    ]
    yield f"{' & '.join([*[''] * len(names), *spans])} \\\\"
    at = len(names) + 1
    for width in widths:
        yield f"\\cmidrule(lr){{{at}-{at + width - 1}}}"
        at += width
    inner = [in_latex(name) for _, of_group in sheet.groups for name in (of_group or [""])]
    yield f"{' & '.join([*names, *inner])} \\\\"


def marked_in_latex(text: Text) -> str:
    """A text in LaTeX, with its marks raised."""
    shown = f"\\textbf{{{in_latex(text.text)}}}" if text.bold else in_latex(text.text)
    marks = ",".join(r"\dagger" if mark == DAGGER else mark for mark in text.marks)
    return f"{shown}$^{{{marks}}}$" if marks else shown


def in_latex(text: str) -> str:
    """A text that LaTeX shows as it is."""
    return "".join(IN_LATEX.get(letter, letter) for letter in printable(text))
