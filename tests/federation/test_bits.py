"""A run at sites has the bits of the same run in one process."""

import copy
import csv
import re

import pytest
from helpers.sites import ROUNDS, SITES, SMALL, Sockets, alone, app_of, assert_same_bits, numbers_of, serve, workers

RUNS = {
    "fedavg": {},
    "scaffold": {"method": ["SCAFFOLD"]},
    "fedproto": {"method": ["FedProto"]},
    "feddecorr_fedprox": {"method": ["FedDecorr", "FedProx"]},
    "fedbn": {"method": ["FedBN"]},
    "fednova": {"method": ["FedNova"]},
    "dpfedavg": {"method": [{"class_path": "DPFedAvg", "init_args": {"clip": 0.1, "noise": 0.0}}]},
    "plateau": {"model": {"class_path": "helpers.sites.Watching"}},
    "bfloat16": {"trainer": {"precision": "bf16-true"}},
    "cohorts": {"trainer": {"cohort_size": 2}},
}


def config_of(name):
    config = copy.deepcopy(SMALL)
    for key, value in RUNS[name].items():
        config[key] = (
            {**config[key], **value}
            if key in config
            else [one if isinstance(one, dict) else {"class_path": one} for one in value]
        )
    return config


@pytest.mark.parametrize("name", RUNS)
def test_a_run_at_sites_is_the_same_as_in_one_process(name, tmp_path):
    config = config_of(name)
    app = app_of(tmp_path, config)
    link = Sockets([tmp_path / f"{k}.sock" for k in range(SITES)])
    with workers(app, tmp_path):
        ours = serve(app, link)
    fitted = alone(tmp_path, config)
    assert name != "plateau" or ours.history[-1]["lr"] < ours.history[0]["lr"]
    assert_same_bits(ours.server.state, fitted.server.state)
    # what travels is what the sites have announced
    (announced,) = {
        re.search(r"in a round: ([\d,]+) bytes", (tmp_path / f"{k}.log").read_text())[1] for k in range(SITES)
    }
    sent = [sum(len(array.data) for array in update.arrays.values()) for update in link.updates]
    assert len(sent) == sum(row["clients"] for row in ours.history) and max(sent) == int(announced.replace(",", ""))
    assert fitted.history and numbers_of(ours.history) == numbers_of(fitted.history)


def test_the_end_of_a_run_has_a_row_for_each_site_and_workers_say_where_they_are(tmp_path, capsys):
    config = copy.deepcopy(SMALL)
    config["data"]["init_args"]["partitioner"] = {"class_path": "IID"}
    config["trainer"]["enable_progress_bar"] = True
    app = app_of(tmp_path, config)
    with workers(app, tmp_path):
        trainer = serve(app, Sockets([tmp_path / f"{k}.sock" for k in range(SITES)]))
    last = trainer.history[-1]
    with open(trainer.run_dir / "domains.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["domain"] for row in rows] == [f"site-{k}" for k in range(SITES)]
    shown = capsys.readouterr().err
    for row in rows:
        name, value = row["domain"], float(row["accuracy"])
        assert value == last[f"sites/{name}/test/accuracy"] == last[f"domain/{name}/accuracy"]
        examples = f"{row['training_examples']} +{row['test_examples']}"
        assert int(row["test_examples"]) and re.search(f"{name} +1 +{examples} +{value:.2%}".replace("%", " %"), shown)
    assert [int(row["training_examples"]) for row in rows] == [len(part) for part in trainer.data.plan.parts]
    said = (tmp_path / "0.log").read_text()
    where = f"site site-0 is ready, at {tmp_path / '0.sock'}"
    steps = ("site site-0: reading data", where, f"round 1/{ROUNDS}: trained", f"round {ROUNDS}/{ROUNDS}: evaluated")
    assert sorted(steps, key=said.index) == list(steps)
