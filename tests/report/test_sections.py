"""Runs are put together by configuration, and compared only where that is right."""

import numpy as np
import pytest
from helpers.errors import refused
from helpers.reports import accuracies, held, write_run

from fl_lightning.bench.layout import Sheet, Text
from fl_lightning.bench.statistics import paired_difference
from fl_lightning.report.cautions import cautions, spans
from fl_lightning.report.configs import data_set, flat_config, method_names
from fl_lightning.report.curves import BYTES, spent
from fl_lightning.report.page import begun
from fl_lightning.report.run import ReportedRun, find_runs, read_run
from fl_lightning.report.sections import Metric, choose_metric, sections_of
from fl_lightning.report.tables import config_sheet, results_sheets, runs_csv

ACCURACY = Metric("test/accuracy")


def sections(root, metric=ACCURACY, baseline=None):
    return sections_of(
        [read_run(folder, str(folder.relative_to(root))) for folder in find_runs(root)], metric, baseline
    )


def results(section):
    """The rows of the results of all settings, each after its setting."""
    return [[part.settings[0], *line] for part in section.parts() for line in texts(next(results_sheets(part)))]


def differences(section):
    """The rows of the differences of all settings, each after its setting."""
    return [[part.settings[0], *line] for part in section.parts() for line in texts(list(results_sheets(part))[1])]


def texts(sheet):
    return [[text.text for text in line] for line in sheet.lines]


@pytest.fixture
def table(tmp_path):
    """Two methods in two settings with three seeds each."""
    for method, level in (("FedAvg", 0.5), ("FedUV", 0.7)):
        for alpha in (0.1, 1.0):
            for seed in range(3):
                folder = tmp_path / f"{method}-{alpha}-{seed}" / "version_0"
                write_run(folder, method, seed, 6, level=level, alpha=alpha, measured=False)
    return tmp_path


def finals(root, method, alpha):
    return [accuracies(root / f"{method}-{alpha}-{seed}" / "version_0")[-1] for seed in range(3)]


# ------------------------------------------------------------------ the numbers
def test_means_and_deviations_are_those_of_the_files(table):
    (section,) = sections(table)
    found = {(line[0], line[1]): line[2] for line in results(section)}
    assert list(found) == [(f"alpha={a}", m) for a in ("0.1", "1") for m in ("FedAvg", "FedUV")]
    for (setting, method), text in found.items():
        values = [100 * one for one in finals(table, method, float(setting.split("=")[1]))]
        assert text == f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def test_differences_are_taken_seed_by_seed_within_a_setting(table):
    (section,) = sections(table)
    for line, alpha in zip(differences(section), (0.1, 1.0), strict=True):
        pairs = zip(finals(table, "FedUV", alpha), finals(table, "FedAvg", alpha), strict=True)
        expected = paired_difference([(100 * a, 100 * b) for a, b in pairs], "t", 0.95)
        assert line[:3] == [f"alpha={alpha:g}", "FedUV", f"{expected.mean:+.2f}"]
        assert line[3] == f"[{expected.interval[0]:+.2f}, {expected.interval[1]:+.2f}]"
        assert line[4] == "3"


def test_a_method_that_is_the_baseline_under_another_name_differs_by_nothing(table):
    """The law of a paired difference: equal runs have difference 0, whatever the seeds do to their numbers."""
    for seed in range(3):
        ours, theirs = (table / f"{method}-0.1-{seed}" / "version_0" for method in ("FedUV", "FedAvg"))
        (ours / "metrics.csv").write_bytes((theirs / "metrics.csv").read_bytes())
    (section,) = sections(table)
    _, sheet = results_sheets(section.parts()[0])
    assert texts(sheet)[0][1:3] == ["+0.00", "-"] and "are equal" in next(iter(sheet.notes.values()))


def test_another_baseline_changes_the_sign(table):
    (section,) = sections(table, baseline="FedUV")
    assert section.lines == ["FedUV", "FedAvg"] and all(line[2].startswith("-") for line in differences(section))


def test_rounds_to_a_target_are_the_first_that_reach_it(table):
    (section,) = sections(table, Metric("test/accuracy", target=0.4))
    column = [name for name, _ in next(results_sheets(section.parts()[0])).groups].index("rounds to 40 %") + 2
    values = [accuracies(table / f"FedUV-0.1-{seed}" / "version_0") for seed in range(3)]
    reached = [next(at for at, one in enumerate(run, 1) if one >= 0.4) for run in values]
    assert results(section)[1][column].split(" ")[0].removesuffix(".0") == f"{np.mean(reached):.1f}".removesuffix(".0")


