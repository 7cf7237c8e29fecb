"""Runs are grouped by configuration, and compared only where that is right."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
from helpers.reports import accuracies, figures_of, held, report_of, warnings_of, write_run
from helpers.runs import small_data, small_model, small_trainer

from fl_lightning.bench.statistics import p_value, paired_difference

pytest_plugins = ["helpers.report_fixtures"]


def numbers(files, show="final"):
    """The lines of the tables by setting and method."""
    lines = csv.DictReader(io.StringIO(files["csv"]))
    return {(line.get("setting", ""), line["method"]): line for line in lines if line["shows"].startswith(show)}


def runs(files):
    """The lines of the file of runs by folder."""
    return {line["run"].split("/")[0]: line for line in csv.DictReader(io.StringIO(files["runs.csv"]))}


def groups(files):
    """The number of seeds of each configuration, by data set, setting and method."""
    lines = runs(files).values()
    keys = [(line["data"], line.get("setting", ""), line["method"]) for line in lines]
    return {key: keys.count(key) for key in keys}


def warned(files):
    return "\n".join(warnings_of(files))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Two methods in two settings with three seeds each."""
    root = tmp_path_factory.mktemp("runs")
    for method, level in (("FedAvg", 0.5), ("FedUV", 0.7)):
        for alpha in (0.1, 1.0):
            for seed in range(3):
                folder = root / f"{method}-{alpha}-{seed}" / "version_0"
                write_run(folder, method, seed, 6, level=level, alpha=alpha, measured=False)
    return root


@pytest.fixture(scope="module")
def table(template, tmp_path_factory):
    """The report of these runs."""
    return report_of(tmp_path_factory.mktemp("report"), template, drawn=False)


@pytest.fixture
def copy(template, tmp_path):
    """A copy of these runs, which a test may change."""
    return shutil.copytree(template, tmp_path, dirs_exist_ok=True)


def finals(root, method, alpha):
    return [100 * accuracies(root / f"{method}-{alpha}-{seed}" / "version_0")[-1] for seed in range(3)]


def write_all(root, runs, **common):
    """Write runs by name; each has its own arguments of ``write_run``."""
    for name, own in runs.items():
        write_run(root / name / "version_0", measured=False, **{**common, **own})


# ------------------------------------------------------------------ the numbers
def test_means_deviations_and_paired_differences_are_those_of_the_files(template, table):
    found = numbers(table)
    assert list(found) == [(f"alpha={a}", m) for a in ("0.1", "1") for m in ("FedAvg", "FedUV")]
    for (setting, method), line in found.items():
        alpha = float(setting.split("=")[1])
        values = finals(template, method, alpha)
        assert float(line["mean"]) == pytest.approx(np.mean(values))
        assert float(line["deviation"]) == pytest.approx(np.std(values, ddof=1))
        assert f"| {np.mean(values):.2f} ± " in table["md"].replace("**", "")
        if method == "FedUV":
            expected = paired_difference(list(zip(values, finals(template, "FedAvg", alpha), strict=True)), "t", 0.95)
            assert float(line["difference"]) == pytest.approx(expected.mean) and line["pairs"] == "3"
            assert (float(line["low"]), float(line["high"])) == pytest.approx(expected.interval)
            low, high = expected.interval
            p = p_value(expected, "t")
            p = "&lt; 0.001" if p < 0.001 else f"{p:.3f}"
            row = f"| FedUV | {expected.mean:+.2f} | [{low:+.2f}, {high:+.2f}] | 3 | {p} |"
            assert row in table["md"].splitlines()


def test_another_baseline_changes_the_sign(template, table, report):
    found, other = numbers(table), numbers(report("--baseline", "FedUV", root=template))
    for setting in ("alpha=0.1", "alpha=1"):
        before, after = found[setting, "FedUV"], other[setting, "FedAvg"]
        assert float(before["difference"]) == pytest.approx(-float(after["difference"]))
    assert next(iter(other)) == ("alpha=0.1", "FedUV")


def test_rounds_to_a_target_are_the_first_that_reach_it(template, report):
    line = numbers(report("--target", 0.4, root=template), "rounds")["alpha=0.1", "FedUV"]
    values = [accuracies(template / f"FedUV-0.1-{seed}" / "version_0") for seed in range(3)]
    assert float(line["mean"]) == pytest.approx(
        np.mean([next(at for at, one in enumerate(run, 1) if one >= 0.4) for run in values])
    )


