"""A run at sites has the bits of the same run in one process."""

import copy
import csv
import re

import pytest
from helpers.errors import refused
from helpers.runs import assert_same_bits
from helpers.sites import SITES, SMALL, alone, message_of, numbers_of, run_here
from helpers.tiers import sample

from fl_lightning.core.state import num_bytes
from fl_lightning.federation.serialization import decoded

RUNS = {
    "fedavg": {},
    "scaffold, feddecorr and fedprox, with a schedule": {
        "method": ["SCAFFOLD", "FedDecorr", "FedProx"],
        "model": {"class_path": "helpers.sites.Watching"},
    },
    "fedproto": {"method": ["FedProto"]},
    "fedbn": {"method": ["FedBN"]},
    "fedexp with fedntd and logit adjustment": {"method": ["FedExP", "FedNTD", "LogitAdjustment"]},
    "fedetf": {
        "method": ["LogitAdjustment"],
        "model": {"init_args": {**SMALL["model"]["init_args"], "classifier": {"class_path": "ETFClassifier"}}},
    },
    "fednova": {"method": ["FedNova"]},
    "fedrod": {"method": ["FedRoD"]},
    "ditto": {"method": ["Ditto"]},
    "pfedme": {"method": ["PFedMe"]},
    "dpfedavg": {"method": [{"class_path": "DPFedAvg", "init_args": {"clip": 0.1, "noise": 0.0}}]},
    "trimmed mean": {"method": [{"class_path": "TrimmedMean", "init_args": {"f": 1}}, "FedProx"]},
    "a state for each site": {"method": [{"class_path": "helpers.sites.Beginning"}, "FedProx", "SCAFFOLD"]},
    "a state that each site chooses": {
        "method": [{"class_path": "helpers.sites.Beginning", "init_args": {"chooses": True}}, "FedProx"]
    },
    "ifca": {"method": [{"class_path": "IFCA", "init_args": {"init_std": 0.5}}]},
    "fedamp": {"method": ["FedAMP"]},
    "moon on a frozen base": {"method": ["MOON"], "model": {"class_path": "helpers.sites.Based"}},
    "bfloat16": {"trainer": {"precision": "bf16-true"}},
    "cohorts": {"trainer": {"cohort_size": 2}},
}
pytestmark = pytest.mark.usefixtures("one_parser", "undrawn")
DEFAULT = (
    "a state for each site",
    "ifca",
    "trimmed mean",
    "scaffold, feddecorr and fedprox, with a schedule",
    "fedbn",
    "moon on a frozen base",
    "cohorts",
)


def config_of(name):
    config = copy.deepcopy(SMALL)
    for key, value in RUNS[name].items():
        config[key] = {**config[key], **value} if key in config else value
    return config


@pytest.mark.parametrize("name", sample([*RUNS], *DEFAULT))
def test_a_run_at_sites_is_the_same_as_in_one_process(name, tmp_path):
    config = config_of(name)
    ours, link = run_here(tmp_path, config)
    (announced,) = {sum(entry.num_bytes for entry in site.declared) for site in link.sites.values()}
    fitted = alone(tmp_path, config)
    assert "schedule" not in name or ours.history[-1]["lr"] < ours.history[0]["lr"]
    assert_same_bits(ours.server.state, fitted.server.state)
    # sites send exactly the announced entries
    sent = [num_bytes(decoded(answer)["update"]) for answer in link.updates]
    assert len(sent) == sum(row["clients"] for row in ours.history) and max(sent) == announced
    assert fitted.history and numbers_of(ours.history) == numbers_of(fitted.history)


def test_sites_are_sent_the_server_values_that_travel_alone(tmp_path):
    config = {**copy.deepcopy(SMALL), "method": ["SCAFFOLD", {"class_path": "FedDyn", "init_args": {"alpha": 0.1}}]}
    ours, link = run_here(tmp_path, config)
    values = message_of(link.sent[-1][1])["shared"]["methods"]
    assert {name: {*state} for name, state in values.items()} == {"scaffold": {"global_variate"}, "feddyn": {"initial"}}
    fitted = alone(tmp_path, config)
    assert_same_bits(ours.server.state, fitted.server.state)
    assert numbers_of(ours.history) == numbers_of(fitted.history)