def test_only_finished_runs_are_in_the_means(table):
    write_run(table / "FedAvg-0.1-3" / "version_0", "FedAvg", 3, 6, 2, alpha=0.1, measured=False)
    running = write_run(table / "FedAvg-0.1-4" / "version_0", "FedAvg", 4, 6, 2, alpha=0.1, measured=False)
    with held(running):
        (section,) = sections(table)
    values = [100 * one for one in finals(table, "FedAvg", 0.1)]
    text = f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f} (3 of 5 seeds, 1 running, 1 stopped)"
    assert results(section)[0][2] == text
    warned = "\n".join(cautions(section))
    assert "FedAvg-0.1-4/version_0 is still running, 2 of 6 rounds so far" in warned
    assert "FedAvg-0.1-3/version_0 was stopped: 2 of 6 rounds" in warned
    assert "The seeds are not the same" in warned


# ------------------------------------------------------------------ which runs are one configuration
def test_data_sets_are_sections_of_their_own(tmp_path):
    for data in ("CIFAR10", "SVHN"):
        for seed in range(2):
            write_run(tmp_path / f"{data}-{seed}" / "version_0", seed=seed, data=data, measured=False)
    found = sections(tmp_path)
    assert [section.title for section in found] == ["CIFAR10", "SVHN"]
    assert [len(section.runs) for section in found] == [2, 2]


def test_what_changes_no_result_does_not_part_seeds(tmp_path):
    for seed in range(2):
        own = {"trainer": {"max_rounds": 10, "devices": seed + 1, "enable_progress_bar": bool(seed)}}
        own["trainer"]["callbacks"] = [{"class_path": "fl_lightning.callbacks.SpectrumMonitor"}] * seed
        own["ckpt_path"] = ["last", None][seed]
        write_run(tmp_path / str(seed) / "version_0", seed=seed, config=own, measured=False)
    ((group,),) = [section.groups for section in sections(tmp_path)]
    assert sorted(group.runs) == [0, 1]


def test_a_callback_that_may_change_the_result_parts_configurations(tmp_path):
    for seed, kind in enumerate(("fl_lightning.callbacks.EarlyStopping", "mine.Stops", "fl_lightning.callbacks.Drift")):
        own = {"trainer": {"max_rounds": 10, "callbacks": [{"class_path": kind}]}}
        write_run(tmp_path / str(seed) / "version_0", seed=seed, config=own, measured=False)
    (section,) = sections(tmp_path)
    assert len(section.groups) == 3


def test_coefficients_tell_runs_of_one_method_apart(tmp_path):
    for mu in (0.1, 1.0):
        own = {"method": [{"class_path": "fl_lightning.methods.FedProx", "init_args": {"mu": mu}}]}
        write_run(tmp_path / str(mu) / "version_0", config=own, measured=False)
    write_run(tmp_path / "avg" / "version_0", measured=False)
    (section,) = sections(tmp_path)
    assert section.lines == ["FedAvg", "FedProx mu=0.1", "FedProx mu=1"] and section.settings == [""]
    assert texts(config_sheet(section))[1:] == [
        ["FedProx mu=0.1", "FedProx(mu=0.1)"],
        ["FedProx mu=1", "FedProx(mu=1)"],
    ]


def test_a_learning_rate_that_each_method_has_of_its_own_is_no_setting(tmp_path):
    """Else no method could be compared with the baseline."""
    for method, lr in (("FedAvg", 0.01), ("FedUV", 0.03)):
        optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": lr}}
        own = {"model": {"class_path": "ImageClassifier", "init_args": {"optimizer": optimizer}}}
        for seed in range(2):
            write_run(tmp_path / f"{method}-{seed}" / "version_0", method, seed, config=own, measured=False)
    (section,) = sections(tmp_path)
    assert section.settings == [""] and section.lines == ["FedAvg", "FedUV"]
    assert texts(list(results_sheets(section))[1])[0][3] == "2"
    assert "model.optimizer.lr" in [name for name, _ in config_sheet(section).groups]


def test_another_network_or_other_data_make_a_setting_even_where_each_method_has_its_own(tmp_path):
    """Else FedAvg on one network would be compared with FedUV on another."""
    for method, encoder, rounds in (("FedAvg", "CNN", 6), ("FedProx", "CNN", 6), ("FedUV", "MLP", 9)):
        arguments = {"encoder": {"class_path": f"mine.{encoder}", "init_args": {f"{encoder}_width": 4}}}
        own = {"model": {"class_path": "ImageClassifier", "init_args": arguments}}
        write_run(tmp_path / method / "version_0", method, rounds=rounds, config=own, measured=False)
    (section,) = sections(tmp_path)
    # as few keys as tell the settings apart name them, and all of them are told once
    assert section.settings == ["encoder=CNN", "encoder=MLP"]
    first, second = section.parts()
    assert first.lines == ["FedAvg", "FedProx"] and second.lines == ["FedUV"] and second.baseline == ""
    assert second.groups[0].own == {"max_rounds": "9", "encoder": "MLP", "MLP_width": "4"}
    assert not any(text.bold for line in next(results_sheets(second)).lines for text in line)  # a lone row
    assert any(text.bold for line in next(results_sheets(first)).lines for text in line)