def test_only_finished_runs_are_in_the_means(copy, report):
    common = {"rounds": 6, "done": 2, "alpha": 0.1}
    write_all(copy, {"FedAvg-0.1-3": {"seed": 3}, "FedAvg-0.1-4": {"seed": 4}}, **common)
    with held(copy / "FedAvg-0.1-4" / "version_0"):
        files = report()
    line = numbers(files)["alpha=0.1", "FedAvg"]
    assert float(line["mean"]) == pytest.approx(np.mean(finals(copy, "FedAvg", 0.1)))
    assert "(3 of 5 seeds, 1 running, 1 stopped)" in files["md"]
    states = {name: (one["state"], one["rounds"]) for name, one in runs(files).items() if name[-1] in "34"}
    assert states == {"FedAvg-0.1-3": ("stopped", "2"), "FedAvg-0.1-4": ("running", "2")}
    assert "FedAvg-0.1-4/version_0" in warned(files) and "FedAvg-0.1-3/version_0" in warned(files)


# ------------------------------------------------------------------ which runs are one configuration
def test_data_sets_are_sections_of_their_own(tmp_path, report):
    write_all(tmp_path, {f"{data}-{at}": {"data": data, "seed": at} for data in ("CIFAR10", "SVHN") for at in (0, 1)})
    assert groups(report()) == {("CIFAR10", "", "FedAvg"): 2, ("SVHN", "", "FedAvg"): 2}


def test_what_changes_no_result_does_not_part_seeds(tmp_path, report):
    for seed in range(2):
        trainer = {"max_rounds": 10, "devices": seed + 1, "enable_progress_bar": bool(seed)}
        trainer |= {"threads_per_worker": seed + 1, "clients_per_step": seed + 1, "deterministic": bool(seed)}
        trainer["callbacks"] = [{"class_path": "fl_lightning.callbacks.SpectrumMonitor"}] * seed
        own = {"trainer": trainer, "ckpt_path": ["last", None][seed]}
        write_all(tmp_path, {str(seed): {"seed": seed, "config": own}})
    assert list(groups(report()).values()) == [2]


def test_a_callback_that_may_change_the_result_parts_configurations(tmp_path, report):
    for seed, kind in enumerate(("fl_lightning.callbacks.EarlyStopping", "mine.Stops", "fl_lightning.callbacks.Drift")):
        own = {"trainer": {"max_rounds": 10, "callbacks": [{"class_path": kind}]}}
        write_all(tmp_path, {str(seed): {"seed": seed, "config": own}})
    assert list(groups(report()).values()) == [1, 1, 1]


def test_coefficients_tell_runs_of_one_method_apart(tmp_path, report):
    for mu in (0.1, 1.0):
        own = {"method": [{"class_path": "fl_lightning.methods.FedProx", "init_args": {"mu": mu}}]}
        write_all(tmp_path, {f"{mu}": {"config": own}})
    write_all(tmp_path, {"avg": {}})
    files = report()
    assert [method for _, method in numbers(files)] == ["FedAvg", "FedProx mu=0.1", "FedProx mu=1"]
    assert "| FedProx mu=0.1 | FedProx(mu=0.1) |" in files["md"].splitlines()


def model_of(**arguments):
    return {"model": {"class_path": "ImageClassifier", "init_args": arguments}}


