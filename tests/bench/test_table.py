"""The numbers, intervals, verdicts, marks and footnotes of a suite's tables."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.benches import result, tables_of, toy_suite
from helpers.errors import assert_names, refused
from scipy import stats

from fl_lightning.bench.comparison import suite_comparison
from fl_lightning.bench.statistics import fairness
from fl_lightning.bench.table import comparisons_csv, conclusion
from fl_lightning.callbacks.personalized_accuracy import spread_over_clients

# the 97.5 % quantiles of Student's t for 1 and 2 degrees of freedom, from a printed table
T = {2: 12.7062, 3: 4.30265}
BASE = {
    "title": "A suite",
    "base": {"model": {"class_path": "X"}},
    "axes": {
        "alpha": {"key": "data.init_args.alpha", "values": [0.1, 1]},
        "method": {"FedAvg": {}, "FedProx": {"method": ["prox"]}, "MOON": {"method": ["moon"]}},
    },
    "seeds": 3,
}


@pytest.fixture
def make(tmp_path):
    """A suite from the common parts and some keys."""
    return lambda **keys: toy_suite(tmp_path, {**BASE, **keys})


def results_of(cells, finals, of=None):
    """Results whose last value is ``finals[alpha, method][seed]`` after one of 0; None waits. ``of`` changes some."""
    made = {}
    for cell in cells:
        alpha, method = cell.labels["alpha"], cell.labels["method"]
        value = finals[alpha, method][cell.seed]
        if value is not None:
            made[cell.digest] = result(
                cell, **{"values": [0.0, value], **(of or {}).get((alpha, method, cell.seed), {})}
            )
    return made


def lines(text):
    """The lines of CSV by table, alpha and method."""
    return {(one["table"], one["alpha"], one["method"]): one for one in csv.DictReader(io.StringIO(text))}


FINALS = {
    ("0.1", "FedAvg"): [0.60, 0.62, 0.64],
    ("0.1", "FedProx"): [0.63, 0.66, 0.67],
    ("0.1", "MOON"): [0.55, 0.60, 0.66],
    ("1", "FedAvg"): [0.70, 0.71, None],
    ("1", "FedProx"): [0.73, None, None],
    ("1", "MOON"): [0.75, 0.77, 0.70],
}


def csv_of(suite, finals=FINALS, of=None):
    cells = suite.cells()
    return lines(tables_of(suite, cells, results_of(cells, finals, of), "csv"))


def md_of(suite, finals=FINALS, scale=1.0, of=None, form="md"):
    cells = suite.cells(scale)
    return tables_of(suite, cells, results_of(cells, finals, of), form)


def row_of(text, *labels):
    """The cells of the first row of a Markdown table that begins with some labels."""
    start = f"| {' | '.join(labels)} | "
    (line,) = [one for one in text.splitlines() if one.startswith(start)][:1]
    return line[len(start) : -2].split(" | ")


def test_the_level_of_the_interval_is_the_suite_s(make):
    line = csv_of(make(confidence=0.5))["1", "1", "MOON"]
    assert float(line["high"]) - float(line["difference"]) == pytest.approx(0.5)  # tan(pi / 4) times the error
    assert "50 % interval" in md_of(make(confidence=0.5))


def test_a_verdict_on_the_sign_holds_for_all_comparisons_of_the_table_together(make):
    """The differences of FedProx have p = 0.035 by Student's test: decided if it is alone, and not of two methods."""
    finals = {**FINALS, ("0.1", "FedProx"): [0.62, 0.65, 0.68]}
    tables = [{"published": {"FedAvg": {0.1: 60}, "FedProx": {0.1: 63}}}]
    for number, verdict in ((2, "same sign"), (3, "undecided")):
        methods = dict(list(BASE["axes"]["method"].items())[:number])
        axes = {"alpha": {"key": "data.init_args.alpha", "values": [0.1]}, "method": methods}
        line = csv_of(make(axes=axes, tables=tables), finals)["1", "0.1", "FedProx"]
        assert float(line["p_holm"]) == pytest.approx((number - 1) * stats.ttest_1samp([2, 3, 4], 0).pvalue)
        assert float(line["low"]) > 0 and line["verdict"] == verdict


def test_published_numbers_stand_beside_ours(make):
    table = {"page": 7, "caption": "Table 9", "published": {"FedAvg": {0.1: [60.5, 0.25], 1: 70}, "MOON": {0.1: 59.5}}}
    text = md_of(make(source="Someone et al.", tables=[table]))
    assert "Source: Someone et al." in text
    assert "## Table 9 (page 7 of the source)" in text
    assert row_of(text, "FedAvg") == ["62.00 ± 2.00", "60.50 ± 0.25", "70.50 ± 0.71 (2 of 3 seeds, 1 waiting)", "70.00"]
    # of -5, -2 and 2: Student's interval of 20 such differences is +- 1.64, that of 19 is +- 1.69
    assert row_of(text, "MOON", "0.1")[4:] == ["-1.00", "undecided, about 20 seeds"]
    line = lines(tables_of(make(tables=[table]), make().cells(), {}, "csv"))["1", "0.1", "FedAvg"]
    assert (line["published"], line["published_deviation"], line["published_difference"]) == ("60.5", "0.25", "")