def test_how_a_run_is_calculated_makes_no_setting(tmp_path):
    for seed in range(2):
        own = {"trainer": {"max_rounds": 10, "threads_per_worker": seed + 1, "clients_per_step": seed + 1}}
        write_run(tmp_path / str(seed) / "version_0", seed=seed, config=own, measured=False)
    ((group,),) = [section.groups for section in sections(tmp_path)]
    assert sorted(group.runs) == [0, 1]


def test_a_footnote_names_what_beside_the_method_differs_and_nothing_else(tmp_path):
    for method, lr in (("FedAvg", 0.01), ("FedProx", 0.01), ("FedUV", 0.03)):
        optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": lr}}
        own = {"model": {"class_path": "ImageClassifier", "init_args": {"optimizer": optimizer}}}
        write_run(tmp_path / method / "version_0", method, config=own, measured=False)
    (section,) = sections(tmp_path)
    results, _ = results_sheets(section)
    assert list(results.notes.values()) == ["not the settings of FedAvg: model.optimizer.lr 0.03 instead of 0.01"]
    assert [[text.marks for text in line[1:3]] for line in results.lines] == [[(), ()], [(), ()], [("1",), ("1",)]]


def test_runs_of_one_method_are_compared_by_their_settings(tmp_path):
    for alpha in (0.1, 10.0, 1.0):
        write_run(tmp_path / str(alpha) / "version_0", alpha=alpha, measured=False)
    (section,) = sections(tmp_path)
    assert set(section.lines) == {"alpha=0.1", "alpha=1", "alpha=10"}


def test_settings_are_in_the_order_of_their_numbers(table):
    for method in ("FedAvg", "FedUV"):
        write_run(table / f"{method}-10" / "version_0", method, alpha=10.0, rounds=6, measured=False)
    assert sections(table)[0].settings == ["alpha=0.1", "alpha=1", "alpha=10"]


def test_a_run_that_was_repeated_counts_once(tmp_path):
    for version in range(2):
        write_run(tmp_path / f"version_{version}", measured=False)
    (section,) = sections(tmp_path)
    assert len(section.runs) == 1
    assert any("left out, since another run has the same config and seed" in one for one in cautions(section))


def test_runs_without_a_config_are_told_apart_by_their_folders(tmp_path):
    for name in ("mine", "theirs"):
        folder = write_run(tmp_path / name / "version_0", measured=False)
        (folder / "config.yaml").unlink()
    (section,) = sections(tmp_path)
    assert section.title == "data set not known" and sorted(section.lines) == ["mine", "theirs"]


def test_names_of_methods_and_data_sets():
    def entry(path, **arguments):
        return {"class_path": path, "init_args": arguments}

    assert method_names({"method": None}) == "FedAvg"
    assert method_names({"method": [entry("a.FedProx"), entry("a.FedDecorr")]}) == "FedProx+FedDecorr"
    server = {"trainer": {"server_optimizer": entry("fl_lightning.optim.FedAdam", lr=0.1)}}
    assert method_names({"method": [], **server}) == "FedAvg, server FedAdam"
    assert data_set({"data": entry("a.CIFAR10", root="x/y")}) == "CIFAR10"
    assert data_set({"data": entry("a.NpyImages", root="x/cells")}) == "NpyImages (cells)"
    assert data_set({"data": entry("a.Partitioned", datamodule=entry("mine.Scans"))}) == "Scans"
    assert flat_config({"model": entry("a.Net", encoder=entry("a.CNN", width=4))}) == {
        "model": "Net",
        "model.encoder": "CNN",
        "model.encoder.width": "4",
    }


# ------------------------------------------------------------------ what has to be known
def test_different_partitions_are_not_compared(table):
    for seed in range(3):
        folder = table / f"FedUV-0.1-{seed}" / "version_0"
        (folder / "environment.json").write_text('{"plan_hash": "%s"}' % ("f" * 64))
    (section,) = sections(table)
    assert any("Different partitions are compared (alpha=0.1, seed 1)" in one for one in cautions(section))
    first, second = (list(results_sheets(part)) for part in section.parts())
    assert all("not compared" in note for note in first[0].notes.values())
    assert not second[0].notes and texts(second[1])[0][0] == "FedUV"