def test_a_learning_rate_of_a_method_is_no_setting_but_has_a_footnote(tmp_path, report):
    """Else no method could be compared with the baseline."""
    for method, lr in (("FedAvg", 0.01), ("FedProx", 0.01), ("FedUV", 0.03)):
        own = model_of(optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": lr}})
        write_all(tmp_path, {f"{method}-{seed}": {"method": method, "seed": seed, "config": own} for seed in (0, 1)})
    found = numbers(report())
    assert list(found) == [("", "FedAvg"), ("", "FedProx"), ("", "FedUV")] and found["", "FedUV"]["pairs"] == "2"
    notes = [line["notes"] for line in found.values()]
    assert notes == ["", "", "not the settings of FedAvg: model.optimizer.lr 0.03 instead of 0.01"]


def test_another_network_is_a_setting_even_where_each_method_has_its_own(tmp_path, report):
    """Else FedAvg on one network would be compared with FedUV on another."""
    for method, encoder, rounds in (("FedAvg", "CNN", 6), ("FedProx", "CNN", 6), ("FedUV", "MLP", 9)):
        own = model_of(encoder={"class_path": f"mine.{encoder}", "init_args": {f"{encoder}_width": 4}})
        write_all(tmp_path, {method: {"method": method, "rounds": rounds, "config": own}})
    files = report()
    # as few keys as tell the settings apart name them
    settings = [("encoder=CNN", "FedAvg"), ("encoder=CNN", "FedProx"), ("encoder=MLP", "FedUV")]
    assert list(numbers(files)) == settings and numbers(files)["encoder=MLP", "FedUV"]["difference"] == ""
    (lone,) = (line for line in files["md"].splitlines() if line.startswith("| FedUV | ") and "± " not in line)
    assert "**" not in lone  # a lone row is not the best


def test_settings_and_runs_of_one_method_are_in_the_order_of_their_numbers(copy, report, tmp_path_factory):
    write_all(copy, {f"{method}-10": {"method": method, "alpha": 10.0, "rounds": 6} for method in ("FedAvg", "FedUV")})
    assert list(dict.fromkeys(setting for setting, _ in numbers(report()))) == ["alpha=0.1", "alpha=1", "alpha=10"]
    other = tmp_path_factory.mktemp("other")
    write_all(other, {str(alpha): {"alpha": alpha} for alpha in (0.1, 10.0, 1.0)})
    assert {method for _, method in numbers(report(root=other))} == {"alpha=0.1", "alpha=1", "alpha=10"}


def test_a_run_that_was_repeated_counts_once(tmp_path, report):
    for version in range(2):
        write_run(tmp_path / f"version_{version}", measured=False)
    files = report()
    assert len(runs(files)) == 1 and "another run has the same config, seed" in warned(files)


def test_a_run_without_a_config_is_compared_with_the_others(tmp_path, report):
    """As a run from Python is, whose metrics may have other names."""
    write_all(tmp_path, {"avg": {"method": "FedAvg"}, "prox": {"method": "FedProx"}, "own": {"rounds": 6}}, alpha=0.1)
    folder = tmp_path / "own" / "version_0"
    (folder / "config.yaml").unlink()
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "model.ckpt").write_text("")  # it has ended
    record = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**record, "data_set": "CIFAR10"}))
    metrics = folder / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("test/accuracy", "test_acc"))
    files = report()
    lines = numbers(files)
    assert set(lines) == {("", "FedAvg"), ("", "FedProx"), ("", "own")} and "not set" not in files["md"]
    assert float(lines["", "own"]["mean"]) == pytest.approx(100 * accuracies(folder, "test_acc")[-1])
    assert "test_acc is shown as test/accuracy" in warned(files) and "has no test/accuracy" not in warned(files)


def test_runs_without_a_config_are_told_apart_by_their_folders(tmp_path, report):
    write_all(tmp_path, {"mine": {}, "theirs": {}})
    for path in tmp_path.rglob("config.yaml"):
        path.unlink()
    assert {(data, method) for data, _, method in groups(report())} == {
        ("unknown data set", "mine"),
        ("unknown data set", "theirs"),
    }


def test_a_run_of_a_program_has_the_name_of_its_data_module(tmp_path, report):
    small_trainer(tmp_path, max_rounds=1, logger=True).fit(small_model(), small_data())
    assert [(data, method) for data, _, method in groups(report())] == [("Digits", "fedavg")]


def test_names_of_methods_and_data_sets(tmp_path, report):
    def entry(path, **arguments):
        return {"class_path": path, "init_args": arguments}

    server = {"trainer": {"max_rounds": 10, "server_optimizer": entry("fl_lightning.optim.FedAdam", lr=0.1)}}
    configs = {
        "FedAvg": {"method": None, "data": entry("a.CIFAR10", root="x/y")},
        "FedProx+FedDecorr": {"method": [entry("a.FedProx"), entry("a.FedDecorr")], "data": entry("a.SVHN")},
        "FedAvg, server FedAdam": {**server, "method": [], "data": entry("a.NpyImages", root="x/cells")},
        "FedUV": {"method": [entry("a.FedUV")], "data": entry("a.Partitioned", datamodule=entry("mine.Scans"))},
    }
    for at, config in enumerate(configs.values()):
        write_all(tmp_path, {str(at): {"config": config}})
    found = [(line["data"], line["method"]) for _, line in sorted(runs(report()).items())]
    assert found == list(zip(("CIFAR10", "SVHN", "NpyImages (cells)", "Scans"), configs, strict=True))


