"""A replay repeats a visit alone, with the bits of the run and with its failure."""

from functools import partial

import pytest
import torch
from helpers import runs
from helpers.checkpoints import bytes_of
from helpers.errors import refused, warned
from helpers.lora import lora_model
from helpers.methods import METHODS
from helpers.quadratics import Quadratic, quadratic_data
from helpers.runs import assert_same_bits, plain_sgd_model, small_model, small_trainer
from helpers.tiers import sample
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fl_lightning import Method
from fl_lightning.callbacks import Callback
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.methods import SCAFFOLD, FedProx
from fl_lightning.utilities.errors import ClientError

ROUND, K = 1, 3
RECORDED = ["SCAFFOLD", "MOON", "FedDyn", "FedBN", "Chosen, FedProx"]
RECEIVED = ["SCAFFOLD", "Chosen, FedProx", "FedBN, Shifted", "IFCA", "FedAMP, FedProx", "HetLoRA"]
small_data = partial(runs.small_data, train_size=120, test_size=30)
# threads of each visit, and the round of each step, recorded outside of restored state
_threads, _steps = [], []


class Breaks(Method):
    """Its term is nan in one visit of one client, unless ``corrected`` stands for the code that a user corrects."""

    corrected = False

    def __init__(self, in_round=ROUND):
        self.in_round, self.round = in_round, 0

    def on_round_start(self, server):
        self.round = server.round

    def on_client_start(self, client):
        _threads.append(torch.get_num_threads())

    def penalty(self, client, step):
        _steps.append(self.round)
        here = (client.info.id, self.round, client.num_steps) == (K, self.in_round, 1)
        return torch.tensor(float("nan") if here and not self.corrected else 0.0, requires_grad=True)


class Keeps(Callback):
    """Writes the local model of each client, whichever worker has trained it, and can end the run in a round."""

    def __init__(self, folder, stop=None):
        self.folder, self.stop = folder, stop

    def on_client_end(self, trainer, client):
        round_ = trainer.server.round
        torch.save(client.state(), self.folder / f"{round_}-{client.info.id}.pt")
        if round_ == self.stop and client.info.id == max(trainer.server.cohort):
            raise ClientError("stopped")


def fit(tmp_path, methods, model=None, **kwargs):
    trainer = small_trainer(tmp_path, **{"max_rounds": 2, "threads_per_worker": 1, "name": "run", **kwargs})
    try:
        trainer.fit(model or plain_sgd_model(), small_data(), methods)
    except ClientError as error:
        return error
    return None


def again(tmp_path, methods, path, round_=ROUND, client=K, model=None, allow_changes=False, **kwargs):
    """Return the model after a replay, and the logged values."""
    model = model or plain_sgd_model()
    trainer = small_trainer(tmp_path, **{"max_rounds": 2, "name": "run", **kwargs})
    logged = trainer.replay(model, small_data(), round_, client, path, methods, allow_changes=allow_changes)
    return model.state_dict(), logged


def record(tmp_path):
    return tmp_path / "run" / "version_0" / "failures" / f"round-{ROUND}-client-{K}.pt"


@pytest.mark.parametrize("name", sample(RECORDED, "SCAFFOLD", "FedBN"))
def test_the_record_of_a_failure_has_all_that_the_visit_depends_on(tmp_path, monkeypatch, name):
    fit(tmp_path, [*METHODS[name](), Breaks()], devices=2)
    monkeypatch.setattr(Breaks, "corrected", True)
    fit(tmp_path, [*METHODS[name](), Breaks()], name="whole", callbacks=[Keeps(tmp_path)], devices=2)
    with warned("client 3", "round 1", "breaks"):
        state, _ = again(tmp_path, [*METHODS[name](), Breaks()], record(tmp_path))
    assert_same_bits(state, torch.load(tmp_path / f"{ROUND}-{K}.pt"))


