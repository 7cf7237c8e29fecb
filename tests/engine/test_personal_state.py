"""A method may give each client its own model, which callbacks and the command ``test`` evaluate."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import differs, fitted, history, plain_sgd_model, small_data, small_trainer, train

from fl_lightning import Method
from fl_lightning.callbacks import Callback, PersonalAccuracy, Scores
from fl_lightning.data import Dirichlet
from fl_lightning.methods import FedBN
from fl_lightning.models import ImageClassifier

pytestmark = pytest.mark.usefixtures("undrawn")
skewed = partial(small_data, partitioner=Dirichlet(0.1))
# one visit of each client but the last
fit = partial(fitted, model=plain_sgd_model, data=skewed, max_rounds=2, cohort_size=2, local_epochs=3)


class LastModel(Method):
    """A client's model is the one that its local steps have ended with; the run itself is FedAvg."""

    evaluation_point = "trained"

    def on_client_end(self, client):
        client.memory(self)["state"] = client.state(own=True)

    def personal_state(self, client):
        return client.memory(self).get("state")


class Received(LastModel):
    """A client's model is the global one, as without this method."""

    evaluation_point = "received"

    def personal_state(self, client):
        assert client.memory(self).keys() <= {"state"}
        return client.received if client.info.id % 2 else None


class Sees(Callback):
    """Keeps the clients' local models."""

    def __init__(self):
        self.models, self.own, self.all, self.tuned = {}, {}, {}, {}

    def on_client_end(self, trainer, client):
        self.models[client.info.id] = client.state()

    def on_last_round_end(self, trainer):
        for k, state in self.models.items():
            assert not differs(state, trainer.personal_state(k))
            self.own[k] = trainer.evaluate("test", state, client=k)["test/accuracy"]
            assert trainer.evaluate("test", client=k)["test/accuracy"] == self.own[k]
            self.all[k] = trainer.evaluate("test", state)["test/accuracy"]
            one, other = (trainer.fine_tune(k, begins, 2) for begins in (None, state))
            assert not differs(one, other)


def test_personal_accuracy_is_that_of_the_clients_own_models_and_names_the_point(tmp_path):
    sees, personal = Sees(), PersonalAccuracy(examples=None, fine_tune_steps=0)
    trainer = fit(tmp_path, [LastModel()], callbacks=[personal, sees])
    found = dict(zip(personal.series["clients"][-1].tolist(), personal.series["own"][-1].tolist(), strict=True))
    assert {k: found[k] for k in sees.own} == pytest.approx(sees.own, abs=1e-6)
    assert 1 < len(sees.own) < 5
    assert "personal/accuracy" not in trainer.metrics
    assert trainer.metrics["personal/trained/accuracy"] == pytest.approx(np.mean([*found.values()]))


@pytest.mark.parametrize("reason", ["", "one test set"])
def test_scores_of_clients_are_of_their_own_models_and_pooled_ones_of_the_global_model(tmp_path, reason):
    scores = {}
    for method in (LastModel(), Received()):
        data = skewed()
        if reason:  # weights of the classes replace the clients' own test data
            data.missing_test_data_reason = lambda: reason
        trainer = fit(tmp_path, [method], data=data, callbacks=[Scores()])
        scores |= {method.evaluation_point: trainer.metrics}
    last, received = scores["trained"], scores["received"]
    assert last["scores/pooled"] == received["scores/pooled"]
    assert last["scores/trained/clients"] > received["scores/clients"]
    assert {"scores/clients", "scores/worst_tenth"}.isdisjoint(last)


def test_a_received_personal_state_changes_nothing(tmp_path):
    how = {"callbacks": [PersonalAccuracy(fine_tune_steps=1)], "data": skewed()}
    plain, of_plain = train(tmp_path, [], **how)
    state, trainer = train(tmp_path, [Received()], **{**how, "callbacks": [PersonalAccuracy(fine_tune_steps=1)]})
    assert not differs(plain, state)
    assert history(trainer) == history(of_plain)
    assert "personal/accuracy" in trainer.metrics


@pytest.mark.parametrize(
    ("clients_per_step", "passes"), [(1, 1 + 3), pytest.param(4, 1 + 1, marks=pytest.mark.vectorized)]
)
def test_the_command_test_reports_the_global_model_and_the_mean_of_the_clients_models(
    tmp_path, monkeypatch, clients_per_step, passes
):
    sees, calls, step = Sees(), [], ImageClassifier.test_step
    trainer = fit(tmp_path, [LastModel()], callbacks=[sees])
    assert len(sees.all) == 3
    path = trainer.run_dir / "checkpoints" / "last.ckpt"
    again = small_trainer(tmp_path, clients_per_step=clients_per_step)
    monkeypatch.setattr(ImageClassifier, "test_step", lambda *given: (calls.append(given[2]), step(*given))[1])
    metrics = again.test(plain_sgd_model(), skewed(), path, method=[LastModel()])
    assert len(calls) == passes * len({*calls})
    assert metrics["test/accuracy"] == pytest.approx(trainer.metrics["test/accuracy"], abs=1e-6)
    assert metrics["personal/trained/test/accuracy"] == pytest.approx(np.mean([*sees.all.values()]), abs=1e-6)


class Beside(LastModel):
    name = "beside"


class Wrong(Method):
    def __init__(self, state):
        self.state = state

    def personal_state(self, client):
        return self.state


def test_only_one_method_gives_the_clients_models_of_their_own(tmp_path):
    with refused("method", "LastModel", "Beside"):
        train(tmp_path, [LastModel(), FedBN(), Beside()], model=plain_sgd_model())


@pytest.mark.parametrize("state", [1, {"nothing": torch.zeros(())}, {"classifier.bias": torch.zeros(2)}])
def test_a_result_that_is_no_part_of_the_state_is_refused(tmp_path, state):
    with refused("Wrong", "personal_state"):
        fit(tmp_path, [Wrong(state)], callbacks=[PersonalAccuracy(fine_tune_steps=0)])
