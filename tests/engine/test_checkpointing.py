"""A run that goes on from a checkpoint ends with the bits of one that never stopped."""

import csv
import shutil

import pytest
import torch
from helpers.errors import assert_names, refused, warned
from helpers.methods import METHODS
from helpers.runs import Stops, assert_same_bits, history, plain_sgd_model, small_data, small_trainer
from lightning.fabric.loggers import CSVLogger
from torch.optim import SGD, Adam

from fl_lightning.callbacks import SpectrumMonitor
from fl_lightning.errors import ClientError
from fl_lightning.methods import MOON


@pytest.fixture(autouse=True)
def _undrawn(undrawn):
    """Only what runs leave in checkpoints and tables is tested here."""


def fit(tmp_path, methods, ckpt_path=None, stop=None, name="run", **kwargs):
    callbacks = [SpectrumMonitor(), *([Stops(stop)] if stop is not None else [])]
    given = {"callbacks": callbacks, "max_rounds": 4, "participation": 0.6, "name": name, **kwargs}
    trainer = small_trainer(tmp_path, **given)
    try:
        trainer.fit(plain_sgd_model(), small_data(num_clients=7), methods, ckpt_path)
    except ClientError:
        assert stop is not None
    return trainer


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return [
            {k: v for k, v in row.items() if not k.startswith(("time/", "placed/"))} for row in csv.DictReader(file)
        ]


SEVERAL = [(name, workers) for name in ("SCAFFOLD", "FedBN") for workers in ((2, 1), (1, 2))]


@pytest.mark.parametrize(("name", "workers"), [*((name, (1, 1)) for name in METHODS), *SEVERAL])
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(tmp_path, name, workers):
    how = {"threads_per_worker": 1, "server_optimizer": lambda p: Adam(p, lr=0.05)}
    whole = fit(tmp_path, METHODS[name](), name="whole", **how)
    fit(tmp_path, METHODS[name](), stop=2, devices=workers[0], **how)
    trainer = fit(tmp_path, METHODS[name](), "last", devices=workers[1], **how)
    assert_same_bits(whole.server.state, trainer.server.state)
    assert history(whole) == history(trainer)
    assert rows(tmp_path / "whole/version_0") == rows(tmp_path / "run/version_0")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]


def test_a_copy_beside_the_last_checkpoint_goes_on_in_a_new_version(tmp_path):
    fit(tmp_path, [], max_rounds=2)
    path = tmp_path / "run/version_0/checkpoints"
    for suffix in ("", ".json"):
        shutil.copyfile(path / f"last.ckpt{suffix}", path / f"mine.ckpt{suffix}")
    whole = fit(tmp_path, [], path / "last.ckpt")
    before = {one: one.read_bytes() for one in path.iterdir() if one.is_file()}
    again = fit(tmp_path, [], path / "mine.ckpt")
    assert again.run_dir.name == "version_1"
    assert_same_bits(whole.server.state, again.server.state)
    assert before == {one: one.read_bytes() for one in path.iterdir() if one.is_file()}


def test_spectra_hold_all_rounds(tmp_path):
    fit(tmp_path, [], stop=2)
    fit(tmp_path, [], "last")
    import numpy as np

    assert np.load(tmp_path / "run/version_0/spectra.npz")["rounds"].tolist() == [0, 1, 2, 3]


def test_a_checkpoint_does_not_grow_with_the_rounds(tmp_path):
    runs = [fit(tmp_path, [], max_rounds=rounds, name=str(rounds)) for rounds in (2, 7)]
    few, many = ((run.run_dir / "checkpoints/last.ckpt").stat().st_size for run in runs)
    assert many < few + 100


def test_spectra_that_were_altered_are_named_and_begin_anew(tmp_path):
    import numpy as np

    whole = fit(tmp_path, [], name="whole")
    fit(tmp_path, [], stop=2)
    file = tmp_path / "run/version_0/spectra.npz"
    arrays = dict(np.load(file))
    np.savez(file, **{**arrays, "classifier": arrays["classifier"] + 1})
    with warned("spectra.npz"):
        again = fit(tmp_path, [], "last")
    assert history(whole) == history(again)
    assert np.load(file)["rounds"].tolist() == [2, 3]


def test_a_checkpoint_that_was_copied_away_goes_on_in_a_new_folder(tmp_path):
    whole = fit(tmp_path, [MOON()], name="whole")
    fit(tmp_path, [MOON()], max_rounds=2)
    shutil.move(tmp_path / "run/version_0/checkpoints", tmp_path / "elsewhere")
    fit(tmp_path, [MOON()], tmp_path / "elsewhere/last.ckpt", max_rounds=3)
    assert len(list((tmp_path / "run").iterdir())) == 2
    shutil.rmtree(tmp_path / "elsewhere")
    assert_same_bits(whole.server.state, fit(tmp_path, [MOON()], "last").server.state)


