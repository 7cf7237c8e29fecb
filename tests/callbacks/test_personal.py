"""Personal accuracy: a client's own test data, domains, fine-tuning and prototypes."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.domains import TwoDomains
from helpers.errors import assert_names, refused, warned
from helpers.runs import measured, plain_sgd_model, small_data, small_trainer, watched

from fl_lightning.callbacks import Callback, CostLedger, PersonalAccuracy, Scores
from fl_lightning.callbacks.personalized_accuracy import nearest, spread_over_clients
from fl_lightning.data import IID, ByDomain, Dirichlet
from fl_lightning.methods import IFCA, FedAMP, FedBN, FedProto
from fl_lightning.models import MLP, ImageClassifier

pytestmark = pytest.mark.usefixtures("undrawn")
fit = partial(measured, "personal.npz", max_rounds=2, local_epochs=3)


class Plainly(Callback):
    """Evaluates each client by the trainer's own questions."""

    def on_last_round_end(self, trainer):
        number = range(trainer.data.num_clients)
        self.own = [trainer.evaluate("test", client=k)["test/accuracy"] for k in number]
        tuned = [trainer.fine_tune(k, None, 5) for k in number]
        self.tuned = [
            trainer.evaluate("test", one, client=k)["test/accuracy"] for k, one in zip(number, tuned, strict=True)
        ]


def domains(**kwargs):
    return TwoDomains(**{"num_clients": 4, "batch_size": 32, "train_size": 400, "partitioner": ByDomain(), **kwargs})


@pytest.mark.parametrize("methods", [list, lambda: [FedBN()]])
def test_it_is_what_evaluating_and_fine_tuning_give_and_fine_tuning_helps_under_skew(tmp_path, methods):
    plainly = Plainly()
    data = small_data(partitioner=Dirichlet(0.1))
    given = PersonalAccuracy(examples=None, fine_tune_steps=5)
    trainer, file = fit(tmp_path, given, plainly, data=data, methods=methods(), model=plain_sgd_model())
    np.testing.assert_allclose(file["own"][-1], plainly.own, atol=1e-6)
    np.testing.assert_allclose(file["tuned"][-1], plainly.tuned, atol=1e-6)
    assert np.isnan(file["tuned"][0]).all()
    assert trainer.metrics["personal/accuracy"] == pytest.approx(np.mean(plainly.own))
    assert trainer.metrics["personal/worst_tenth"] == pytest.approx(min(plainly.own))
    assert trainer.metrics["personal/spread"] == pytest.approx(np.std(plainly.own))
    own = [trainer.metrics[f"personal/client/{k}"] for k in range(4)]
    np.testing.assert_allclose(own, plainly.own, atol=1e-6)
    noise = [a * (1 - a) / t for a, t in zip(own, file["examples"][-1], strict=True)]
    assert trainer.metrics["fair/noise"] == pytest.approx(np.mean(noise))
    assert [len(data.test_dataloader(k).rows) for k in range(4)] == file["examples"][-1].tolist()
    assert trainer.metrics["personal/tuned/accuracy"] > trainer.metrics["personal/accuracy"]
    assert "personal/tuned/accuracy" not in trainer.history[0]
    evaluated = "own model" if methods() else "global model"
    assert_names(given.summary_of_fit().splitlines()[0], "client", evaluated, "fine-tuned")


