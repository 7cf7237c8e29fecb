"""The doctor: a fit resolved, checked and estimated, and nothing left behind."""

import copy
import json
import tempfile
import time

import pytest
from helpers.errors import missing
from helpers.runs import assert_same_bits, plain_sgd_model, small_data, small_model, small_trainer
from helpers.tiny import Sizes

from fl_lightning import Method
from fl_lightning.callbacks import SpectrumMonitor
from fl_lightning.core.state import num_bytes
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.data import IID
from fl_lightning.engine.commands.doctor import as_text
from fl_lightning.methods import MOON, SCAFFOLD, FedDecorr, Local
from fl_lightning.utilities.errors import ClientError, UsageError


def examined(tmp_path, methods=(), model=None, data=None, **kwargs):
    trainer = small_trainer(tmp_path, **{"max_rounds": 3, **kwargs})
    return trainer.doctor(model or small_model(), data or small_data(), list(methods))


def test_the_plan_is_of_plain_values_and_its_text_is_short_and_aligned(tmp_path):
    plan = examined(tmp_path, [MOON(), FedDecorr(beta=0.2)], callbacks=[SpectrumMonitor()], participation=0.5)
    assert json.loads(json.dumps(plan)) == plan
    assert plan["methods"]["feddecorr"]["arguments"]["beta"] == 0.2
    assert (plan["run"]["rounds"], plan["run"]["cohort"]) == (3, 2)
    lines = as_text(plan).splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 120
    assert {line[18] for line in lines} - {" "} and {line[17] for line in lines} == {" "}
    assert "FedDecorr(beta=0.2" in lines[0]
    assert "SpectrumMonitor" in plan["run"]["callbacks"] and "--trainer.callbacks+=SpectrumMonitor" not in as_text(plan)
    assert "--trainer.callbacks+=SpectrumMonitor" in as_text(examined(tmp_path))


def test_parameters_bytes_and_state_are_those_of_a_fit(tmp_path):
    model, data = plain_sgd_model(), small_data()
    plan = examined(tmp_path, [SCAFFOLD()], model, data)
    trained = sum(value.numel() for value in model.parameters())
    assert plan["model"]["trained"] == trained
    assert plan["model"]["buffers"] == sum(value.numel() for value in model.buffers())
    trainer = small_trainer(tmp_path, max_rounds=1)
    trainer.fit(model, data, [SCAFFOLD()])
    assert plan["bytes"] == {side: trainer.metrics[f"bytes/{side}"] for side in ("down", "up")}
    each = [num_bytes(memory) for memory in trainer.client.memories().values()]
    assert plan["client_state"] == {"each": each[0], "all": sum(each)}
    assert each[0] >= 4 * trained


class Seeing(Method):
    def aggregate(self, server, updates):
        return updates.combined([1.0] * len(updates), mean=True)


def test_updates_that_the_server_sees_one_by_one_are_counted_and_warned_of(tmp_path, monkeypatch):
    assert examined(tmp_path)["updates"] == 0 and "updates" not in as_text(examined(tmp_path))
    plan = examined(tmp_path, [Seeing()])
    assert plan["updates"] > 4 * 4 * plan["model"]["trained"] and "\nupdates  " in as_text(plan)
    assert not named_in(plan["warnings"], "Seeing")
    monkeypatch.setattr("fl_lightning.engine.commands.doctor.available_memory", lambda device: 1.9 * plan["updates"])
    assert named_in(examined(tmp_path, [Seeing()])["warnings"], "method=['Seeing']", "trainer.cohort_size")


def named_in(lines, *words):
    """Whether a line names the words."""
    return any(missing(line, *words) is None for line in lines)


def test_taps_name_the_module_and_who_reads_them(tmp_path):
    plan = examined(tmp_path, [MOON(), FedDecorr()], callbacks=[SpectrumMonitor()], taps={"mine": "encoder"})
    assert plan["taps"]["representation"] == {
        "output": "projector",
        "class": "Projector",
        "readers": ["MOON", "FedDecorr", "SpectrumMonitor"],
    }
    assert plan["taps"]["mine"] == {"output": "encoder", "class": "MLP", "readers": []}
    assert "read by MOON, FedDecorr, SpectrumMonitor" in as_text(plan)


def test_frozen_and_kept_entries_are_counted(tmp_path):
    model = small_model()
    model.classifier.requires_grad_(False)
    assert examined(tmp_path, [], model)["model"]["frozen"] == sum(p.numel() for p in model.classifier.parameters())
    plan = examined(tmp_path, [Local()])
    assert plan["model"]["kept_by_clients"] > 0
    assert plan["bytes"]["up"] == 0
    assert any("stay with each client" in text for text in plan["warnings"])