class Plateau(Quadratic):
    """Its rate falls after a round whose loss is not above the largest so far."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        how = {"mode": "max", "patience": 0, "factor": 0.5}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, **how), "monitor": "train/loss"},
        }


def test_a_schedule_is_where_it_was_in_the_run(tmp_path, monkeypatch):
    def trainer(name):
        callbacks = [Keeps(tmp_path)] if name == "whole" else []
        return small_trainer(tmp_path, name=name, max_rounds=3, local_steps=2, callbacks=callbacks)

    def data():
        return quadratic_data([1.0, 2.0, 3.0, 4.0])

    whole, model = trainer("whole"), Plateau()
    with pytest.raises(ClientError) as caught:
        trainer("run").fit(Plateau(), data(), [Breaks(2)])
    monkeypatch.setattr(Breaks, "corrected", True)
    whole.fit(Plateau(), data(), [Breaks(2)])
    with warned(f"client {K}", "round 2"):
        logged = trainer("run").replay(model, data(), 2, K, caught.value.record, [Breaks(2)])
    assert logged["lr"] == whole.history[2]["lr"] == 0.05
    assert_same_bits(model.state_dict(), torch.load(tmp_path / f"2-{K}.pt"))


@pytest.mark.parametrize("name", sample(RECEIVED, "SCAFFOLD", "Chosen, FedProx"))
def test_a_checkpoint_repeats_each_visit_of_its_round(tmp_path, name):
    how = {"devices": 1 if name == "SCAFFOLD" else 2, "participation": 0.5}
    make = lora_model if name == "HetLoRA" else plain_sgd_model
    fit(tmp_path, METHODS[name](), make(), callbacks=[Keeps(tmp_path, ROUND)], **how)
    cohort = sorted(int(path.stem[2:]) for path in tmp_path.glob(f"{ROUND}-*.pt"))
    assert cohort
    for k in cohort:
        state, logged = again(tmp_path, METHODS[name](), "last", client=k, model=make(), **how)
        assert_same_bits(state, torch.load(tmp_path / f"{ROUND}-{k}.pt"))
        assert logged["train/loss"] > 0
    others = sorted({*range(4)} - {*cohort})
    with refused(f"client={others[0]}", "round 1", str(cohort[0])):
        again(tmp_path, METHODS[name](), "last", client=others[0], model=make(), **how)


def test_a_straggler_does_as_much_as_in_the_run_and_one_that_dropped_out_nothing(tmp_path):
    how = {"systems": SystemsHeterogeneity(stragglers=1.0, dropout_before=0.3), "local_epochs": 5}
    fit(tmp_path, [SCAFFOLD()], callbacks=[Keeps(tmp_path, ROUND)], **how)
    trained = sorted(int(path.stem[2:]) for path in tmp_path.glob(f"{ROUND}-*.pt"))
    assert 0 < len(trained) < 4
    state, _ = again(tmp_path, [SCAFFOLD()], "last", client=trained[0], **how)
    assert_same_bits(state, torch.load(tmp_path / f"{ROUND}-{trained[0]}.pt"))
    lost = min({*range(4)} - {*trained})
    with refused(f"client={lost}", "round 1"):
        again(tmp_path, [SCAFFOLD()], "last", client=lost, **how)


def test_a_visit_is_repeated_in_a_run_whose_cohort_is_another_one(tmp_path, monkeypatch):
    fit(tmp_path, [SCAFFOLD(), Breaks()])
    monkeypatch.setattr(Breaks, "corrected", True)
    with warned(f"client {K}", f"round {ROUND}"):
        state, _ = again(tmp_path, [SCAFFOLD(), Breaks()], record(tmp_path))
    for how in ({"participation": 0.25}, {"systems": SystemsHeterogeneity(available={"3": [[5]]})}):
        with warned(f"client {K}", f"round {ROUND}"):
            changed, _ = again(tmp_path, [SCAFFOLD(), Breaks()], record(tmp_path), allow_changes=True, **how)
        assert_same_bits(changed, state)


@pytest.mark.parametrize(("workers", "on_client_error"), [(1, "raise"), (2, "skip")])
def test_a_visit_fails_again_with_the_message_of_the_run_and_nothing_is_written(tmp_path, workers, on_client_error):
    error = fit(tmp_path, [Breaks()], devices=workers, on_client_error=on_client_error)
    assert error is None or error.record == record(tmp_path)
    saved = torch.load(record(tmp_path), weights_only=True)["failure"]
    said = f"client {K}, round {ROUND}: breaks became nan or infinite at local step 1"
    assert saved == {"round": ROUND, "client": K, "error": said, "term": "breaks", "step": 1}
    before = bytes_of(tmp_path)
    with refused(f"client {K}", f"round {ROUND}", "breaks", "local step 1", kind=ClientError):
        again(tmp_path, [Breaks()], record(tmp_path), devices=workers)
    assert bytes_of(tmp_path) == before


def test_a_replay_stops_at_the_step_and_has_the_threads_of_the_run(tmp_path, monkeypatch):
    fit(tmp_path, [Breaks()], local_steps=5)
    torch.set_num_threads(2)
    _steps.clear()
    _threads.clear()
    with refused("local step 1", kind=ClientError):
        again(tmp_path, [Breaks()], record(tmp_path), local_steps=5)
    assert len(_steps) == 2  # the run went to the end of the visit
    monkeypatch.setattr(Breaks, "corrected", True)
    again(tmp_path, [Breaks()], tmp_path / "run/version_0/checkpoints/last.ckpt", local_steps=5)
    assert _threads == [1, 1]
    assert torch.get_num_threads() == 2


class Always(Method):
    def on_client_start(self, client):
        if client.info.id:
            raise ValueError("always")


def test_the_module_finds_its_entries_in_the_record_of_a_failure(tmp_path):
    class Adds(Quadratic):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = checkpoint["epoch"]

        def on_load_checkpoint(self, checkpoint):
            self.loaded = checkpoint["mine"], checkpoint["epoch"]

    model, data = Adds(), quadratic_data([0.0, 1.0, 2.0, 3.0])
    trainer = small_trainer(tmp_path, max_rounds=2, local_epochs=2, name="run")
    with refused(f"client {K}", kind=ClientError) as caught:
        trainer.fit(Adds(), data, [Breaks()])
    with refused(f"client {K}", kind=ClientError):
        trainer.replay(model, data, ROUND, K, caught.value.record, [Breaks()])
    assert model.loaded == (2, 2)


def test_a_run_keeps_the_records_of_its_first_failures(tmp_path):
    trainer = small_trainer(tmp_path, max_rounds=5, name="run", on_client_error="skip")
    trainer.fit(small_model(), small_data(), [Always()])
    assert len(list((tmp_path / "run" / "version_0" / "failures").iterdir())) == 10


def test_what_the_file_does_not_hold_is_refused_by_one_line(tmp_path):
    fit(tmp_path, [Breaks()])
    last = tmp_path / "run/version_0/checkpoints/last.ckpt"
    wrong = [
        (("round=0", "round 1"), {"round_": 0}),
        (("client=0", "client 3"), {"client": 0}),
        (("round=2", "0 to 1"), {"round_": 2}),
        (("client=-1", "0 to 3"), {"client": -1}),
        (("round=0", "pass round 1"), {"path": last, "round_": 0}),
        (("ckpt_path=None", "RUN/failures/round-R-client-K.pt"), {"path": None}),
        (("ckpt_path='nowhere.pt'",), {"path": "nowhere.pt"}),
        (("method=[",), {"methods": [FedProx()]}),
        (("ckpt_path=", "model"), {"model": small_model("cnn")}),
    ]
    for words, given in wrong:
        with refused(*words) as caught:
            again(tmp_path, **{"methods": [Breaks()], "path": record(tmp_path), **given})
        assert "\n" not in str(caught.value)


def test_a_record_of_another_version_is_refused(tmp_path):
    fit(tmp_path, [Breaks()])
    torch.save({**torch.load(record(tmp_path)), "format": "1"}, record(tmp_path))
    with refused("ckpt_path=", "another version"):
        again(tmp_path, [Breaks()], record(tmp_path))