@pytest.mark.parametrize(
    ("page", "said"), [(7, "page 7 of the source"), ("7", "page 7 of the source"), ("Section 5.3", "Section 5.3")]
)
def test_a_published_table_is_found_by_its_page_or_section(make, page, said):
    assert f"## Table 9 ({said})" in md_of(make(tables=[{"page": page, "caption": "Table 9"}])).splitlines()


def test_the_best_row_of_a_column_is_bold_and_a_star_marks_an_interval_without_0(make):
    text = md_of(make())
    assert row_of(text, "FedProx")[0] == r"**65.33 ± 2.08**\*"
    assert row_of(text, "MOON")[1] == "**74.00 ± 3.61**"
    assert text.count("**") == 4 and text.count(r"\*") == 1
    for (_, alpha, name), one in csv_of(make()).items():
        star = row_of(text, name)[alpha == "1"].endswith(r"\*")
        assert star == (one["low"] != "" and float(one["low"]) * float(one["high"]) > 0)
    assert row_of(md_of(make(minimize=True)), "MOON")[0].startswith("**60.33")
    # equal numbers are both best, a lone one is not
    text = md_of(make(), {**FINALS, ("0.1", "MOON"): [0.630004, 0.66, 0.67]})
    assert row_of(text, "FedProx")[0].startswith("**") and row_of(text, "MOON")[0].startswith("**")
    alone = {key: some if key[1] == "FedProx" or key[0] == "1" else [None] * 3 for key, some in FINALS.items()}
    assert row_of(md_of(make(), alone), "FedProx")[0].startswith("65.33")


def test_a_suite_without_a_baseline_compares_nothing(make):
    text = md_of(make(baseline={}))
    assert "Difference" not in text and r"\*" not in text and row_of(text, "FedAvg")[0] == "62.00 ± 2.00"
    line = csv_of(make(tables=[{"show": "seconds"}], baseline={}), of=SECONDS)["1", "0.1", "FedProx"]
    assert float(line["mean"]) == pytest.approx(2.4) and line["shows"] == "seconds a round"


@pytest.mark.parametrize("plan", ["other", ""])
def test_only_cells_of_one_known_partition_are_compared(make, plan):
    suite = make(tables=[{"published": {"FedAvg": {0.1: 60}, "FedProx": {0.1: 61}}}])
    some = {("0.1", one, 1): {"plan": plan} for one in ("FedAvg", "FedProx")[plan == "other" :]}
    line = csv_of(suite, of=some)["1", "0.1", "FedProx"]
    assert (line["pairs"], line["n"]) == ("2", "3") and float(line["difference"]) == pytest.approx(3)
    every = {("0.1", "FedProx", seed): {"plan": plan} for seed in range(3)}
    line = csv_of(suite, of=every)["1", "0.1", "FedProx"]
    assert (line["difference"], line["pairs"], line["verdict"]) == ("", "0", "not compared")
    assert float(line["mean"]) == pytest.approx(196 / 3)
    # none of the column is marked as best; the two tables share their footnotes
    rows = [row_of(md_of(suite, of=every), "FedProx", *more) for more in ((), ("0.1",))]
    assert rows[0][0] == "65.33 ± 2.08 [1] [2] [3]"
    assert rows[1] == ["- [1] [2] [3]", "-", "0", "-", "+1.00", "not compared"]
    with_p = [line for line in csv_of(suite, of=every).values() if line["p_holm"]]
    assert f"for all {len(with_p)} comparisons" in md_of(suite, of=every)


def test_what_has_no_number_shows_as_such_with_the_reason(make):
    of = {("0.1", "MOON", seed): {"state": "failed", "reason": "no such\nfile", "values": {}} for seed in (0, 1)}
    of |= {("0.1", "MOON", 2): {"values": [0.5, math.nan, 0.5]}}
    of |= {("0.1", "FedProx", seed): {"state": "failed", "reason": "no data"} for seed in range(3)}
    of |= {("1", "FedAvg", seed): {"state": "running"} for seed in range(2)}
    finals = {**FINALS, ("1", "MOON"): [None] * 3}
    text = md_of(make(), finals, of=of)
    assert row_of(text, "MOON") == ["1 nan, 2 failed [2] [3]", "waiting"]
    assert row_of(text, "FedProx") == ["failed [1]", "73.00 (1 of 3 seeds, 2 waiting)"]
    assert row_of(text, "FedAvg")[1] == "2 running, 1 waiting"
    assert "- [1] seeds 0, 1, 2: failed: no data" in text and "- [2] seeds 0, 1: failed: no such file" in text
    assert "- [3] seed 2: test/accuracy was nan in round 1" in text
    assert "18 cells: 5 done, 2 running, 6 waiting, 5 failed." in text
    line = csv_of(make(), finals, of=of)["1", "0.1", "MOON"]
    assert (line["mean"], line["difference"], line["nan"], line["failed"]) == ("", "", "1", "2")