# ------------------------------------------------------------------ what a reader has to know
def test_different_partitions_are_not_compared(copy, report):
    for seed in range(3):
        (copy / f"FedUV-0.1-{seed}" / "version_0" / "environment.json").write_text('{"plan_hash": "%s"}' % ("f" * 64))
    files = report()
    assert "Different partitions are compared (alpha=0.1, seed 1)" in warned(files)
    first, second = (numbers(files)[f"alpha={alpha}", "FedUV"] for alpha in ("0.1", "1"))
    assert (first["difference"], first["pairs"]) == ("", "0") and "not compared" in first["notes"]
    assert second["pairs"] == "3" and second["notes"] == ""


def test_values_that_are_not_finite_and_what_was_skipped_are_warned_of(tmp_path, report):
    write_all(tmp_path, {str(seed): {"seed": seed, "rounds": 3} for seed in range(2)})
    header = "round,test/accuracy,train/loss,class/9/accuracy,clients/failed,batches/skipped"
    for path in tmp_path.rglob("metrics.csv"):
        path.write_text(f"{header}\n0,0.1,nan,nan,0,0\n1,0.2,1.5,nan,2,3\n2,0.3,1.4,nan,1,0\n")
    text = warned(report())
    assert text.count("train/loss was nan in round 0") == 2
    assert "6 clients failed and were skipped in 2 runs, 3 of them in" in text and "6 batches were skipped" in text
    assert "class/9" not in text  # a class that is not there has no accuracy


def test_a_cut_and_an_empty_table_are_warned_of(tmp_path, report):
    write_all(tmp_path, {str(seed): {"seed": seed, "rounds": 3} for seed in range(2)})
    cut, empty = (tmp_path / str(seed) / "version_0" for seed in range(2))
    (cut / "metrics.csv").write_bytes((cut / "metrics.csv").read_bytes()[:-9])
    (empty / "metrics.csv").write_text("")
    (empty / "checkpoints").mkdir()
    (empty / "checkpoints" / "model.ckpt").touch()
    text = warned(report())
    assert "0/version_0: metrics.csv: 1 line " in text and "1/version_0 has no test/accuracy" in text


def test_the_metric_is_the_usual_one_or_the_one_that_is_asked_for(template, table, report):
    assert "final test/accuracy in %" in table["csv"]
    found = numbers(report("--metric", "test/loss", root=template))
    ours, theirs = (float(found["alpha=0.1", method]["mean"]) for method in ("FedUV", "FedAvg"))
    assert ours < theirs < 2.4


def test_an_order_that_depends_on_the_score_is_warned_of(copy, report):
    for method, pooled, masked in (("FedAvg", 0.5, 0.8), ("FedUV", 0.6, 0.7)):
        for alpha in (0.1, 1.0):
            for seed in range(3):
                # only under strong skew does the mask turn the order
                rows = ["round,test/accuracy,scores/pooled,scores/label_mask", "0,0.1,0.9,0.9", "1,0.1,,"]
                rows.append(f"2,{pooled},{pooled},{masked if alpha == 0.1 else pooled}")
                path = copy / f"{method}-{alpha}-{seed}" / "version_0" / "metrics.csv"
                path.write_text("\n".join(rows) + "\n")
    (line,) = [one for one in warnings_of(report()) if "score" in one]
    assert "(alpha=0.1)" in line and "FedAvg is ahead by label_mask" in line.replace("\\", "")
    assert "FedUV is ahead by pooled" in line


def test_megabytes_a_round_are_those_of_the_rounds_in_the_file(report, tmp_path):
    write_all(tmp_path, {"FedAvg": {"method": "FedAvg"}, "FedUV": {"method": "FedUV"}}, seed=0, rounds=6)
    file = tmp_path / "FedUV" / "version_0" / "metrics.csv"
    head, *lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([head, *lines[3:]]))  # it resumed with changes after round 2, in a new version
    lines = report()["md"].splitlines()
    of_round = next(number for number, line in enumerate(lines) if line.endswith("MB a round |"))
    assert [line.split()[-2] for line in lines[of_round + 2 : of_round + 4]] == ["12", "12"]


def test_a_figures_numbers_are_empty_where_a_run_has_none(report, tmp_path):
    write_all(tmp_path, {"a": {"method": "FedUV"}, "b": {"method": "FedBN"}}, seed=0, rounds=2)
    file = tmp_path / "a" / "version_0" / "metrics.csv"
    file.write_text(file.read_text().replace("bytes/up", "other/up"))
    _, (head, *lines) = figures_of(report())["test-accuracy"]
    assert [line[head.index("MB")] for line in lines] == ["", "", "12.0", "24.0"]