def test_entries_that_all_sites_receive_otherwise_are_in_their_own_messages_alone(tmp_path):
    ours, link = run_here(tmp_path, config_of("a state for each site"))
    messages = [message_of(packet) for _, packet in link.sent]
    visits = [message for message in messages if message["shared"]["kind"] == "train"]
    for message in visits:
        own = {*message["own"]["state"]}
        assert own == {"classifier.weight", "classifier.bias"} and own.isdisjoint(message["shared"]["state"])
        assert own | {*message["shared"]["state"]} == {*ours.server.state}
    assert len(visits) == SITES * len(ours.history)


def test_a_value_that_stays_on_the_server_cannot_be_read_at_the_start_of_a_round(tmp_path):
    config = {**copy.deepcopy(SMALL), "method": [{"class_path": "helpers.sites.Counting"}]}
    with refused("site-0", "method=Counting", "rounds", "travels=True"):
        run_here(tmp_path, config)


def test_frozen_parameters_that_sites_change_travel(tmp_path):
    config = config_of("moon on a frozen base")
    config["model"]["class_path"] = "helpers.sites.Moving"
    ours, link = run_here(tmp_path, config)
    assert_same_bits(ours.server.state, alone(tmp_path, config).server.state)
    sizes = [num_bytes(decoded(answer)["update"]) for answer in link.updates]
    assert {*sizes[SITES:]} == {sizes[0] + 4 * 16}


def test_frozen_parameters_that_the_server_assigns_travel_once(tmp_path):
    config = config_of("moon on a frozen base")
    config["method"].append({"class_path": "helpers.sites.Assigning"})
    ours, link = run_here(tmp_path, config)
    fitted = alone(tmp_path, config)
    assert_same_bits(ours.server.state, fitted.server.state)
    assert numbers_of(ours.history) == numbers_of(fitted.history)
    rest = [num_bytes(message_of(packet)["own"].get("rest", {})) for _, packet in link.sent]
    assert {*rest} == {0, 4 * 16}
    assert sum(rest) == SITES * 4 * 16


GLOBAL_PRIOR = {"class_path": "LogitAdjustment", "init_args": {"prior": "global"}}
ASYNCHRONOUS = {"class_path": "Buffered", "init_args": {"concurrency": 2}}


@pytest.mark.filterwarnings("ignore:round 0. FedDisco")  # each site tries it without the label counts of the others
@pytest.mark.parametrize(
    ("methods", "options", "named"),
    [
        (["FedDisco"], {}, "FedDisco"),
        ([GLOBAL_PRIOR], {}, "LogitAdjustment"),
        (["SignFlip"], {}, "method='SignFlip'"),
        ([], {"clock": {"class_path": "Clock"}, "asynchronous": ASYNCHRONOUS}, "trainer.clock"),
        ([], {"min_clients": 0}, "trainer.min_clients=0"),
    ],
)
def test_what_sites_cannot_know_or_should_not_do_is_refused(tmp_path, methods, options, named):
    config = copy.deepcopy(SMALL)
    config["trainer"] |= options
    with refused(named):
        run_here(tmp_path, {**config, "method": methods})


def test_the_servers_evaluation_data_keep_their_transfer_hooks(tmp_path):
    config = {**copy.deepcopy(SMALL), "trainer": {**SMALL["trainer"], "max_rounds": 1}}
    evaluation = {"class_path": "helpers.sites.Blank", "init_args": {"test_size": 100}}
    blank, _ = run_here(tmp_path, config, evaluation=evaluation)
    assert blank.history[-1]["test/accuracy"] in (0, 1)


def test_the_end_of_a_run_has_a_row_for_each_site(tmp_path, capsys):
    config = copy.deepcopy(SMALL)
    config["data"]["init_args"]["partitioner"] = {"class_path": "IID"}
    config["trainer"]["enable_progress_bar"] = True
    trainer, _ = run_here(tmp_path, config)
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