def test_scaled_numbers_are_marked_and_judged_at_their_scale(make):
    table = {"published": {"FedAvg": {0.1: 60}, "FedProx": {0.1: 61}}}
    text = md_of(make(tables=[table]), scale=0.25)
    assert row_of(text, "FedAvg")[0] == "62.00 ± 2.00†"
    assert "† scaled: a run has about 0.25 of the suite's work." in text
    assert row_of(text, "FedProx", "0.1")[-1] == "same sign at this scale"
    assert row_of(text, "FedProx", "0.1")[0] == "+3.33†"
    assert "relative to FedAvg at this scale" in text
    assert "†" not in md_of(make(tables=[table]))


def test_csv_of_several_suites_has_the_axes_of_all(make):
    methods = BASE["axes"]["method"]
    longer, shorter = (
        make(axes={"method": methods, **{axis: {"key": axis, "values": [1]} for axis in axes}})
        for axes in (("alpha", "size"), ("rate",))
    )
    text = comparisons_csv(
        (None, suite_comparison(suite, suite.tables[0], suite.cells(), {})) for suite in (longer, shorter)
    )
    found = list(csv.DictReader(io.StringIO(text)))
    assert [(one["alpha"], one["size"], one["rate"]) for one in found] == [("1", "1", "")] * 3 + [("", "", "1")] * 3


def test_a_row_ends_with_how_often_it_has_each_verdict(make):
    table = {"published": {"FedAvg": {0.1: 60, 1: 70}, "FedProx": {0.1: 61, 1: 71}, "MOON": {0.1: 50, 1: 60}}}
    text = md_of(make(tables=[table]), {**FINALS, ("0.1", "MOON"): [0.8, 0.82, 0.85]})
    end = text[text.index("Verdicts relative to FedAvg, as numbers of columns:") :]
    assert end.splitlines()[2:4] == ["- FedProx: 1 same sign, 1 undecided", "- MOON: 1 reversed, 1 undecided"]


def values(*series):
    """Values by round of each seed, for all three methods alike."""
    methods = "FedAvg", "FedProx", "MOON"
    return {("0.1", method, seed): {"values": one} for method in methods for seed, one in enumerate(series)}


CURVES = values([0.2, 0.6, 0.5, 0.4], [0.3, 0.3, 0.5, 0.6], [0.1, 0.9, 0.2, 0.3])


@pytest.mark.parametrize(
    ("table", "numbers"),
    [
        ({"show": "final"}, [40, 60, 30]),
        ({"show": "best"}, [60, 60, 90]),
        ({"show": "mean", "rounds": [1, 2]}, [55, 40, 55]),
        ({"show": "last", "k": 3}, [50, 140 / 3, 140 / 3]),
        ({"show": "last", "k": 9}, [42.5, 42.5, 37.5]),
        ({"show": "rounds_to", "target": 0.5}, [2, 3, 2]),
    ],
)
def test_a_table_shows_what_it_says_of_the_rounds(make, table, numbers):
    line = csv_of(make(tables=[table]), of=CURVES)["1", "0.1", "MOON"]
    assert float(line["mean"]) == pytest.approx(sum(numbers) / 3)
    mean = sum(numbers) / 3
    assert float(line["deviation"]) == pytest.approx(math.sqrt(sum((one - mean) ** 2 for one in numbers) / 2))


def test_a_mean_over_rounds_that_a_run_does_not_have_is_missing(make):
    line = csv_of(make(tables=[{"show": "mean", "rounds": [1, 4]}]), of=CURVES)["1", "0.1", "MOON"]
    assert line["mean"] == "" and "rounds 1 to 4" in line["notes"]


def test_the_best_of_a_loss_is_its_least(make):
    suite = make(tables=[{"show": "best"}], minimize=True, percent=False)
    assert float(csv_of(suite, of=CURVES)["1", "0.1", "MOON"]["mean"]) == pytest.approx((0.2 + 0.3 + 0.1) / 3)
    to = make(tables=[{"show": "rounds_to", "target": 0.2}], minimize=True)
    assert float(csv_of(to, of=CURVES)["1", "0.1", "MOON"]["mean"]) == pytest.approx((1 + 4 + 1) / 3)
    assert row_of(md_of(suite, of=CURVES), "MOON")[0].startswith("**0.2000 ± 0.1000")


