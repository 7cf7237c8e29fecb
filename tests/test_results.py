"""What a fit returns, and what is read of finished runs: rows, tables, curves, and what a notebook shows."""

import re
from pathlib import Path

import pytest
from helpers.errors import refused, warned
from helpers.reports import make_old, snapshot, write_run
from helpers.runs import Stops, small_data, small_model, small_trainer

from fl_lightning import FitResult, load_run, load_runs
from fl_lightning.report.runs import Runs
from fl_lightning.storage.results import History
from fl_lightning.utilities.errors import ClientError


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """``(trainer, result)`` of a fit of two rounds, with its model and its data."""
    trainer, model, data = small_trainer(tmp_path_factory.mktemp("runs")), small_model(), small_data()
    return trainer, trainer.fit(model, data), model, data


@pytest.fixture
def runs(tmp_path):
    """A folder with three runs, of which two differ in their method alone and one in its seed."""
    root = tmp_path / "runs"
    write_run(root / "fedavg" / "version_0", rounds=3, measured=False)
    write_run(root / "fedavg" / "version_1", rounds=3, measured=False, seed=1)
    write_run(root / "feduv" / "version_0", rounds=2, measured=False, method="FedUV")
    return root


# ------------------------------------------------------------------ what a fit returns
def test_a_fit_returns_what_its_folder_tells(fitted):
    trainer, result, *_ = fitted
    read = load_run(result.run_dir)
    assert isinstance(result, FitResult) and result.run_dir == trainer.run_dir
    assert result.history == trainer.history == read.history and len(result.history) == 2
    assert result.metrics == trainer.metrics == read.metrics
    assert (result.name, result.seed, result.state) == ("fedavg/version_0", 0, "finished")
    assert repr(read) == repr(result)
    assert repr(result).startswith("<fedavg/version_0: finished, 2 rounds, seed 0, in ")


def test_evaluations_after_a_fit_leave_what_the_trainer_tells_of_it(fitted):
    trainer, result, model, data = fitted
    with refused("ckpt_path="):
        trainer.test(model, data, ckpt_path="nowhere.ckpt")
    tested = trainer.test(model, data)
    trainer.predict(model, data)
    assert tested["test/accuracy"] == result.metrics["test/accuracy"] and "train/loss" not in tested
    assert (trainer.run_dir, trainer.history, trainer.metrics) == (result.run_dir, result.history, result.metrics)


def test_a_trainer_that_has_not_fitted_tells_of_its_evaluation(tmp_path):
    trainer = small_trainer(tmp_path)
    tested = trainer.test(small_model(), small_data())
    assert (trainer.run_dir, trainer.history, trainer.metrics) == (None, [], tested)


def test_a_second_fit_leaves_the_result_of_the_first(tmp_path):
    trainer, data = small_trainer(tmp_path, max_rounds=1, enable_progress_bar=False), small_data()
    first, second = (trainer.fit(small_model(), data) for _ in range(2))
    assert (first.run_dir.name, second.run_dir.name) == ("version_0", "version_1")
    assert load_run(first.run_dir).history == first.history and first.history is not second.history
    assert trainer.run_dir == second.run_dir


def test_a_run_that_writes_nothing_has_a_result(tmp_path):
    result = small_trainer(tmp_path, fast_dev_run=True).fit(small_model(), small_data())
    assert (result.run_dir, result.name, len(result.history)) == (None, "fedavg", 1)
    assert "in no folder" in repr(result)


def test_a_fit_says_that_no_seed_was_set(tmp_path, monkeypatch, said):
    for given, seed in (("3", 3), (None, 0)):
        monkeypatch.setenv("PL_GLOBAL_SEED", given) if given else monkeypatch.delenv("PL_GLOBAL_SEED")
        assert small_trainer(tmp_path, fast_dev_run=True).fit(small_model(), small_data()).seed == seed
        assert ("seed_everything" in said()) == (given is None)