def test_values_that_are_not_finite_and_skipped_clients_are_warned_of(tmp_path):
    folder = write_run(tmp_path / "version_0", rounds=3, measured=False)
    header = "round,test/accuracy,train/loss,class/9/accuracy,clients/failed"
    (folder / "metrics.csv").write_text(f"{header}\n0,0.1,nan,nan,0\n1,0.2,1.5,nan,2\n2,0.3,1.4,nan,1\n")
    (section,) = sections(tmp_path)
    warned = "\n".join(cautions(section))
    assert "train/loss was nan in round 0" in warned and "3 clients failed and were skipped, in 2 rounds" in warned
    assert "class/9" not in warned  # a class that is not there has no accuracy


def test_a_torn_table_is_warned_of(tmp_path):
    folder = write_run(tmp_path / "version_0", rounds=3, measured=False)
    path = folder / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-9])
    (section,) = sections(tmp_path)
    assert any("metrics.csv: line 4 is cut; it is read up to there, 2 rounds" in one for one in cautions(section))


def test_a_finished_run_whose_table_is_empty_is_warned_of(tmp_path):
    folder = write_run(tmp_path / "version_0", rounds=3, measured=False)
    (folder / "metrics.csv").write_text("")
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "model.ckpt").touch()
    (section,) = sections(tmp_path)
    assert "version_0 has no test/accuracy." in "".join(cautions(section))


def test_the_metric_is_the_usual_one_or_the_one_that_is_asked_for(table):
    runs = [read_run(folder) for folder in find_runs(table)]
    assert choose_metric(runs, None, False, None) == ACCURACY
    assert choose_metric(runs, "test/loss", False, None).minimize
    with refused("--metric='test/f1'", "bytes/down"):
        choose_metric(runs, "test/f1", False, None)
    with refused("--target=60.0", "0.6"):
        choose_metric(runs, None, False, 60.0)


def test_the_file_of_runs_has_a_line_for_each(table):
    lines = runs_csv(sections(table)).splitlines()
    assert len(lines) == 13 and "config data.partitioner.alpha" in lines[0]


def test_an_order_that_depends_on_the_score_is_warned_of(table):
    def write(method, pooled, masked):
        for alpha in (0.1, 1.0):
            for seed in range(3):
                folder = table / f"{method}-{alpha}-{seed}" / "version_0"
                # only under strong skew does the mask turn the order
                rows = ["round,test/accuracy,scores/pooled,scores/label_mask", "0,0.1,0.9,0.9", "1,0.1,,"]
                rows.append(f"2,{pooled},{pooled},{masked if alpha == 0.1 else pooled}")
                (folder / "metrics.csv").write_text("\n".join(rows) + "\n")

    write("FedAvg", 0.5, 0.8)
    write("FedUV", 0.6, 0.7)
    (section,) = sections(table)
    (line,) = [one for one in cautions(section) if "score" in one]
    assert "(alpha=0.1)" in line and "FedAvg is ahead by label_mask" in line and "FedUV is ahead by pooled" in line


def test_what_many_runs_have_skipped_is_one_warning(table):
    for folder in sorted(table.iterdir()):
        (folder / "version_0" / "metrics.csv").write_text("round,test/accuracy,batches/skipped\n0,0.5,0\n5,0.6,2\n")
    (section,) = sections(table)
    (line,) = [one for one in cautions(section) if "skipped" in one]
    assert line.startswith("24 batches were skipped in 12 runs")


def test_numbers_without_a_gap_are_told_by_the_first_and_the_last():
    assert list(spans([0, 1, 2, 3, 7, 9, 10])) == ["0 to 3", "7", "9", "10"]


def test_what_is_spent_is_the_mean_of_the_totals_and_never_falls():
    def run(costs):
        return ReportedRun(
            "run", rows=[{"round": at, "bytes/down": one, "bytes/up": 1} for at, one in enumerate(costs)]
        )

    whole = [run([1, 2, 3]), run([5, 6, 7])]
    assert spent(whole, BYTES, np.arange(3)).tolist() == np.mean([[2, 5, 9], [6, 13, 21]], 0).tolist()
    # the dear run has fewer rounds: the mean of the totals would fall from 13 to 9
    shorter = spent([run([1, 2, 3]), run([50])], BYTES, np.arange(3))
    assert (np.diff(shorter) > 0).all()


def test_rows_of_which_nothing_is_done_are_named_below_a_table():
    rows = [[Text("FedAvg"), Text("50.0"), Text("waiting")], [Text("MOON"), Text("waiting"), Text("waiting")]]
    sheet = begun(Sheet("", ["method"], [("0.1", []), ("1", [])], rows, note="All are small."))
    assert [line[0].text for line in sheet.lines] == ["FedAvg"]
    assert sheet.note == "All are small. Nothing is done yet of: MOON."
    assert begun(sheet) is sheet