def test_examples_batches_and_short_batches_are_counted(tmp_path):
    data = {"train_size": 100, "batch_size": 8, "num_clients": 4, "partitioner": Sizes(8, 17, 3, 72)}
    clients = examined(tmp_path, data=small_data(**data), local_epochs=2)["clients"]
    assert clients["examples"] == [3, 12.5, 72]
    assert clients["batches"] == [2, 4, 18]
    assert {kind: clients[kind] for kind in ("short", "single", "dropped", "without_batches")} == {
        "short": 1,
        "single": 1,
        "dropped": 0,
        "without_batches": 0,
    }
    plan = examined(tmp_path, data=small_data(**data, drop_last=True))
    assert (plan["clients"]["dropped"], plan["clients"]["without_batches"]) == (2, 1)
    assert any(missing(text, "1 of 4 clients (2)", "drop_last") is None for text in plan["warnings"])
    assert "1 train nothing" in as_text(plan)
    clients = examined(tmp_path, data=small_data(**data, drop_last="singletons"))["clients"]
    assert [clients[kind] for kind in ("short", "single", "dropped", "without_batches")] == [1, 0, 1, 0]


@pytest.mark.parametrize("rule", ["recalibrate", "recalibrate_once"])
def test_the_sums_of_recalibration_are_among_what_leaves_a_client(tmp_path, rule):
    how = {"model": plain_sgd_model(), "buffers": rule, "max_rounds": 1}
    plan = examined(tmp_path, **how)
    sums = [entry for entry in plan["leaves"] if entry["name"].startswith("recalibration/")]
    assert {(entry["dtype"], *entry["shape"]) for entry in sums} >= {("float64",), ("float64", 2, 16)}
    assert "recalibration" in as_text(plan)
    trainer = small_trainer(tmp_path, **{name: how[name] for name in ("buffers", "max_rounds")})
    trainer.fit(how["model"], small_data())
    assert plan["bytes"]["up"] == trainer.metrics["bytes/up"]


def test_it_leaves_nothing_behind_and_a_fit_after_it_has_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where clients lie that exceed client_memory

    def trained(first):
        model, data, methods = plain_sgd_model(), small_data(), [SCAFFOLD(), FedDecorr()]
        trainer = small_trainer(tmp_path / "runs", client_memory=0.0)
        if first:
            before, attributes = copy.deepcopy(model.state_dict()), set(vars(methods[0]))
            trainer.doctor(model, data, methods)
            assert_same_bits(model.state_dict(), before)
            assert set(vars(methods[0])) == attributes
            assert trainer.history == [] and trainer.run_dir is None
            assert not list(tmp_path.iterdir())
        trainer.fit(model, data, methods)
        return model.state_dict()

    assert_same_bits(trained(first=True), trained(first=False))


class Waits(Method):
    """Waits in each local step."""

    def __init__(self, seconds):
        self.seconds = seconds

    def penalty(self, client, step):
        time.sleep(self.seconds)


def test_time_is_that_of_a_measured_visit_times_the_number_of_visits(tmp_path):
    data = small_data(batch_size=4, partitioner=IID())
    plan = examined(tmp_path, [Waits(0.02)], data=data)
    assert plan["seconds"]["visit"] >= 25 * 0.02  # 100 examples, 4 in a batch
    assert plan["seconds"]["round"] >= 100 * 0.02
    assert plan["seconds"]["run"] == pytest.approx(3 * plan["seconds"]["round"])


def test_what_is_not_usual_is_named(tmp_path):
    plan = examined(tmp_path, systems=SystemsHeterogeneity(stragglers=0.5), local_epochs=3)
    assert plan["run"]["systems"]["stragglers"] == 0.5
    assert "stragglers=0.5, least=1, late=keep" in as_text(plan)
    assert "seconds" not in examined(tmp_path, max_rounds=0)
    small_trainer(tmp_path, max_rounds=1).fit(small_model(), small_data())
    plan = small_trainer(tmp_path, max_rounds=4).doctor(small_model(), small_data(), ckpt_path="last")
    assert plan["run"]["rounds_done"] == 1
    assert "4, 1 of them done" in as_text(plan)


def refusal(act):
    with pytest.raises((UsageError, ClientError)) as caught:
        act()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"trainer": {"cohort_size": 99}},
        {"trainer": {"taps": {"representation": "nowhere"}}, "method": [FedDecorr()]},
        {"method": [SCAFFOLD()]},
        {"ckpt_path": "nowhere.ckpt"},
    ],
)
def test_it_refuses_what_fit_refuses_with_the_same_line(tmp_path, bad):
    def act(command):
        trainer = small_trainer(tmp_path, **bad.get("trainer", {}))
        more = {key: bad[key] for key in ("method", "ckpt_path", "weights") if key in bad}
        getattr(trainer, command)(bad.get("model", small_model)(), small_data(), **more)

    assert refusal(lambda: act("doctor")) == refusal(lambda: act("fit"))
