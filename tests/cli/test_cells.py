"""A cell is an ordinary fit, and the objects of its config can be built without one."""

import subprocess
import sys

import pytest
import yaml
from helpers.errors import assert_names, refused, warned

from fl_lightning.cli.bench_worker import check_configs, machine, run_cell
from fl_lightning.data.plan import Plan
from fl_lightning.storage import checkpoint
from fl_lightning.utilities.errors import ClientError

BASE = {
    "seed_everything": 1,
    "model": {
        "class_path": "ImageClassifier",
        "init_args": {
            "encoder": {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [8]}},
            "projector": {"class_path": "Projector", "init_args": {"width": 8}},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        },
    },
    "data": {"class_path": "Digits", "init_args": {"num_clients": 3, "train_size": 90, "test_size": 60}},
    "trainer": {"max_rounds": 3, "devices": 1, "threads_per_worker": 1, "logger": False, "enable_progress_bar": False},
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["cells"])
    monkeypatch.chdir(tmp_path)


def cell(folder, name="cell", *fragments, metric="test/accuracy"):
    (folder / name).mkdir(exist_ok=True)
    return {"name": name, "folder": name, "output": str(folder), "fragments": [BASE, *fragments], "metric": metric}


def nothing(round_, value):
    return False


def test_a_cell_tells_its_rounds_and_what_it_was(tmp_path):
    rounds = []
    told = run_cell(cell(tmp_path), lambda *given: rounds.append(given))
    assert [round_ for round_, _ in rounds] == [0, 1, 2] and dict(rounds) == told["values"]
    folder = tmp_path / "cell" / "version_0"
    assert told["run_dir"] == str(folder) and told["plan"] == Plan.load(folder / "plan.npz").hash
    assert told["metrics"]["test/accuracy"] == told["values"][2] and told["seconds"] > 0
    assert told["machine"] == machine() and "cores" in machine()


def test_a_cell_that_is_done_returns_at_once_with_its_history(tmp_path):
    short = {"trainer": {"max_rounds": 1}}
    told, rounds = run_cell(cell(tmp_path, "cell", short), nothing), []
    with warned("trainer.max_rounds=1"):
        again = run_cell(cell(tmp_path, "cell", short), lambda *given: rounds.append(given))
    assert not rounds and {**again, "metrics": 0, "warnings": []} == {**told, "metrics": 0}
    paths = sorted((tmp_path / "cell" / "configs").iterdir())
    where = {"trainer": {"default_root_dir": str(tmp_path), "name": "cell"}}
    assert [yaml.safe_load(path.read_text()) for path in paths] == [BASE, short, where]


def test_a_cell_goes_on_where_it_was(tmp_path):
    whole = run_cell(cell(tmp_path, "whole"), nothing)["values"]
    rounds = []
    half = run_cell(cell(tmp_path), lambda round_, value: round_ == 1)
    assert half["values"] == {0: whole[0], 1: whole[1]}
    assert run_cell(cell(tmp_path), lambda *given: rounds.append(given))["values"] == whole
    assert rounds == [(2, whole[2])]


