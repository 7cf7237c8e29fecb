"""Tables of text, as Markdown and as LaTeX with booktabs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fl_lightning.utilities.errors import printable

# marks of scaled numbers and of differences to the baseline
DAGGER, STAR = "†", "*"
NONE = "-"
# markup of Markdown; an underscore within a word is not
SPECIAL = re.compile(r"[|*\\`~]|(?<![^\W_])_|_(?![^\W_])|(?<=\])\(|&(?=[#\w]+;)")
IN_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        "±": r"$\pm$",
        "≥": r"$\ge$",
        "≤": r"$\le$",
        "†": r"$^\dagger$",
        **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    }
)
LETTERS = "alpha beta gamma delta epsilon eta kappa lambda mu nu rho sigma tau theta"
GREEK = {**{name: f"\\{name}" for name in LETTERS.split(" ")}, "lambda_": r"\lambda"}
GREEK_LETTERS = {**dict(zip("αβγδεηκλμνρστθ", GREEK.values(), strict=False)), "µ": r"\mu"}
NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
# parts that LaTeX sets as mathematics: a coefficient, a mean with its deviation or bound, an interval, a number with
# a sign, a Greek letter
IN_MATHS = re.compile(
    rf"(?<![\w.])(?P<name>{'|'.join(GREEK)})(?: ?= ?| )(?P<value>[-+]?{NUMBER})(?![\w.]*\w)"
    rf"|(?P<formula>(?<![\w.])(?:[<>] )?{NUMBER} ± {NUMBER}|\[[-+]?{NUMBER}, [-+]?{NUMBER}\]"
    rf"|(?<![\w.)\]])(?:[<>] [-+]?|[-+]){NUMBER}(?![\w.]*\w))"
    rf"|(?P<letter>[{''.join(GREEK_LETTERS)}])"
)
EXPONENT = re.compile(r"(?P<factor>\d+(?:\.\d+)?)e(?P<sign>[-+]?)0*(?P<power>\d+)")
# letters of a row that fit into one column of two
ONE_COLUMN = 50
# shrinks a table that is wider than the text
FIT = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
PACKAGES = r"% \usepackage{booktabs,graphicx}"
# cells of a column that is aligned as numbers
NUMERIC = re.compile(r"[-+<>\[]* ?\d")
# the tag of a metric in prose
TAG = re.compile(r"(?<![\w/])(test|val|train)/([a-z]\w*)(?![\w/])")


@dataclass(frozen=True)
class StyledText:
    """The text of one cell of a table.

    Args:
        text: the text.
        bold: whether it is in bold.
        marks: dagger, star and numbers of footnotes.
    """

    text: str
    bold: bool = False
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Args:
        caption: how to read it.
        names: heads of the columns on the left, which name the rows.
        groups: head of each column, or group of columns, and the heads within a group.
        lines: the rows.
        notes: footnotes by number.
        title: beginning of its caption in LaTeX; in Markdown it stands above.
        key: beginning of its label in LaTeX, after ``tab:``.
    """

    caption: str
    names: Sequence[str]
    groups: Sequence[tuple[str, Sequence[str]]]
    lines: Sequence[Sequence[StyledText]]
    notes: dict[str, str] = field(default_factory=dict)
    title: str = ""
    key: str = "table"


def plain_table(
    caption: str,
    names: Sequence[str],
    heads: Iterable[str | tuple[str, Sequence[str]]],
    rows: Iterable[Sequence[object]],
    **arguments: Any,
) -> TextTable:
    """Return a table of texts in one style, from its heads, which may be groups, and its rows."""
    groups = [(head, []) if isinstance(head, str) else head for head in heads]
    lines = [[*map(styled, row)] for row in rows]
    return TextTable(caption, names, groups, lines, **arguments)


def styled(text: object) -> StyledText:
    """Return a text in the plain style, unless it has a style."""
    return text if isinstance(text, StyledText) else StyledText(str(text))


