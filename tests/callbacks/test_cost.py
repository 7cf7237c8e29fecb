"""What a run costs: operations are those of the layers, and each method is charged what it adds."""

import csv
import itertools

import torch
from helpers.runs import plain_sgd_model, small_data, small_model, small_trainer

from fl_lightning.callbacks import Callback, CostLedger
from fl_lightning.core.state import num_bytes
from fl_lightning.data import IID
from fl_lightning.methods import MOON, SCAFFOLD, Ditto, FedDecorr, FedProx
from fl_lightning.models import MLP, ImageClassifier


def fit(tmp_path, methods=(), model=None, **kwargs):
    others = kwargs.pop("callbacks", [])
    trainer = small_trainer(tmp_path, callbacks=[CostLedger(), *others], **kwargs)
    data = small_data(partitioner=IID(), train_size=4 * 64)
    trainer.fit(model or small_model(), data, list(methods))
    with (trainer.run_dir / "cost.csv").open() as file:
        return trainer, list(csv.DictReader(file))


def test_the_operations_of_a_perceptron_are_those_of_its_matrices(tmp_path):
    trainer, rows = fit(tmp_path, model=ImageClassifier(MLP(64, [32, 24])))
    widths = [64, 32, 24, 10]
    products = [2 * 32 * a * b for a, b in itertools.pairwise(widths)]
    # forward, gradient of the weights, and gradient of the inputs but for the first layer
    step = 3 * sum(products) - products[0]
    assert [int(row["steps"]) for row in rows] == [8, 8]
    assert [int(row["flops"]) for row in rows] == [8 * step, 8 * step]
    assert int(rows[-1]["flops_total"]) == 16 * step
    assert {int(row["flops_extra"]) for row in rows} == {0}
    assert trainer.metrics["cost/flops"] == 8 * step


def test_a_reference_model_costs_its_forward_passes(tmp_path):
    _, plain = fit(tmp_path)
    trainer, rows = fit(tmp_path, [MOON()], local_epochs=2, cache_references=False)
    # in its first round a client has no previous model to compare with
    assert [int(row["forwards_extra"]) for row in rows] == [0, 2 * 16]
    assert int(rows[0]["flops"]) == 2 * int(plain[0]["flops"])
    assert 0 < int(rows[1]["flops_extra"]) < int(plain[1]["flops"]) * 2
    _, cached = fit(tmp_path, [MOON()], local_epochs=2, cache_references=True)
    assert int(cached[1]["forwards_extra"]) == 2 * 8
    assert 2 * int(cached[1]["flops_extra"]) == int(rows[1]["flops_extra"])
    assert trainer.metrics["cost/client_state/moon"] == num_bytes(trainer.server.state)


def test_a_method_with_a_reference_model_costs_something_in_each_later_visit_of_a_client(tmp_path):
    """The others cost as much as without it."""
    seen = set()
    how = {"max_rounds": 6, "cohort_size": 2, "local_steps": 2}
    _, rows = fit(tmp_path, [MOON(), Ditto()], plain_sgd_model(), **how)
    _, alone = fit(tmp_path, [Ditto()], plain_sgd_model(), **how)
    passes = [int(row["forwards_extra"]) for row in rows]
    assert {0, 4, 8} == {*passes}
    for row, row_alone, number in zip(rows, alone, passes, strict=True):
        assert int(row["flops_extra/ditto"]) == int(row_alone["flops_extra/ditto"])
        of_pass = (int(row["flops_extra"]) - int(row_alone["flops_extra"])) / max(number, 1)
        assert float(row["flops_extra/moon"]) == of_pass * number
        seen |= {of_pass} if number else set()
    assert len(seen) == 1 and seen.pop() > 0


def test_each_method_is_charged_by_itself(tmp_path):
    trainer, rows = fit(tmp_path, [FedProx(), FedDecorr()])
    # corrections of gradients are no matrix products; FedDecorr's correlation matrix is one
    assert int(rows[0]["flops_extra/fedprox"]) == 0
    assert int(rows[0]["flops_extra/feddecorr"]) == int(rows[0]["flops_extra"]) > 0
    assert rows[0]["methods"] == "fedprox+feddecorr"
    assert int(rows[0]["bytes_up"]) == trainer.history[0]["bytes/up"]
    assert int(rows[1]["bytes_up_total"]) == sum(row["bytes/up"] for row in trainer.history)


def test_what_clients_keep_is_counted_by_method(tmp_path):
    trainer, rows = fit(tmp_path, [SCAFFOLD()], plain_sgd_model(), participation=0.5)
    memories = trainer.client.memories()
    sizes = {num_bytes(memories[k]["scaffold"]) for k in trainer.server.cohort}
    assert {int(rows[-1]["client_state/scaffold"])} == sizes
    assert rows[-1]["client_state"] == rows[-1]["client_state/scaffold"]
    assert 0 < float(rows[0]["seconds"]) < 60
    assert float(rows[0]["memory_peak"]) > 2**20


def test_a_rehearsed_step_leaves_nothing_behind(tmp_path):
    class Compares(Callback):
        def on_round_end(self, trainer):
            client = trainer.client
            names = ("info", "received", "num_steps", "lr", "lr_total", "methods")
            before, state = {name: getattr(client, name) for name in names}, client.state()
            memories, rng = {k: set(client.memories()[k]) for k in client.memories()}, torch.get_rng_state()
            trainer.rehearse(1)
            assert all(getattr(client, name) is value for name, value in before.items())
            assert all(torch.equal(value, state[name]) for name, value in client.state().items())
            assert {k: set(client.memories()[k]) for k in client.memories()} == memories
            assert torch.equal(torch.get_rng_state(), rng)

    fit(tmp_path, [MOON(), FedDecorr()], callbacks=[Compares()])