def test_a_target_that_is_not_reached_makes_a_bound(make):
    suite = make(tables=[{"show": "rounds_to", "target": 0.6}])
    of = {**CURVES, ("0.1", "FedAvg", 2): {"values": [0.1, 0.2, 0.3, 0.4]}}
    of |= {("0.1", "MOON", seed): {"values": [0.5, 0.1]} for seed in range(3)}
    text = md_of(suite, of=of)
    assert row_of(text, "FedProx")[0] == "**2.7 ± 1.2**"
    assert row_of(text, "FedAvg")[0] == "> 3.3 [1]"  # of 2, 4 and at least 4
    assert row_of(text, "MOON")[0] == "> 2 [2]"  # a bound is never the best
    assert "- [1] seed 2: missed the target in 4 rounds" in text
    assert "counts with all its rounds, and > marks a lower bound" in text
    # at least 2 - 2 and 2 - 4; neither reaches it with seed 2
    assert row_of(text, "MOON", "0.1") == ["> -1.0", "-", "2", "-"]
    assert row_of(text, "FedProx", "0.1") == ["&lt; -0.7", "-", "3", "-"]  # 2 - 2, 4 - 4 and at most 2 - 4
    line = csv_of(suite, of=of)["1", "0.1", "MOON"]
    assert (line["bound"], line["low"], line["high"]) == (">", "", "")


SECONDS = {
    (alpha, method, seed): {"seconds": base * factor}
    for alpha, base in (("0.1", 2.0), ("1", 8.0))
    for method, factors in {"FedAvg": (1, 1, 1), "FedProx": (1.1, 1.3, 1.2), "MOON": (2, 2, 2)}.items()
    for seed, factor in enumerate(factors)
}


def test_seconds_are_ratios_to_the_baseline_of_the_column(make):
    table = {"show": "seconds", "published": {"FedAvg": {0.1: 20}, "FedProx": {0.1: [25, 1]}, "MOON": {1: 30}}}
    text = md_of(make(tables=[table]), of=SECONDS)
    assert row_of(text, "FedAvg")[:2] == ["**1.00 ± 0.00**", "1.00"]
    assert row_of(text, "FedProx")[:2] == ["1.20 ± 0.10", "1.25 ± 0.05"]
    assert row_of(text, "MOON")[2:] == [
        "2.00 ± 0.00 (2 of 3 seeds)",
        "-",
    ]  # the baseline of that column is not published
    assert "A round of FedAvg takes 2 s (alpha=0.1), 8 s (alpha=1)." in text
    # of 0.1, 0.3 and 0.2, times 4 comparisons
    p = f"{4 * stats.ttest_1samp([0.1, 0.3, 0.2], 0).pvalue:.3f}"
    assert row_of(text, "FedProx", "0.1") == ["+0.20", "[-0.05, +0.45]", "3", p, "+0.25", "undecided, about 4 seeds"]


def test_seconds_of_different_machines_are_not_compared(make):
    of = {**SECONDS, ("0.1", "MOON", 0): {"seconds": 9.0, "machine": "gpu"}}
    line = csv_of(make(tables=[{"show": "seconds"}]), of=of)["1", "0.1", "MOON"]
    assert (line["n"], line["pairs"], line["mean"], line["difference"]) == ("2", "2", "2.0", "1.0")
    assert "seed 0: not compared with FedAvg: they ran on different machines" in line["notes"]


def test_ranks_are_among_the_rows_of_a_column_and_seed(make):
    finals = {**FINALS, ("0.1", "MOON"): [0.60, 0.60, 0.69]}
    text = md_of(make(tables=[{"show": "rank"}]), finals)
    assert row_of(text, "FedProx")[0] == r"**1.33 ± 0.58**\*"  # 1, 1, 2
    assert row_of(text, "FedAvg")[0] == "2.50 ± 0.50"  # 2.5, 2, 3
    assert row_of(text, "MOON")[0] == "2.17 ± 1.04"  # 2.5, 3, 1
    assert row_of(text, "MOON")[1:] == ["**1.00 (1 of 3 seeds)**", "1.58"]  # seeds 1 and 2 are not complete


def test_a_failed_row_has_no_rank_and_different_partitions_none_at_all(make):
    of = {("0.1", "FedProx", seed): {"state": "failed", "reason": "x"} for seed in range(3)}
    of |= {("0.1", "MOON", 1): {"plan": "other"}}
    table = csv_of(make(tables=[{"show": "rank"}]), of=of)
    assert table["1", "0.1", "FedProx"]["n"] == "0"
    assert (table["1", "0.1", "MOON"]["n"], float(table["1", "0.1", "MOON"]["mean"])) == ("2", 1.5)
    assert "not ranked: the hashes of the partitions of this column differ" in table["1", "0.1", "MOON"]["notes"]


