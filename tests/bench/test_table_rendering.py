"""Names and texts of a user are shown as they are, and never become Markdown, HTML or LaTeX."""

import re

import pytest
from helpers.benches import result, tables_of, toy_suite

LINES = ["\n", "\r", "\r\n", "\v", "\f", "\x85", "\u2028", "\u2029"]


@pytest.fixture
def shown(tmp_path):
    """``shown(label, form)`` is the first column of the row of a method with this label."""

    def show(label, form="md"):
        suite = toy_suite(tmp_path, {"base": {}, "axes": {"method": {"FedAvg": {}, label: {"method": ["a"]}}}})
        text = tables_of(suite, suite.cells(), {}, form)
        if form == "md":
            return re.findall(r"^\| (.*) \| waiting \|$", text, re.MULTILINE)[-1]
        return re.search(r"FedAvg & waiting \\\\\n(.*) & waiting \\\\", text)[1]

    return show


@pytest.mark.parametrize("form", ["tex", "md"])
def test_a_text_of_several_lines_is_on_one(tmp_path, form):
    """A second line of a title would leave the comment of LaTeX, and be a command."""
    evil = "".join(f"begin{end}\\input{{secret}}{end}# heading{end}| a | b |" for end in LINES)
    keys = {"title": evil, "source": evil, "notes": [evil, evil], "tables": [{"caption": evil, "page": evil}]}
    suite = toy_suite(tmp_path, {"base": {}, "axes": {"method": {"FedAvg": {}}}, **keys})
    cells = suite.cells()
    lines = tables_of(suite, cells, {cell.digest: result(cell, machine=evil) for cell in cells}, form).split("\n")
    assert not any(other in line for line in lines for other in LINES)
    assert not any(line.startswith((r"\input", "| a |", "# heading")) for line in lines)
    assert form == "md" or all(line.startswith("%") or r"\input" not in line for line in lines)


@pytest.mark.parametrize("form", ["tex", "md"])
def test_what_cannot_be_seen_or_written_is_escaped(tmp_path, form):
    suite = toy_suite(tmp_path)
    cells = suite.cells()
    reason = "a\0b\x1b[31m\x7f\udcff\ud800\u202e\b, FedUV é 10⁻³ 联邦"
    results = {cell.digest: result(cell, {}, "failed", reason=reason) for cell in cells}
    text = tables_of(suite, cells, results, form)
    assert text.encode() and text.replace("\n", "").isprintable()
    assert "FedUV é 10⁻³ 联邦" in text and "udcff" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`a*b`", r"\`a\*b\`"),
        ("a|b", r"a\|b"),
        ("<b>x</b>", "&lt;b>x&lt;/b>"),
        ("_a_ __b__ _", r"\_a\_ \_\_b\_\_ \_"),
        ("[a](b)", r"[a]\(b)"),
        ("~~a~~", r"\~\~a\~\~"),
        ("&lt; &#60;", r"\&lt; \&#60;"),
        ("a\\b", r"a\\b"),
        *[(text, text) for text in ("a_b", "Synthetic(1,1)", "[+0.10, +0.20]", "a & b", "x-y", "mean ± 2")],
    ],
)
def test_markdown_shows_a_label_as_it_is(shown, text, expected):
    assert shown(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-0.37", "$-0.37$"),
        ("49.24 ± 10.97 (20 seeds)", r"$49.24 \pm 10.97$ (20 seeds)"),
        ("> 12", "$> 12$"),
        ("lr=0.01, alpha=0.5", r"lr=0.01, $\alpha = 0.5$"),
        ("FedLC (tau 1)", r"FedLC ($\tau = 1$)"),
        ("mu=1e-05", r"$\mu = 10^{-5}$"),
        ("lambda_=2.5e-3", r"$\lambda = 2.5 \cdot 10^{-3}$"),
        ("Synthetic(λ, μ)", r"Synthetic($\lambda$, $\mu$)"),
        ("A_&_B%", r"A\_\&\_B\%"),
        # neither a sign nor a coefficient
        ("torch-2.6, a-3, 2-3, alphabet 2, alpha=0.1.2", "torch-2.6, a-3, 2-3, alphabet 2, alpha=0.1.2"),
        # ``\\`` takes a bracket or a star on the next line for its argument
        ("[1em]", "{}[1em]"),
        ("*", "{}*"),
    ],
)
def test_latex_has_numbers_and_coefficients_as_mathematics(shown, text, expected):
    assert shown(text, "tex") == expected


def test_texts_of_a_suite_are_shown_as_they_are(tmp_path):
    note = "a *b* of 50 %\n<script>y</script>"
    suite = toy_suite(tmp_path, {"base": {}, "axes": {"method": {"FedAvg": {}}}, "notes": [note]})
    assert r"- a \*b\* of 50 % &lt;script>y&lt;/script>" in tables_of(suite, suite.cells(), {}).splitlines()


def test_each_table_in_latex_has_a_label_of_its_own(tmp_path):
    suite = toy_suite(tmp_path, {"base": {}, "axes": {"method": {"FedAvg": {}}}, "tables": [{}, {}]})
    labels = re.findall(r"\\label{(.*)}", tables_of(suite, suite.cells(), {}, "tex"))
    assert len(labels) == len(set(labels)) == 2 and labels[1] == f"{labels[0]}-2"