def test_a_cell_of_another_version_of_the_package_starts_again(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as before:
        before.setattr(checkpoint, "FORMAT", "another one")
        run_cell(cell(tmp_path), lambda round_, value: round_ == 1)
    told = run_cell(cell(tmp_path), nothing)
    assert len(told["values"]) == 3 and told["run_dir"] == str(tmp_path / "cell" / "version_1")
    assert "another version of fl_lightning" in capsys.readouterr().err


def test_a_cell_that_begins_with_weights_goes_on_where_it_was(tmp_path):
    run_cell(cell(tmp_path, "before"), nothing)
    given = {"weights": str(tmp_path / "before" / "version_0" / "checkpoints" / "model.ckpt")}
    whole = run_cell(cell(tmp_path, "whole", given), nothing)["values"]
    run_cell(cell(tmp_path, "cell", given), lambda round_, value: round_ == 1)
    assert run_cell(cell(tmp_path, "cell", given), nothing)["values"] == whole
    # one that ended before its first checkpoint begins again
    (tmp_path / "none" / "version_0").mkdir(parents=True)
    assert run_cell(cell(tmp_path, "none", given), nothing)["values"] == whole


def test_a_metric_that_is_not_logged_is_refused_and_one_that_is_not_finite_fails_the_cell(tmp_path):
    with refused("metric='test/f1'", "test/accuracy"):
        run_cell(cell(tmp_path, "cell", metric="test/f1"), nothing)
    assert not list(tmp_path.rglob("metrics.csv"))  # in round 0, not after all rounds
    fast = {"model": {"init_args": {"optimizer": {"init_args": {"lr": 1e30}}}}}
    with refused("round 0", "test/loss", kind=ClientError):
        run_cell(cell(tmp_path, "other", fast, metric="test/loss"), nothing)


@pytest.mark.parametrize(
    ("change", "metric", "keys"),
    [
        ({"method": [{"class_path": "FedProx", "init_args": {"nu": 1}}]}, "test/accuracy", ["FedProx", "nu"]),
        ({"method": [{"class_path": "FedProx", "init_arg": {"mu": 1}}]}, "test/accuracy", ["did you mean init_args?"]),
        ({"method": [{"class_path": "FedProx", "init_args": {"mu": -1}}]}, "test/accuracy", ["FedProx.mu=-1.0"]),
        ({"trainer": {"max_rounds": -1}}, "test/accuracy", ["trainer.max_rounds=-1"]),
        ({}, "test/acc", ["metric='test/acc'", "test/accuracy"]),
        ({}, "test/loss", []),
        ({"trainer": {"callbacks": [{"class_path": "Scores"}]}}, "test/score", []),
        ({"data": {"init_args": {"root": "nowhere"}}, "trainer": {"devices": 2}}, "val/accuracy", ["root"]),
    ],
)
def test_a_config_is_refused_by_building_its_objects(tmp_path, change, metric, keys):
    wrong = check_configs({"metric": metric, "configs": {"plain": [BASE], "changed": [BASE, change]}}, nothing)
    assert ("changed" in wrong) == bool(keys) and "\n" not in wrong.get("changed", "")
    if keys:
        assert_names(wrong["changed"], *keys)
    assert not list(tmp_path.iterdir())


def test_the_program_of_the_cells_leaves_the_gpu_alone():
    """A process that is forked from one with a context of CUDA has none."""
    code = "import torch; torch._C._cuda_getDeviceCount = torch.cuda.is_available = torch.cuda.init = 1 .real\n"
    code += "import fl_lightning.cli.bench_worker; print(torch.cuda.is_initialized())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_the_warnings_of_a_run_are_told_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "def on_round_end(self, trainer):\n        for text in 'abcabc':\n            trainer.warn(text)"
    (tmp_path / "own_warning.py").write_text(
        f"from fl_lightning.callbacks import Callback\nclass Warns(Callback):\n    {text}\n"
    )
    many = {"trainer": {"max_rounds": 1, "callbacks": [{"class_path": "own_warning.Warns"}]}}
    with pytest.warns(UserWarning, match="^[abc]$"):
        told = run_cell(cell(tmp_path, "cell", many), nothing)["warnings"]
    assert told == ["a", "b", "c"]
    assert run_cell(cell(tmp_path, "other", {"trainer": {"max_rounds": 1}}), nothing)["warnings"] == []


OWN = "from fl_lightning import Method\nclass Own(Method):\n    mu = 1\n"


def test_a_cell_whose_code_has_changed_since_its_checkpoint_begins_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the same second and size, it would be taken for it
    mine = cell(tmp_path, "cell", {"method": [{"class_path": "own_of_a_cell.Own"}]})
    told = []
    for text in (OWN, f"{OWN}    # as before", OWN.replace("mu = 1", "mu = 2")):
        (tmp_path / "own_of_a_cell.py").write_text(text)
        monkeypatch.delitem(sys.modules, "own_of_a_cell", raising=False)
        rounds = []
        told.append(run_cell(mine, lambda round_, value: rounds.append(round_) or round_ == 0))  # noqa: B023
        told[-1]["rounds"] = rounds
    assert [one["rounds"] for one in told] == [[0], [1, 2], [0]]
    assert list(told[0]["code"]) == ["own_of_a_cell"] and told[0]["code"] == told[1]["code"] != told[2]["code"]
    assert [one["run_dir"][-1] for one in told] == ["0", "0", "1"]
    assert_names(capsys.readouterr().err, "code.own_of_a_cell was edited")
    assert run_cell(cell(tmp_path, "other"), nothing)["code"] == {}