def test_excluded_cells_are_left_blank_and_empty_rows_left_out(make):
    suite = make(exclude=[{"method": "MOON", "alpha": 1}])
    assert row_of(md_of(suite), "MOON")[1] == "-"
    cells = [cell for cell in suite.cells() if cell.labels["method"] != "MOON"]
    assert "MOON" not in tables_of(suite, cells, results_of(cells, FINALS))


def test_a_suite_of_one_axis_has_one_column(make):
    suite = make(axes={"method": BASE["axes"]["method"]}, tables=[{"published": {"FedAvg": 60, "MOON": 61}}])
    finals = {"FedAvg": [0.5, 1.5, 2.5], "FedProx": [0.5, 1.5, 2.5], "MOON": [0.59, 1.6, 2.61]}
    cells = suite.cells()
    results = {cell.digest: result(cell, [finals[cell.labels["method"]][cell.seed]]) for cell in cells}
    text = tables_of(suite, cells, results)
    assert row_of(text, "FedProx") == ["150.00 ± 100.00", "-"]
    assert row_of(text, "MOON", "+10.00") == ["[+7.52, +12.48]", "3", "0.007", "+1.00", "same sign"]


def test_pairs_that_tell_no_spread_decide_nothing_and_a_footnote_says_why(make):
    suite = make(tables=[{"published": {"FedAvg": {0.1: 60}, "FedProx": {0.1: 61}}}])
    finals = {**FINALS, ("0.1", "FedProx"): [0.61, 0.63, 0.65]}
    failed = {("0.1", "MOON", 1): {"state": "failed", "reason": "x"}}
    # the footnotes of the second table go on counting after those of the first
    for of, first in (({}, 1), (failed, 2)):
        text = md_of(suite, finals, of=of)
        _, ends, pairs, *_, said = row_of(text, "FedProx", "0.1")
        assert (ends, pairs, said.partition(",")[0]) == (f"- [{first}]", "3", "undecided")
        assert sum(line.startswith(f"- [{first}] no interval: ") for line in text.splitlines()) == 1
    line = csv_of(suite, finals)["1", "0.1", "FedProx"]
    assert (line["low"], line["high"], line["verdict"]) == ("", "", "undecided")
    assert line["notes"].startswith("no interval: ")
    tex = md_of(suite, finals, form="tex")
    assert "$ & --$^{1}$ & " in tex and "$^{1}$ no interval: " in tex


def test_a_metric_that_leaves_the_numbers_is_as_good_as_nan(make):
    """Its mean or its square would be infinite."""
    of = {("0.1", "MOON", seed): {"values": [0.5, 1e308]} for seed in range(3)}
    for show in ("final", "best", "last", "rank"):
        line = csv_of(make(tables=[{"show": show}]), of=of)["1", "0.1", "MOON"]
        assert (line["nan"], line["n"]) == ("3", "0") and "was 1e+308 in round 1" in line["notes"]


def test_each_method_may_be_compared_with_itself(make):
    """Such as with a term and without it, which is an axis of its own."""
    published = {"FedAvg": {0.1: {"A": 60}, 1: {"A": 70}}, "MOON": {0.1: {"A": 75}, 1: {"A": 72}}}
    table = {"rows": ["method", "alpha"], "columns": ["data"], "published": published}
    suite = make(axes={**BASE["axes"], "data": {"A": {}}}, baseline={"alpha": 1}, tables=[table])
    text = md_of(suite)
    assert "Difference to alpha=1 on the same seeds" in text
    # its p-value, 0.033, is above 0.05 by Holm
    assert row_of(text, "FedAvg", "0.1", "A") == ["-9.50", "[-15.85, -3.15]", "2", "0.100", "-10.00", "undecided"]
    assert row_of(text, "MOON", "0.1", "A")[2::2] == ["3", "+3.00"]
    assert "- FedAvg, 0.1: 1 undecided" in text.splitlines()


