"""The guide's method, in a file outside the package: it runs by its class_path, and its laws hold."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from helpers.errors import refused
from helpers.quadratics import Curved, curved_data
from helpers.runs import assert_same_bits, differs, small_data, small_model

from fl_lightning import Method, load_run
from fl_lightning.cli import main
from fl_lightning.methods import CoordinateMedian, FedProx, Local

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "experiments" / "own_method"
GUIDE, ADVANCED = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("own_method", "own_method_advanced"))
FIRST, FILE = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def clipped_change(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from experiments.own_method.clipped_change import ClippedChange

    return ClippedChange


def test_the_guide_shows_the_file_and_the_config():
    assert (FOLDER / "clipped_change.py").read_text() == FILE
    (lines,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    assert lines in (FOLDER / "clipped_change.yaml").read_text()


def test_the_guide_names_hooks_that_exist():
    table = GUIDE.split("## Which hook")[1].split("\n## ")[0]
    for hook in re.findall(r"`(\w+)\(", table.replace("client.", "")):
        assert hasattr(Method, hook) or hook in ("memory", "scratch", "load_reference", "observe"), hook


@pytest.mark.thorough
def test_the_first_method_of_the_guide_ends_at_the_accuracy_that_it_says(monkeypatch, tmp_path, undrawn, one_parser):
    command = re.search(r"^python cli\.py (.*?[^\\])$", GUIDE, re.DOTALL | re.MULTILINE)[1].replace("\\\n", " ")
    (tmp_path / "my_method.py").write_text(FIRST)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    main(shlex.split(command))
    accuracy = load_run("runs/smallrepresentations/version_0").metrics["test/accuracy"]
    stated = float(re.search(r"ends at a test accuracy of (\d+) %", GUIDE)[1])
    assert accuracy > 0.75 and 100 * accuracy == pytest.approx(stated, abs=5)


def test_it_runs_by_its_class_path(monkeypatch, tmp_path, capsys, undrawn, one_parser):
    monkeypatch.chdir(ROOT)
    main(["fit", f"--config={FOLDER / 'clipped_change.yaml'}", f"--trainer.default_root_dir={tmp_path}"])
    assert float(capsys.readouterr().out.split("test/accuracy ")[1].split(" %")[0]) > 50
    (table,) = tmp_path.glob("clippedchange+feddecorr/version_0/metrics.csv")
    assert "train/clippedchange" in table.read_text().splitlines()[0]


def test_the_installed_program_finds_it_in_the_working_folder(monkeypatch, tmp_path, one_parser):
    (tmp_path / "mine.py").write_text((FOLDER / "clipped_change.py").read_text())
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part not in ("", str(tmp_path))])
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    monkeypatch.chdir(tmp_path)
    config = (FOLDER / "clipped_change.yaml").read_text().replace("experiments.own_method.clipped_change", "mine")
    (tmp_path / "mine.yaml").write_text(config)
    main(["fit", "--config=mine.yaml", "--trainer.fast_dev_run=true"])


def test_an_infinite_factor_is_fedavg_bit_for_bit_and_a_small_one_is_not(run, clipped_change):
    plain, _ = run()
    assert_same_bits(run([clipped_change(float("inf"))])[0], plain)
    assert differs(run([clipped_change(0.5)])[0], plain)


def test_no_change_is_longer_than_the_factor_times_the_mean_of_the_round_before(run, clipped_change):
    lengths = []

    class Watch(Method):
        def transform_client_update(self, client, delta):
            lengths.append((client.drift, float(sum(v.square().sum() for v in delta.values())) ** 0.5))
            return delta

    run([clipped_change(0.9), Watch()], max_rounds=3)
    for round_ in (1, 2):
        mean = sum(before for before, _ in lengths[4 * (round_ - 1) : 4 * round_]) / 4
        for before, after in lengths[4 * round_ : 4 * (round_ + 1)]:
            assert after == pytest.approx(min(before, 0.9 * mean))


def test_it_goes_together_with_others_and_is_refused_where_nothing_is_sent(run, clipped_change):
    run([FedProx(), clipped_change()], max_rounds=1)
    with refused("ClippedChange", "Local"):
        run([clipped_change(), Local()])
    with refused("ClippedChange.factor=0"):
        clipped_change(0)


def test_the_guides_first_pools_are_those_of_the_files(run, monkeypatch, tmp_path):
    names = {}
    exec(re.findall(r"```python\n(.*?)```", ADVANCED, re.DOTALL)[2], names)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").mkdir()
    given = {k: {name: value + k for name, value in small_model().state_dict().items()} for k in range(4)}
    for k, state in given.items():
        torch.save(state, tmp_path / "before" / f"{k}.pt")
    _, trainer = run([names["WarmMOON"](pool_size=2)], max_rounds=1)
    for k, memory in trainer.client.memories().items():
        assert_same_bits(memory["moon"]["pool"][0], given[k])


def example(place):
    names = {}
    exec(re.findall(r"```python\n(.*?)```", ADVANCED, re.DOTALL)[place], names)
    return names


def test_the_guides_extragradient_steps_with_the_gradient_ahead(run):
    """On a/2 (y - b)^2 a step from y = 0 with rate 0.1 leads to 0.1 a b, where the gradient is a (0.1 a - 1) b."""
    data = curved_data([2.0], [3.0])
    state, _ = run([example(0)["Extragradient"]()], model=Curved(lr=0.1), data=data, max_rounds=1)
    assert state["y"].item() == pytest.approx(0.1 * 2 * (1 - 0.2) * 3)


def test_the_guides_gradient_norm_is_that_of_the_whole_loss_and_changes_nothing(run):
    method, data = example(1)["GradientNorm"](), curved_data([2.0, 1.0], [3.0, -4.0], sizes=[3, 5], batch_size=2)
    state, trainer = run([method], model=Curved(lr=0.1), data=data, max_rounds=1)
    assert trainer.metrics["train/gradientnorm"] == pytest.approx((3 * 6 + 5 * 4) / 8)
    assert_same_bits(state, run([], model=Curved(lr=0.1), data=data, max_rounds=1)[0])


@pytest.mark.parametrize("devices", [1, 2])
def test_the_guides_learning_rates_are_logged_for_each_client(run, devices):
    _, trainer = run([example(3)["LearningRates"](lr=0.1)], max_rounds=1, devices=devices)
    examples = [trainer.data.info(k).num_examples for k in range(4)]
    for k, number in enumerate(examples):
        assert trainer.metrics[f"train/lr/{k}"] == pytest.approx(0.1 * (sum(examples) / 4 / number) ** 0.5)


@pytest.mark.parametrize(("place", "name"), [(3, "LearningRates"), (4, "LastModel"), (5, "Auxiliary")])
def test_the_guides_methods_with_models_and_modules_train(run, place, name):
    state, trainer = run([example(place)[name]()], max_rounds=2)
    assert differs(state, small_model().state_dict()) and trainer.metrics["train/loss"] > 0


def test_the_guides_median_is_the_packages_and_shrinking_nobody_is_fedavg(run):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/own_aggregation.md").read_text(), re.DOTALL):
        exec(block, names)
    data = {"data": small_data(num_clients=3), "max_rounds": 2}
    assert_same_bits(run([names["Median"]()], **data)[0], run([CoordinateMedian()], **data)[0])
    plain, _ = run()
    assert_same_bits(run([names["Shrink"](examples=0)])[0], plain)
    assert differs(run([names["Shrink"](examples=1000)])[0], plain)
    assert differs(run([names["Medoid"]()])[0], plain)
