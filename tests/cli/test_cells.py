"""A cell is an ordinary fit; many of them run in one process, and none leaves anything to the next."""

import os
import sys

import pytest
import torch
import yaml
from helpers.errors import assert_names, refused

from fl_lightning.cli.cells import free_memory, machine, run_cell
from fl_lightning.data.plan import Plan
from fl_lightning.errors import ClientError

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
RUDE = """
import os, torch
from fl_lightning.callbacks import Callback

class Rude(Callback):
    def on_fit_start(self, trainer):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(5)
        os.environ["PL_GLOBAL_SEED"] = "77"
        os.chdir("/")
        raise OSError("rude")
"""


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
    again = run_cell(cell(tmp_path, "cell", short), lambda *given: rounds.append(given))
    assert not rounds and {**again, "metrics": 0} == {**told, "metrics": 0}
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


def test_no_cell_leaves_anything_to_the_next(tmp_path, monkeypatch):
    alone = run_cell(cell(tmp_path, "alone"), nothing)
    (tmp_path / "rude.py").write_text(RUDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(os.environ), os.getcwd(), list(sys.path)
    with pytest.raises(OSError, match="rude"):
        run_cell(cell(tmp_path, "rude", {"trainer": {"callbacks": [{"class_path": "rude.Rude"}]}}), nothing)
    assert (dict(os.environ), os.getcwd(), list(sys.path)) == before
    assert torch.get_default_dtype() == torch.float32
    other = {"method": [{"class_path": "FedProx"}], "seed_everything": 2, "trainer": {"max_rounds": 1}}
    run_cell(cell(tmp_path, "other", other), nothing)
    free_memory()
    after = run_cell(cell(tmp_path, "after"), nothing)
    assert (after["values"], after["plan"]) == (alone["values"], alone["plan"])
    written = yaml.safe_load((tmp_path / "after" / "version_0" / "config.yaml").read_text())
    expected = yaml.safe_load((tmp_path / "alone" / "version_0" / "config.yaml").read_text())
    assert written == {**expected, "trainer": {**expected["trainer"], "name": "after"}}


def test_a_config_that_is_not_valid_is_refused_in_one_line(tmp_path):
    with refused("trainer.max_rounds=-1") as caught:
        run_cell(cell(tmp_path, "cell", {"trainer": {"max_rounds": -1}}), nothing)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cell" / "version_0").exists()


def test_a_metric_that_is_not_logged_is_refused_and_one_that_is_not_finite_fails_the_cell(tmp_path):
    with refused("metric='test/f1'", "test/accuracy"):
        run_cell(cell(tmp_path, "cell", {"trainer": {"max_rounds": 1}}, metric="test/f1"), nothing)
    fast = {"model": {"init_args": {"optimizer": {"init_args": {"lr": 1e30}}}}}
    with refused("round 0", "test/loss", kind=ClientError):
        run_cell(cell(tmp_path, "other", fast, metric="test/loss"), nothing)


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
    assert_names(capsys.readouterr().err, "own_of_a_cell.py was edited")
    assert run_cell(cell(tmp_path, "other"), nothing)["code"] == {}