def test_latex_is_balanced_and_has_the_same_numbers(make):
    axes = {**BASE["axes"], "method": {"FedAvg": {}, "A_&_B%": {"method": ["moon"]}}}
    suite = make(axes=axes, tables=[{"caption": "Table 9", "published": {"FedAvg": {0.1: 60}, "A_&_B%": {0.1: 61}}}])
    text = md_of(
        suite, {**FINALS, ("0.1", "A_&_B%"): [0.5, 0.5, None], ("1", "A_&_B%"): [0.9] * 3}, scale=0.5, form="tex"
    )
    assert text.count("{") == text.count("}")
    for name in ("table*", "tabular"):
        assert text.count(f"\\begin{{{name}}}") == text.count(f"\\end{{{name}}}") == 2
    assert "\\multicolumn{2}{c}{$\\alpha = 0.1$} & \\multicolumn{2}{c}{$\\alpha = 1$} \\\\" in text
    assert "A\\_\\&\\_B\\% & $50.00 \\pm 0.00$ (2 of 3 seeds, 1 waiting)$^{\\dagger}$ & 61.00 & " in text
    assert "\\textbf{\\boldmath $90.00 \\pm 0.00$}$^{\\dagger,\\ast}$ & -- \\\\" in text
    for line in text.splitlines():
        if line.endswith(" \\\\") and "&" in line and "multicolumn" not in line:
            assert len(line.replace("\\&", "").split("&")) in (5, 8)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"confidence": 95}, "confidence=95"),
        ({"tables": [{"show": "last", "k": 0}]}, "tables.k=0"),
        ({"tables": [{"show": "mean"}]}, "tables.rounds=None"),
        ({"tables": [{"show": "mean", "rounds": [3, 2]}]}, "tables.rounds=[3, 2]"),
        ({"tables": [{"show": "last", "rounds": [2, 3]}]}, "tables.rounds=[2, 3]"),
        ({"tables": [{"scores": ["pooled"]}]}, "tables.scores=['pooled']"),
        ({"tables": [{"show": "scores", "k": 3}]}, "tables.k=3"),
        ({"tables": [{"show": "fair", "published": {"FedAvg": {0.1: 60}}}]}, "tables.published"),
        ({"tables": [{"show": "best", "target": 0.6}]}, "tables.target=0.6"),
        ({"tables": [{"show": "rounds_to"}]}, "tables.target=None"),
        ({"tables": [{"show": "rounds_to", "target": 60}]}, "tables.target=60"),
        ({"tables": [{"published": {"MOON": {1: math.nan}}}]}, r"published.MOON.1=nan"),
        ({"tables": [{"published": {"MOON": {1: [60, -1]}}}]}, "published.MOON.1=[60, -1]"),
        ({"tables": [{"show": "seconds", "published": {"FedAvg": {1: 0}}}]}, r"published.FedAvg.1=0"),
        ({"axes": {"method": {"a\nb": {}}}}, r"axes.method='a\nb'"),
        ({"axes": {"method": {"A": {"seed_everything": 3}}}}, "axes.method.A.seed_everything=3"),
        ({"axes": {"s": {"key": "seed_everything", "values": [3]}}}, "axes.s.seed_everything=3"),
        ({"overrides": [{"when": {}, "config": {"seed_everything": 3}}]}, "overrides.config.seed_everything=3"),
    ],
)
def test_what_no_table_can_be_made_of_is_refused(make, keys, named):
    with refused(named):
        make(**keys)


DECIDED = {"margin": 1.0, "prior_scale": 1, "alpha": 0.05, "max_seeds": 8}


def test_a_suite_that_decides_has_sequences_verdicts_and_its_seeds(make):
    """Without a published number: within the margin, on one side of 0, or neither."""
    base = [0.60, 0.61, 0.62, 0.60, 0.61, 0.62, 0.60, 0.61]
    small, large = [0.001, -0.001] * 4, [0.10, 0.11, 0.12, 0.10, 0.11, 0.12, 0.10, 0.11]
    wide = [0.2, -0.1, 0.1, -0.2, 0.3, 0.1, None, 0.2]
    finals = {(alpha, "FedAvg"): base for alpha in ("0.1", "1")}
    finals |= {("0.1", "FedProx"): [a + b for a, b in zip(base, small, strict=True)]}
    finals |= {("0.1", "MOON"): [a + b for a, b in zip(base, large, strict=True)]}
    finals |= {("1", "FedProx"): [None if b is None else a + b for a, b in zip(base, wide, strict=True)]}
    finals |= {("1", "MOON"): [a - b for a, b in zip(base, large, strict=True)]}
    suite = make(decide=DECIDED, seeds=5)
    cells = suite.cells(seeds=range(8))
    text = tables_of(suite, cells, results_of(cells, finals))
    assert row_of(text, "FedProx", "0.1")[2:] == ["8", "[-0.09, +0.09]", "1.000", "1.000", "60.88", "no difference"]
    assert row_of(text, "MOON", "0.1")[2:] == ["8", "[+10.18, +11.57]", "&lt; 0.001", "0.002", "60.88", "above"]
    assert row_of(text, "MOON", "1")[2::5] == ["8", "below"]
    # the seed before the last has no number, so that the last does not count yet
    # so neither do all 8 nor the baseline's own last two
    *_, pairs, student, of_student, _, base, verdict = row_of(text, "FedProx", "1")
    assert (pairs, student, of_student, base) == ("6", "-", "-", "61.00")
    assert verdict.startswith("undecided, about ")
    assert "is for all 4 comparisons" in text
    assert "(7 seeds)" in row_of(text, "FedProx")[1]
    assert "error of 5 % is per pair" in text
    assert "No difference: within 1." in text
    line = lines(tables_of(suite, cells, results_of(cells, finals), "csv"))["1", "1", "FedProx"]
    assert (line["verdict"], line["interval"]) == ("undecided", "sequence")
    assert float(line["confidence"]) == 0.95
    assert int(line["seeds_to_decide"]) > 6