def test_a_run_of_many_clients_has_no_metric_of_each(tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.callbacks.personalized_accuracy.MOST_TAGS", 3)
    trainer, file = fit(tmp_path, PersonalAccuracy(fine_tune_steps=0), max_rounds=1)
    assert file["own"].shape == (1, 4)
    assert not [tag for tag in trainer.metrics if "client/" in tag]


@pytest.mark.parametrize("methods", [list, lambda: [FedBN()]])
def test_domains_are_measured_by_the_global_model_or_by_the_models_of_their_clients(tmp_path, methods):
    data = domains()
    given = PersonalAccuracy(examples=None, fine_tune_steps=0)
    trainer, file = fit(tmp_path, given, data=data, methods=methods(), model=plain_sgd_model())
    assert file["domains"][-1].tolist() == ["bright", "dark"]
    of = np.array([data.info(k).domain for k in range(4)])
    assert set(of) == {"bright", "dark"}
    # a client's test data are those of its domain
    for name, value in zip(file["domains"][-1], file["domain"][-1], strict=True):
        assert value == pytest.approx(file["own"][-1][of == name].mean())
        assert trainer.metrics[f"personal/domain/{name}"] == value
    assert "tuned" not in file
    assert (len(set(file["own"][-1])) > 2) == bool(methods())


def test_an_early_end_is_fine_tuned_too(tmp_path):
    class Ends(Callback):
        def on_round_end(self, trainer):
            trainer.should_stop = True

    _, file = fit(tmp_path, PersonalAccuracy(fine_tune_steps=1), Ends(), max_rounds=5, local_epochs=1)
    assert file["rounds"].tolist() == [0, 0]
    assert np.isfinite(file["tuned"][-1]).all()


class Fails(ImageClassifier):
    """Cannot train on the batch of 21 examples that client 0 has."""

    def training_step(self, batch, batch_idx):
        if len(batch[1]) == 21:
            raise ArithmeticError("no")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("observer", [PersonalAccuracy(), Scores(local_steps=1), CostLedger()])
def test_a_run_that_skips_clients_that_fail_measures_the_others(tmp_path, observer):
    data = partial(small_data, train_size=81, batch_size=64, partitioner=IID())
    with warned("client 0", "ArithmeticError"):
        trainer = watched(tmp_path, observer, model=Fails(MLP(64, [16])), data=data, on_client_error="skip")
    values = {"PersonalAccuracy": "personal/tuned/accuracy", "Scores": "scores/local_steps", "CostLedger": "cost/steps"}
    assert np.isfinite(trainer.metrics[values[type(observer).__name__]])
    assert "personal/client/0" not in trainer.metrics


@pytest.mark.parametrize("method", [IFCA(2, 0.05), FedAMP(heuristic=True, own=1.0), FedProto()])
def test_the_command_test_measures_what_the_run_did(tmp_path, method):
    observer = PersonalAccuracy(fine_tune_steps=0)
    trainer, _ = fit(tmp_path, observer, methods=[method], model=plain_sgd_model, local_epochs=5)
    later = small_trainer(tmp_path, callbacks=[observer])
    metrics = later.test(plain_sgd_model(), trainer.data, trainer.run_dir / "checkpoints/last.ckpt", [method])
    expected = {tag: value for tag, value in trainer.metrics.items() if tag.startswith(("personal/", "fair/"))}
    assert {tag: metrics.get(tag) for tag in expected} == expected


def test_prototypes_classify_by_the_nearest_of_the_clients_own_classes(tmp_path):
    trainer, file = fit(tmp_path, PersonalAccuracy(fine_tune_steps=0), methods=[FedProto()], local_epochs=10)
    # in a run without a global model a client's own model and the shared prototypes are far better than chance
    assert (file["prototype"][-1] > 0.4).all()
    assert trainer.metrics["personal/prototype/accuracy"] == pytest.approx(file["prototype"][-1].mean())
    prototypes = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    z = torch.tensor([[0.9, 0.0], [0.1, 0.2], [0.0, 2.0]])
    assert nearest(z, prototypes, torch.tensor([True, True, True])).tolist() == [1, 0, 2]
    assert nearest(z, prototypes, torch.tensor([True, False, False])).tolist() == [0, 0, 0]


def test_the_worst_tenth_is_of_one_client_at_least():
    found = spread_over_clients(np.array([0.5, np.nan, 0.1, 0.3]))
    spread = pytest.approx(np.std([5, 1, 3]) / 10)
    assert found == {"accuracy": pytest.approx(0.3), "worst_tenth": 0.1, "spread": spread}
    assert spread_over_clients(np.arange(20) / 100)["worst_tenth"] == pytest.approx(0.005)


def test_a_client_without_test_examples_is_refused(tmp_path):
    data = small_data()
    whole = data.test_dataloader

    def partly(k=None):
        loader = whole(k)
        if k == 2:
            loader.rows = loader.rows[:0]
        return loader

    data.test_dataloader = partly
    with refused("PersonalAccuracy", "client=2", "data.test_size"):
        fit(tmp_path, PersonalAccuracy(), data=data)