# ------------------------------------------------------------------ reading runs
@pytest.mark.parametrize("given", ["", "*", "fed*/version_*"])
def test_many_runs_have_a_name_and_the_settings_in_which_they_differ(runs, given):
    before = snapshot(runs)
    found = load_runs(str(runs / given))
    assert snapshot(runs) == before
    assert [one.name for one in found] == ["fedavg/version_0", "fedavg/version_1", "feduv/version_0"]
    assert [one.seed for one in found] == [0, 1, 0]
    assert "FedUV" in found[2].settings.values() and "FedUV" not in found[0].settings.values()
    assert {"alpha", "partitioner"}.isdisjoint(found.frame().columns)


def test_runs_that_are_named_twice_are_read_once(runs, monkeypatch):
    monkeypatch.chdir(runs)
    found = load_runs("feduv", runs / "feduv", "fed*")
    assert [one.name for one in found] == ["feduv/version_0", "fedavg/version_0", "fedavg/version_1"]


def test_the_output_of_bench_is_many_runs(tmp_path):
    for cell in ("FedAvg_0.1_seed0", "FedAvg_0.2_seed0"):
        write_run(tmp_path / "out" / cell / "fedavg" / "version_0", rounds=2, measured=False)
    (tmp_path / "out" / "study.db").write_bytes(b"not read")
    with refused("load_run=", "2 runs", "version_0", "load_runs"):
        load_run(tmp_path / "out")
    names = [one.name for one in load_runs(tmp_path / "out")]
    assert names == ["FedAvg_0.1_seed0/fedavg/version_0", "FedAvg_0.2_seed0/fedavg/version_0"]


def test_what_is_no_run_is_refused(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("mine")
    for load in (load_run, load_runs):
        for path in ("nowhere", "empty", "empty/notes.txt"):
            with refused(f"{load.__name__}='{path}'", "runs/fedavg/version_0"):
                load(path)
    with refused("load_run='runs/*'", "load_runs"):
        load_run("runs/*")
    with refused("load_runs=['runs']", "several"):
        load_runs(["runs"])
    with refused("load_runs='runs/moon*'"):
        load_runs("runs/fed*", "runs/moon*")


def test_a_run_that_was_stopped_has_the_rounds_that_are_done(tmp_path):
    trainer = small_trainer(tmp_path, callbacks=[Stops(1)])
    with pytest.raises(ClientError, match="stopped"):
        trainer.fit(small_model(), small_data())
    make_old(tmp_path)
    with warned("client 0", "round 1"):
        found = load_run(trainer.run_dir)
    assert (found.state, found.history) == ("stopped", trainer.history)
    assert len(found.history) == 1 and "stopped, 1 round," in repr(found)


# ------------------------------------------------------------------ tables
def test_the_history_is_a_frame_with_a_row_for_each_round(fitted):
    result = fitted[1]
    frame = result.frame()
    assert frame.equals(result.history.frame())
    assert frame.columns[0] == "round" and list(frame["round"]) == [0, 1]
    assert frame.to_dict("records") == result.history
    assert list(load_run(result.run_dir).frame().columns) == list(frame.columns)


def test_many_runs_are_one_frame(runs):
    found = load_runs(runs)
    frame = found.frame()
    assert list(frame.columns[:3]) == ["run", "seed", "method"] and len(frame) == 3 + 3 + 2
    last = frame.groupby("run").last()["test/accuracy"]
    assert list(last) == [one.metrics["test/accuracy"] for one in found]
    assert list(frame["FedUV"].dropna()) == ["FedUV"] * 2


def test_the_method_of_a_run_has_its_arguments_and_its_server_optimizer(tmp_path):
    prox = {"class_path": "fl_lightning.methods.FedProx", "init_args": {"mu": 0.1}}
    server = {"class_path": "fl_lightning.optim.FedAdam", "init_args": {"lr": 0.01}}
    config = {"method": [prox], "trainer": {"server_optimizer": server}}
    run = write_run(tmp_path / "mine" / "version_0", rounds=1, measured=False, config=config)
    assert load_run(run).method == "FedProx(mu=0.1), server FedAdam(lr=0.01)"


def test_settings_are_of_the_types_that_the_config_has(tmp_path):
    for seed, (width, gated) in enumerate(((20, False), (40, True))):
        # a seed of the data, whose short name is that of a column already
        config = {"model": {"width": width, "gated": gated}, "data": {"seed": seed + 5}}
        write_run(tmp_path / "mine" / f"version_{seed}", rounds=1, measured=False, seed=seed, config=config)
    found = load_runs(tmp_path)
    expected = [{"width": 20, "gated": False, "data.seed": 5}, {"width": 40, "gated": True, "data.seed": 6}]
    assert found.frame()[["width", "gated", "data.seed"]].to_dict("records") == expected
    assert [one.seed for one in found] == [0, 1]


def test_one_run_has_all_that_its_config_says_of_a_result(runs):
    one, many = load_run(runs / "feduv"), load_runs(runs)[2]  # the only run below a folder is that of the folder
    assert one.method == many.method != "FedAvg" and one.settings == many.settings
    assert one.settings["data.partitioner.alpha"] == 0.1


# ------------------------------------------------------------------ pictures
def test_curves_are_drawn_of_the_metrics_that_are_asked_for(runs):
    found = load_runs(runs)
    (axes,) = found.plot("test/accuracy").axes
    assert axes.get_ylabel() == "test/accuracy (%)"
    # two runs of FedAvg that differ in the seed, and one of FedUV
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 1, 2], [0, 1]]
    assert list(axes.lines[1].get_ydata()) == [100 * row["test/accuracy"] for row in found[2].history]
    usual = [axes.get_ylabel() for axes in found[0].plot().axes]
    assert usual[:2] == ["test/accuracy (%)", "test/loss"]
    with refused("plot='test/nothing'", "test/accuracy"):
        found[0].plot("test/nothing")