OTHER_RATE = {"method": ["moon"], "model": {"lr": 0.01}, "trainer": {"server_optimizer": {"lr": 1}}}


def test_a_row_with_other_settings_than_the_baseline_has_a_footnote(make):
    """What is the method's own, and what labels of other axes say, is no such setting."""
    methods = {**BASE["axes"]["method"], "MOON": OTHER_RATE}
    base = {"model": {"class_path": "X", "lr": 0.05}}
    text = md_of(make(base=base, axes={**BASE["axes"], "method": methods}))
    assert "- [1] not the settings of FedAvg: model.lr 0.01 instead of 0.05" in text.splitlines()
    assert all("[1]" in one for one in row_of(text, "MOON"))
    assert text.count("instead of") == 1
    assert "instead of" not in md_of(make())
    missing = {"method": ["moon"], "trainer": {"clip": 10}}
    text = md_of(make(axes={**BASE["axes"], "method": {**BASE["axes"]["method"], "MOON": missing}}))
    assert "trainer.clip 10 instead of not set" in text


def scored(pooled, mask):
    return {"metrics": {"scores/pooled": pooled, "scores/label_mask": mask, "test/accuracy": pooled}}


def scores_of(suite):
    cells = suite.cells(seeds=[0])
    of = {("0.1", "FedAvg", 0): scored(0.6, 0.8), ("0.1", "FedProx", 0): scored(0.7, 0.75)}
    of[("0.1", "MOON", 0)] = scored(0.5, 0.7)
    some = [cell for cell in cells if cell.labels["alpha"] == "0.1"]
    return some, results_of(some, FINALS, of=of)


def test_a_table_of_scores_has_a_column_for_each_and_says_where_the_order_depends_on_them(make):
    suite = make(tables=[{"show": "scores"}])
    text = tables_of(suite, *scores_of(suite))
    assert row_of(text, "FedAvg") == ["60.00", "**80.00**"]
    assert row_of(text, "FedProx") == ["**70.00**", "75.00"]
    # MOON is behind in both
    assert text.count("FedAvg and FedProx") == 1 and "and MOON" not in text
    assert row_of(text, "FedProx", "label_mask")[0] == "-5.00"


def test_a_table_of_scores_compares_each_with_the_published_numbers(make):
    published = {"FedAvg": {0.1: 60, 1: 70}, "FedProx": {0.1: 62, 1: 71}}
    suite = make(tables=[{}, {"show": "scores", "scores": ["label_mask"], "published": published}])
    cells, results = scores_of(suite)
    entries = list(csv.DictReader(io.StringIO(tables_of(suite, cells, results, "csv"))))
    (entry,) = (one for one in entries if one["table"] == "2" and one["method"] == "FedProx")
    assert (entry["score"], entry["published"], entry["published_difference"]) == ("label_mask", "62.0", "2.0")
    assert float(entry["mean"]) == 75.0
    assert {one["score"] for one in entries if one["table"] == "1"} == {""}


OWN = (0.9, 0.5, 0.7, 0.2, 0.8, 0.6, 0.75, 0.65, 0.4, 0.85, 0.3)
ALONE = (0.8, 0.6, 0.65, 0.3, 0.7, 0.6, 0.7, 0.5, 0.45, 0.8, 0.2)


def of_clients(accuracies, point="personal/"):
    """The metrics of the callback PersonalAccuracy on test sets of 50 examples."""
    spread = {f"{point}{name}": value for name, value in spread_over_clients(np.array(accuracies)).items()}
    return {**spread, **{f"{point}client/{k}": value for k, value in enumerate(accuracies)}, "fair/noise": 0.004}


def test_fairness_is_that_of_an_example_by_hand():
    found = fairness(of_clients(OWN), of_clients(ALONE))
    expected = {
        **{"accuracy": 0.60454545, "worst_tenth": 0.25, "spread": 0.21893808, "variance": 0.04793388, "noise": 0.004},
        **{"gain": 0.03181818, "gain_worst": -0.1, "helped": 0.63636364},
    }
    assert found == pytest.approx(expected, abs=5e-9)


def test_models_of_another_point_of_a_visit_are_compared_with_the_ones_of_local():
    found = fairness(of_clients(OWN, "personal/trained/"), of_clients(ALONE))
    assert found == fairness(of_clients(OWN), of_clients(ALONE))


def test_a_table_of_fairness_says_which_models_are_compared(make):
    suite = make(tables=[{"show": "fair"}], axes={"method": {"Ditto": {}}, "alpha": {"key": "a", "values": [0.1]}})
    (cell,) = suite.cells(seeds=[0])
    results = [{cell.digest: result(cell, metrics=of_clients(OWN, p))} for p in ("personal/", "personal/trained/")]
    first, second = (tables_of(suite, [cell], one) for one in results)
    assert "end of a visit" in second and "visit" not in first


