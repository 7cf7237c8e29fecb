"""What a user calls his things is shown as it is, and never becomes Markdown, HTML or LaTeX."""

import re
from dataclasses import replace

import pytest
from helpers.benches import toy_suite

from fl_lightning.bench.layout import (
    Sheet,
    Text,
    in_latex,
    in_markdown,
    latex,
    latex_tables,
    markdown,
    prose,
    prose_in_latex,
    renamed,
    without_markdown,
)
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.table import render
from fl_lightning.errors import LONGEST, clipped, printable

LINES = ["\n", "\r", "\r\n", "\v", "\f", "\x85", "\u2028", "\u2029"]
ODD = ["\0", "\x1b[31m", "\x7f", "\udcff", "\ud800", "\u202e", "\b"]


@pytest.mark.parametrize("end", LINES, ids=ascii)
@pytest.mark.parametrize("form", ["tex", "md"])
def test_what_has_two_lines_is_on_one(tmp_path, end, form):
    """A second line of a title would leave the comment of LaTeX, and be a command."""
    evil = f"begin{end}\\input{{secret}}{end}# heading{end}| a | b |"
    suite = toy_suite(tmp_path)
    suite = replace(suite, title=evil, source=evil, notes=(evil, evil))
    suite = replace(suite, tables=(replace(suite.tables[0], caption=evil, page=evil),))
    cells = suite.cells()
    done = CellResult("", "", "done", values={0: 0.5}, plan="p", machine=evil)
    results = {cell.digest: replace(done, digest=cell.digest) for cell in cells}
    lines = render(suite, cells, results, form).split("\n")
    assert not any(other in line for line in lines for other in LINES)
    assert not any(line.startswith((r"\input", "| a |", "# heading")) for line in lines)
    if form == "tex":
        assert all(line.startswith("%") or r"\input" not in line for line in lines)


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_what_cannot_be_seen_or_written_is_escaped(odd):
    for show in (printable, clipped, in_markdown, in_latex, prose):
        made = show(f"a{odd}b")
        assert made.encode() and made.isprintable() and made.startswith("a") and made.endswith("b") and len(made) > 3


def test_what_can_be_seen_stays():
    text = "FedUV µ=0.1 (C/4), é ≥ 10⁻³ † ± 联邦 🙂"
    assert printable(text) == clipped(text) == text