def renamed(table: TextTable, names: Mapping[str, str]) -> TextTable:
    """Return a table with other names, such as ``Accuracy`` for ``test/accuracy``."""
    if not names:
        return table

    def shown(text: str) -> str:
        return with_names(text, names)

    return replace(
        table,
        caption=shown(table.caption),
        names=[*map(shown, table.names)],
        groups=[(shown(name), [*map(shown, inner)]) for name, inner in table.groups],
        lines=[[replace(text, text=shown(text.text)) for text in line] for line in table.lines],
        notes={number: shown(note) for number, note in table.notes.items()},
        title=shown(table.title),
    )


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Return a text in which whole words, or groups of words, have other names."""
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    words = rf"(?<![\w/.])(?:{'|'.join(longest_first)})(?![\w/])"
    return re.sub(words, lambda match: names[match[0]], text) if names else text


def markdown(table: TextTable) -> Iterator[str]:
    """Yield the lines of a table in Markdown, with the name of the group in the head of each of its columns."""
    heads = [*table.names]
    for name, inner in table.groups:
        heads += [f"{name}: {head}" if head else name for head in (inner or [""])]
    yield from (in_markdown(table.caption), "")
    if table.lines:
        yield f"| {' | '.join(map(in_markdown, heads))} |"
        rules = ["---"] * len(table.names) + ["---:"] * (len(heads) - len(table.names))
        yield f"| {' | '.join(rules)} |"
        yield from (f"| {' | '.join(map(marked, line))} |" for line in table.lines)
        yield ""
    for number, note in table.notes.items():
        yield f"- [{number}] {in_markdown(note)}"
    if table.notes:
        yield ""


def marked(text: StyledText) -> str:
    """Return a text in Markdown, with its marks."""
    escaped = f"**{in_markdown(text.text)}**" if text.bold else in_markdown(text.text)
    signs = "".join({DAGGER: DAGGER, STAR: r"\*"}.get(mark, "") for mark in text.marks)
    notes = [f"[{mark}]" for mark in text.marks if mark not in (DAGGER, STAR)]
    return " ".join([escaped + signs, *notes])


def in_markdown(text: str) -> str:
    """Return a text with escaped Markdown."""
    return SPECIAL.sub(r"\\\g<0>", printable(text)).replace("<", "&lt;")


# ------------------------------------------------------------------ LaTeX
def latex_tables(tables: Iterable[TextTable]) -> Iterator[str]:
    """Yield the lines of tables in LaTeX with the packages booktabs and graphicx; their labels differ."""
    counts = Counter[str]()
    for table in tables:
        key = "-".join(re.findall("[a-z0-9]+", table.key.lower())) or "table"
        counts[key] += 1
        yield from latex(table, f"tab:{key}" if counts[key] == 1 else f"tab:{key}-{counts[key]}")


def latex(table: TextTable, label: str) -> Iterator[str]:
    """Yield the lines of a table in LaTeX; a table without rows becomes a comment."""
    caption = f"{table.title}. {table.caption}" if table.title else table.caption
    if not table.lines:
        yield f"% {printable(caption)}"
        return
    names = [name for group, inner in table.groups for name in (inner or [group])]
    columns = [[text.text for text in column] for column in zip(*table.lines, strict=True)]
    heads = [*table.names, *names]
    widths = [2 + max(map(len, (head, *column))) for head, column in zip(heads, columns, strict=True)]
    environment = "table" if sum(widths) <= ONE_COLUMN else "table*"
    aligned = "l" * len(table.names)
    for column in columns[len(table.names) :]:
        aligned += "r" if any(map(NUMERIC.match, column)) else "l"
    yield from (f"\\begin{{{environment}}}", r"\centering", f"\\caption{{{in_latex(without_slash(caption))}}}")
    yield from (f"\\label{{{label}}}", FIT)
    yield from (f"\\begin{{tabular}}{{{aligned}}}", r"\toprule")
    yield from latex_head(table)
    yield r"\midrule"
    for line in table.lines:
        row = " & ".join(map(marked_in_latex, line))
        # otherwise it is an argument of the command before it
        start = "{}" if row.startswith(("[", "*")) else ""
        yield f"{start}{row} \\\\"
    yield from (r"\bottomrule", r"\end{tabular}}")
    marked_notes = [f"$^{{{number}}}$ {in_latex(note)}" for number, note in table.notes.items()]
    yield from (f"\n\\smallskip{{\\footnotesize {text}}}" for text in marked_notes)
    yield from (f"\\end{{{environment}}}", "")


def latex_head(table: TextTable) -> Iterator[str]:
    """Yield the head: groups with a rule below each, and the heads within them."""
    widths = [len(inner) or 1 for _, inner in table.groups]
    names = [head_in_latex(name) for name in table.names]
    if not any(inner for _, inner in table.groups):
        yield f"{' & '.join([*names, *(head_in_latex(name) for name, _ in table.groups)])} \\\\"
        return
    spans = ["" for _ in names]
    for width, (name, _) in zip(widths, table.groups, strict=True):
        spans.append(f"\\multicolumn{{{width}}}{{c}}{{{head_in_latex(name)}}}")
    yield f"{' & '.join(spans)} \\\\"
    at = len(names) + 1
    for width in widths:
        yield f"\\cmidrule(lr){{{at}-{at + width - 1}}}"
        at += width
    inner = [head_in_latex(name) for _, of_group in table.groups for name in (of_group or [""])]
    yield f"{' & '.join([*names, *inner])} \\\\"


def head_in_latex(text: str) -> str:
    """Return the heading of a column in LaTeX: Greek letters as symbols, and ``alpha=0.1`` with spaces around ``=``."""
    return f"${GREEK[text]}$" if text in GREEK else re.sub(r"(?<=\w)=(?=\w)", " = ", in_latex(without_slash(text)))


def without_slash(text: str) -> str:
    """Return a text with words in place of tags: ``test accuracy`` for ``test/accuracy``."""
    return TAG.sub(lambda match: f"{match[1]} {match[2].replace('_', ' ')}", text)


def marked_in_latex(text: StyledText) -> str:
    """Return a text in LaTeX, with its marks raised."""
    escaped = "--" if text.text == NONE else in_latex(text.text)
    if text.bold:
        # mathematics needs another command for bold
        escaped = f"\\textbf{{\\boldmath {escaped}}}"
    marks = ",".join({DAGGER: r"\dagger", STAR: r"\ast"}.get(mark, mark) for mark in text.marks)
    return f"{escaped}$^{{{marks}}}$" if marks else escaped


def in_latex(text: str) -> str:
    """Return a text escaped for LaTeX, with numbers and Greek letters as mathematics."""
    parts, end, text = [], 0, printable(text)
    for match in IN_MATHS.finditer(text):
        parts += [text[end : match.start()].translate(IN_LATEX), formula_in_latex(match)]
        end = match.end()
    return "".join([*parts, text[end:].translate(IN_LATEX)])


def formula_in_latex(match: re.Match[str]) -> str:
    """Return a match of :data:`IN_MATHS` as a formula."""
    if match["letter"]:
        return f"${GREEK_LETTERS[match['letter']]}$"
    formula = f"{GREEK[match['name']]} = {match['value']}" if match["name"] else match[0].replace("±", r"\pm")

    def power(number: re.Match[str]) -> str:
        sign = number["sign"].replace("+", "")
        factor = "" if number["factor"] == "1" else rf"{number['factor']} \cdot "
        return f"{factor}10^{{{sign}{number['power']}}}"

    return f"${EXPONENT.sub(power, formula)}$"