def fair_of(make, **keys):
    """A table of fairness in which MOON is Local under another name, and FedProx has another partition in seed 1."""
    methods = {"FedAvg": {}, "FedProx": {"method": [{"class_path": "FedProx"}]}}
    methods["MOON"] = {"method": [{"class_path": "fl_lightning.methods.Local"}]}
    suite = make(axes={**BASE["axes"], "method": methods}, tables=[{"show": "fair"}], seeds=2, **keys)
    cells = [cell for cell in suite.cells() if cell.labels["alpha"] == "0.1"]
    of = {
        ("0.1", method, seed): {"metrics": of_clients(accuracies)}
        for method, accuracies in {"FedAvg": OWN, "FedProx": OWN, "MOON": ALONE}.items()
        for seed in range(2)
    }
    of["0.1", "FedProx", 1]["plan"] = "another"
    return tables_of(suite, cells, results_of(cells, FINALS, of=of)), suite, cells


def test_a_table_of_fairness_has_gains_over_local_on_the_same_partition(make):
    text, *_ = fair_of(make)
    row = row_of(text, "FedAvg")
    means = [one.strip("*").split(" ")[0] for one in row]
    assert means == ["60.45", "25.00", "21.89", "479.34", "40.00", "3.18", "-10.00", "63.64"]
    assert "**" not in row[4] and {one.strip("*") for one in row_of(text, "MOON")[5:]} == {"0.00 ± 0.00"}
    assert "(1 of 2 seeds)" in row_of(text, "FedProx")[5] and "seed 1: no finished run of Local" in text


def test_without_local_a_table_of_fairness_has_no_gains(make):
    text, suite, cells = fair_of(make)
    some = [cell for cell in cells if cell.labels["method"] == "FedAvg"]
    results = {cell.digest: result(cell, metrics=of_clients(OWN)) for cell in some}
    assert "gain" in text and "gain" not in tables_of(suite, some, results).lower()
    assert len(row_of(tables_of(suite, some, results), "FedAvg")) == 5


def sentence_of(suite, finals=FINALS, of=None):
    cells = suite.cells()
    return conclusion(suite, cells, results_of(cells, finals, of))


def test_the_conclusion_names_the_best_row_its_difference_with_the_interval_and_the_seeds(make):
    one = sentence_of(make(exclude=[{"alpha": 1}], tables=[{"rows": ["method"], "columns": ["alpha"]}]))
    half = T[3] * math.sqrt(1 / 3 / 3)
    difference = f"+3.33 (95 % interval [{10 / 3 - half:+.2f}, {10 / 3 + half:+.2f}]) to FedAvg"
    assert_names(one, "FedProx has the best", "final test/accuracy", "65.33 over 3 seeds", difference)
    several = sentence_of(make())
    assert_names(several, "FedProx has the best", "1 of 2 columns", "alpha=0.1", "65.33 over 3 seeds")


def test_a_conclusion_says_where_the_interval_leaves_a_difference_undecided(make):
    finals = {**FINALS, ("0.1", "FedAvg"): [0.5, 0.6, 0.7], ("0.1", "FedProx"): [0.7, 0.6, 0.7]}
    suite = make(exclude=[{"alpha": 1}], tables=[{"rows": ["method"], "columns": ["alpha"]}])
    assert_names(sentence_of(suite, finals), "FedProx has the best", "+6.67", "undecided")
    assert "undecided" not in sentence_of(suite)


def test_a_conclusion_in_which_the_baseline_is_best_names_the_next_row(make):
    finals = {**FINALS, ("0.1", "FedAvg"): [0.9, 0.9, 0.9], ("1", "FedAvg"): [0.9, 0.9, 0.9]}
    text = sentence_of(make(), finals)
    assert_names(
        text, "FedAvg has the best", "2 of 2 columns", "90.00 over 3 seeds", "FedProx", "-24.67 (95 % interval ["
    )


def test_a_conclusion_names_no_row_where_none_is_best(make):
    assert "FedProx" not in sentence_of(make(axes={"alpha": BASE["axes"]["alpha"], "method": {"FedProx": {}}}))
    assert "FedProx" not in sentence_of(make(), dict.fromkeys(FINALS, [None] * 3))


def test_rows_are_not_compared_with_the_settings_of_a_baseline_that_has_no_config(make):
    suite = make(seeds=1)
    cells = [
        replace(one, fragments=({},), stored_digest=one.name) if "FedAvg" in one.name else one for one in suite.cells()
    ]
    results = {one.digest: result(one, state="failed" if "FedAvg" in one.name else "done") for one in cells}
    assert "not the settings of" not in tables_of(suite, cells, results)


def test_a_difference_that_rounds_to_0_has_no_sign(make):
    finals = {**FINALS, ("0.1", "FedProx"): [0.60, 0.62, 0.63998]}
    assert row_of(md_of(make(), finals), "FedProx", "0.1")[:1] == ["0.00"]