def test_a_long_text_is_bounded_however_it_is_escaped():
    assert len(clipped("\udcff" * 10_000)) <= LONGEST


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`a*b`", r"\`a\*b\`"),
        ("a|b", r"a\|b"),
        ("<b>x</b>", "&lt;b>x&lt;/b>"),
        ("<!-- -->", "&lt;!-- -->"),
        ("_a_ __b__ _", r"\_a\_ \_\_b\_\_ \_"),
        ("[a](b)", r"[a]\(b)"),
        ("~~a~~", r"\~\~a\~\~"),
        ("&lt; &#60;", r"\&lt; \&#60;"),
        ("a\\b", r"a\\b"),
    ],
)
def test_markdown_shows_a_label_as_it_is(text, shown):
    assert in_markdown(text) == shown


@pytest.mark.parametrize("text", ["a_b", "Synthetic(1,1)", "[+0.10, +0.20]", "a & b", "x-y", "mean ± 2"])
def test_what_markdown_does_not_mark_stays(text):
    assert in_markdown(text) == text


def test_prose_may_be_marked_but_holds_no_html():
    assert prose("the *best* `x` < 3,\n<script>y</script>") == "the *best* `x` < 3, &lt;script>y&lt;/script>"


def test_a_row_that_begins_with_a_bracket_is_no_argument():
    r"""``\\`` and ``\midrule`` take a bracket on the next line for their argument, ``\\`` a star."""
    lines = [[Text("[1em]"), Text("a")], [Text("*"), Text("b")], [Text("c"), Text("[+1, +2]")]]
    text = "\n".join(latex(Sheet("A table", ["name"], [("x", [])], lines), "tab:a"))
    assert "{}[1em] & a \\\\" in text and "{}* & b \\\\" in text and "\nc & $[+1, +2]$ \\\\" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-0.37", "$-0.37$"),
        ("49.24 ± 10.97 (20 seeds)", r"$49.24 \pm 10.97$ (20 seeds)"),
        ("[+0.01, -20.11]", "$[+0.01, -20.11]$"),
        ("> 12", "$> 12$"),
        ("lr=0.01, alpha=0.5", r"lr=0.01, $\alpha = 0.5$"),
        ("FedLC (tau 1)", r"FedLC ($\tau = 1$)"),
        ("mu=1e-05", r"$\mu = 10^{-5}$"),
        ("lambda_=2.5e-3", r"$\lambda = 2.5 \cdot 10^{-3}$"),
        ("Synthetic(λ, μ)", r"Synthetic($\lambda$, $\mu$)"),
        ("A_&_B%", r"A\_\&\_B\%"),
        # neither a sign nor a coefficient
        ("torch-2.6, a-3, 2-3, alphabet 2, alpha=0.1.2", "torch-2.6, a-3, 2-3, alphabet 2, alpha=0.1.2"),
    ],
)
def test_numbers_and_coefficients_are_mathematics(text, shown):
    assert in_latex(text) == shown


def test_what_is_marked_for_markdown_is_marked_in_latex_too():
    text = "the `a_b` of **all**, *not* a * b, see [the page](https://x.org/a_b): test/accuracy"
    shown = r"the \texttt{a\_b} of \textbf{all}, \emph{not} a * b, see the page: test accuracy"
    assert prose_in_latex(text) == shown
    assert without_markdown(text) == "the a_b of all, not a * b, see the page: test/accuracy"


def test_a_setting_in_the_head_of_a_table_has_room_around_its_sign():
    sheet = Sheet("One", ["method"], [("norm=group", []), ("alpha=0.1", [])], [[Text("a"), Text("1"), Text("2")]])
    assert r"method & norm = group & $\alpha = 0.1$ \\" in list(latex(sheet, "tab:one"))


def test_each_table_has_a_label_of_its_own_and_one_without_rows_is_a_comment():
    rows = [[Text("a"), Text("1")]]
    sheets = [Sheet("One", ["x"], [("y", [])], lines, note="Of all.", key="A key") for lines in (rows, rows, [])]
    text = "\n".join(latex_tables(sheets))
    assert re.findall(r"\\label{(.*)}", text) == ["tab:a-key", "tab:a-key-2"]
    assert text.count(r"{\footnotesize Of all.}") == 2 and text.endswith("% One\n% Of all.")


def test_names_take_the_place_of_whole_words():
    sheet = Sheet("FedAvg2 and FedAvg", ["alpha"], [("alpha=0.1", ["ours"])], [[Text("FedAvg"), Text("x")]], title="T")
    shown = renamed(sheet, {"FedAvg": "Averaging", "alpha": "skew"})
    assert (shown.caption, shown.names, shown.groups) == ("FedAvg2 and Averaging", ["skew"], [("skew=0.1", ["ours"])])
    assert shown.lines == [[Text("Averaging"), Text("x")]] and renamed(sheet, {}) is sheet


def test_a_table_of_odd_labels_has_as_many_cells_as_others():
    odd = Sheet("A\ncaption", ["a|b"], [("c\nd", [])], [[Text("x|y\nz"), Text("`|`")]], {"1": "first\nsecond | third"})
    plain = Sheet("A caption", ["a"], [("c", [])], [[Text("x"), Text("z")]], {"1": "first"})
    counts = [[len(re.split(r"(?<!\\)\|", line)) for line in markdown(sheet)] for sheet in (odd, plain)]
    assert counts[0] == counts[1]


def test_in_markdown_each_column_of_a_group_has_the_name_of_the_group_and_its_own():
    groups = [("examples", []), ("accuracy in %", ["FedAvg", "FedProx"]), ("mean", ["ours", ""])]
    sheet = Sheet("A table", ["site"], groups, [[Text(text) for text in "abcdef"]])
    head = "| site | examples | accuracy in %: FedAvg | accuracy in %: FedProx | mean: ours | mean |"
    assert list(markdown(sheet))[2] == head