def test_more_rounds_can_be_added(tmp_path):
    whole = fit(tmp_path, [MOON()], name="whole", max_rounds=5)
    fit(tmp_path, [MOON()], max_rounds=2)
    assert_same_bits(whole.server.state, fit(tmp_path, [MOON()], "last", max_rounds=5).server.state)


def test_the_last_checkpoint_is_that_of_the_last_due_round_and_old_memories_are_gone(tmp_path):
    fit(tmp_path, [MOON()], stop=3, checkpoint_every_n_rounds=2)
    folder = tmp_path / "run/version_0/checkpoints"
    assert torch.load(folder / "last.ckpt", weights_only=True)["round"] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["clients", "history.jsonl", "last.ckpt", "last.ckpt.json"]
    files = {path.name for path in (folder / "clients").iterdir()}
    held = torch.load(folder / "last.ckpt", weights_only=True)["clients"]
    assert files >= set(held.values())
    assert len({name.split("-")[0] for name in held.values()}) == len(held)


def test_a_client_is_written_once_a_visit_and_its_old_file_goes(tmp_path):
    trainer = fit(tmp_path, [MOON()], cohort_size=2, participation=1.0, max_rounds=6)
    files = sorted(path.name for path in (tmp_path / "run/version_0/checkpoints/clients").iterdir())
    last, previous = ({k: r + 1 for r in range(done) for k in trainer.sampler(0, r, 7, 2)} for done in (6, 5))
    assert files == sorted({f"{k}-{r}.pt" for checkpoint in (last, previous) for k, r in checkpoint.items()})


def test_a_restart_by_torchrun_goes_on_and_a_first_start_does_not(tmp_path, monkeypatch):
    fit(tmp_path, [], stop=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert len(fit(tmp_path, []).history) == 4
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]
    assert fit(tmp_path, [], name="new").history[0]["round"] == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    fit(tmp_path, [])
    assert len(list((tmp_path / "run").iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setenv("PL_GLOBAL_SEED", "1"), "seed_everything"),
        (None, "method"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_left_as_it_is(tmp_path, monkeypatch, change, message):
    fit(tmp_path, [])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if change:
        change(monkeypatch)
    path = tmp_path / "run/version_0/checkpoints/last.ckpt"
    with refused("ckpt_path=", message):
        fit(tmp_path, [] if change else [MOON()], path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_missing_checkpoint_is_refused(tmp_path):
    with refused("ckpt_path=", "nothing.ckpt"):
        fit(tmp_path, [], tmp_path / "nothing.ckpt")
    with refused("ckpt_path='last'"):
        small_trainer(tmp_path).test(plain_sgd_model(), small_data(num_clients=7), "last")
    for nameless in ("", "."):
        with refused("ckpt_path='", "last"):
            fit(tmp_path, [], nameless)


def test_last_before_the_first_checkpoint_begins_with_round_0_and_says_so(tmp_path, said):
    assert len(fit(tmp_path, [], "last", max_rounds=1).history) == 1
    assert_names(said(), "round 0")
    assert len(fit(tmp_path, [], "last", max_rounds=2).history) == 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]


def test_a_checkpoint_without_its_clients_gives_way_to_the_one_before_it_and_without_both_is_refused(tmp_path):
    whole = fit(tmp_path, [MOON()])
    clients = tmp_path / "run/version_0/checkpoints/clients"
    for file in clients.glob("*-4.pt"):
        file.unlink()
    with warned("ckpt_path=", "clients/", "-4.pt", "previous.ckpt"):
        again = fit(tmp_path, [MOON()], "last")
    assert_same_bits(whole.server.state, again.server.state)
    assert history(whole) == history(again)
    shutil.rmtree(clients)
    with refused("clients/", "previous.ckpt", "clients/"):
        fit(tmp_path, [MOON()], "last")


def test_a_users_own_loggers_and_server_optimizer_go_on(tmp_path):
    how = {"server_optimizer": lambda p: SGD(p, lr=1.0, momentum=0.9)}
    whole = fit(tmp_path, [], name="whole", **how)
    fit(tmp_path, [], stop=1, logger=CSVLogger(tmp_path / "theirs"), **how)
    assert_same_bits(whole.server.state, fit(tmp_path, [], "last", **how).server.state)