def run_with(method, seed, values, alpha):
    """A run with an accuracy for each round."""
    history = History({"round": at, "test/accuracy": value} for at, value in enumerate(values))
    config = {"method": {"class_path": method}}
    settings = {"method": method, "data.alpha": alpha}
    return FitResult(f"{method}/version_{seed}", history, None, seed, config=config, settings=settings)


def test_of_many_runs_those_that_differ_in_their_seeds_are_one_curve():
    found = Runs(run_with("FedAvg", seed, [0.1, 0.1 * seed, 0.5], alpha=0.1) for seed in range(7))
    found += [run_with("FedUV", seed, [0.2, 0.3][: 2 - seed % 2], alpha=seed // 4) for seed in range(7)]
    found.append(run_with("FedAvg", 7, [], alpha=0.1))  # which has just begun
    (axes,) = found.plot("test/accuracy").axes
    names = [line.get_label() for line in axes.lines]
    assert names == ["FedAvg, alpha=0.1 (7 runs)", "FedUV, alpha=0 (4 runs)", "FedUV, alpha=1 (3 runs)"]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([10, 30, 50])
    assert axes.collections[0].get_datalim(axes.transData).intervaly == pytest.approx([0, 60])
    # a mean over fewer runs would jump there
    assert [list(line.get_xdata()) for line in axes.lines[1:]] == [[0], [0]]
    assert "mean and range" in axes.figure.get_suptitle() and len(axes.figure.legends[0].texts) == 3


def test_a_run_without_rounds_has_no_curves():
    result = FitResult("fedavg/version_0", History(), None, 0)
    with refused("plot="):
        result.plot()
    assert "<img" not in result._repr_html_() and result.metrics == {}


def test_a_notebook_shows_names_as_they_are_and_a_picture(runs):
    found = load_runs(runs)
    found[0].name = "<b>mine</b>"
    for shown in (found, found[0]):
        html = shown._repr_html_()
        assert "&lt;b&gt;mine&lt;/b&gt;" in html and "<b>mine" not in html
        assert "test/accuracy" in html and 'src="data:image/png;base64,iVBOR' in html
    assert found.plot()._repr_png_().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_the_guide_runs_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED")
    page = Path(__file__).resolve().parents[1] / "docs" / "python.md"
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(code, names)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which the guide has set, too, and which is put back
    assert (tmp_path / "curves.png").is_file() and (tmp_path / "all.png").is_file()
    (stated,) = re.findall(r"# (0\.\d+) 0 runs/fedprox/version_0", page.read_text())
    accuracy = float(re.search(r"^(0\.\d+) 0 runs/fedprox/version_0$", capsys.readouterr().out, re.MULTILINE)[1])
    assert accuracy > 0.75 and accuracy == pytest.approx(float(stated), abs=0.05) and len(names["runs"]) == 1
    assert names["result"].history == names["trainer"].history
