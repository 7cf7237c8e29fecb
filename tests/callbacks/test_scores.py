"""One model in many scores: what they have in common, and what sets them apart."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.runs import small_data, small_model, small_trainer, watched
from torch.optim import SGD

from fl_lightning.bench.shows import SCORES
from fl_lightning.callbacks import Callback, Scores
from fl_lightning.callbacks.scores import with_prior
from fl_lightning.data import Dirichlet
from fl_lightning.methods import MOON, FedDyn, FedLC, FedProx, FedRS
from fl_lightning.models import MLP, ImageClassifier

skewed = partial(small_data, partitioner=Dirichlet(0.1))
fit = partial(watched, data=skewed, enable_progress_bar=False)


def of(trainer):
    return {tag.removeprefix("scores/"): value for tag, value in trainer.metrics.items() if tag.startswith("scores/")}


@pytest.mark.parametrize("methods", [list, lambda: [FedProx(0.1), MOON(1.0)]])
def test_a_method_that_leaves_the_logits_scores_the_same_by_those_of_training(tmp_path, methods):
    scores = of(fit(tmp_path, Scores(), methods=methods()))
    assert scores["training_logits"] == scores["clients"]


@pytest.mark.parametrize("method", [FedLC(1.0), FedRS(0.5, use_bias=False)])
def test_the_logits_of_training_are_those_of_the_method_with_the_clients_counts(tmp_path, method):
    class Plainly(Callback):
        def on_last_round_end(self, trainer):
            self.means = []
            for k in range(trainer.data.num_clients):
                parts = [(taps["logits"], y) for _, _, y, taps in trainer.representations(None, ("logits",), client=k)]
                z, y = (torch.cat(list(part)) for part in zip(*parts, strict=True))
                bias = trainer.server.state["classifier.bias"]
                counts = trainer.data.info(k).label_counts
                changed = expected(method, z, counts, bias)
                self.means.append(float((changed.argmax(1) == y).double().mean()))

    def expected(method, z, counts, bias):
        if isinstance(method, FedLC):
            return z - counts.clamp_min(1e-8) ** -0.25
        z = z if method.use_bias else z - bias
        return torch.where(counts > 0, z, method.alpha * z)

    plainly = Plainly()
    trainer = fit(tmp_path, Scores(), plainly, methods=[method], local_epochs=3)
    assert of(trainer)["training_logits"] == pytest.approx(np.mean(plainly.means), abs=1e-12)
    assert of(trainer)["training_logits"] != of(trainer)["clients"]


def test_a_prior_like_that_of_all_changes_nothing_and_one_of_a_single_class_is_a_mask():
    torch.manual_seed(0)
    logits, of_all = torch.randn(30, 4), torch.tensor([6, 2, 4, 8])
    torch.testing.assert_close(with_prior(logits, of_all // 2, of_all), logits.double())
    single = torch.tensor([0, 5, 0, 0])
    assert (with_prior(logits, single, of_all).argmax(1) == 1).all()
    # Bayes' rule: the posterior of all, reweighted by the ratio of the priors, and normalised
    counts = torch.tensor([1, 3, 0, 4])
    ratio = (counts / counts.sum()) / (of_all / of_all.sum())
    posterior = logits.double().softmax(1) * ratio
    ours = with_prior(logits, counts, of_all).softmax(1)
    torch.testing.assert_close(ours, posterior / posterior.sum(1, keepdim=True))


def test_each_score_is_that_of_its_definition(tmp_path):
    class Plainly(Callback):
        requires = ("logits",)

        def on_last_round_end(self, trainer):
            self.own = [trainer.evaluate("test", client=k)["test/accuracy"] for k in range(4)]
            hits = [(taps["logits"].argmax(1), y) for _, _, y, taps in trainer.representations(None, ("logits",))]
            predicted, y = (torch.cat(part) for part in zip(*hits, strict=True))
            self.by_class = [float((predicted[y == c] == c).double().mean()) for c in y.unique()]

    plainly = Plainly()
    trainer = fit(tmp_path, Scores(local_steps=10), plainly, local_epochs=2)
    scores = of(trainer)
    assert scores.keys() == set(SCORES)
    assert scores["pooled"] == trainer.metrics["test/accuracy"] == scores["best"]
    assert scores["class_balanced"] == pytest.approx(np.mean(plainly.by_class))
    assert scores["clients"] == pytest.approx(np.mean(plainly.own), abs=1e-6)
    assert scores["worst_tenth"] == pytest.approx(min(plainly.own), abs=1e-6)
    assert scores["label_mask"] >= scores["clients"]
    assert scores["local_steps"] > scores["clients"]
    assert scores["mean_of_last"] == pytest.approx(np.mean([row["test/accuracy"] for row in trainer.history]))


def test_recalibrated_is_the_score_of_the_recomputed_statistics(tmp_path):
    trainer = fit(tmp_path / "a", Scores(), max_rounds=1)
    exact = fit(tmp_path / "b", Scores(), max_rounds=1, buffers="recalibrate")
    assert of(trainer)["recalibrated"] == of(exact)["pooled"] == of(exact)["recalibrated"]
    without = fit(tmp_path / "c", Scores(), model=ImageClassifier(MLP(64, [8]), optimizer=partial(SGD, lr=0.1)))
    assert "recalibrated" not in of(without)


def test_scores_are_those_of_every_n_rounds_and_the_last(tmp_path):
    history = fit(tmp_path, Scores(every_n_rounds=2), max_rounds=3).history
    assert [("scores/pooled" in row) for row in history] == [True, False, True]
    assert [("scores/best" in row) for row in history] == [False, False, True]


def test_without_test_data_of_clients_those_of_all_are_weighted(tmp_path):
    data = skewed()
    data.test_dataloader = lambda: type(data).test_dataloader(data)
    trainer = fit(tmp_path, Scores(local_steps=1), data=data)
    accuracy, counts = {}, [data.info(k).label_counts for k in range(4)]
    batches = trainer.representations(None, ("logits",))
    parts = [(z["logits"].argmax(1), y) for _, _, y, z in batches]
    predicted, y = (torch.cat(part) for part in zip(*parts, strict=True))
    accuracy = torch.stack([(predicted[y == c] == c).double().mean() for c in range(10)])
    expected = np.mean([float((n / n.sum()).double() @ accuracy) for n in counts])
    assert of(trainer)["clients"] == pytest.approx(expected)


@pytest.mark.parametrize("method", [FedLC(1.0), FedDyn(0.1)])
def test_a_finished_run_has_the_scores_that_it_would_have_logged(tmp_path, method):
    scored = of(fit(tmp_path, Scores(), methods=[method]))
    later = small_trainer(tmp_path, callbacks=[Scores()])
    metrics = later.test(small_model(), skewed(), ckpt_path="last", method=[method])
    over_rounds = ("best", "mean_of_last")
    expected = {f"scores/{name}": value for name, value in scored.items() if name not in over_rounds}
    assert {tag: value for tag, value in metrics.items() if tag.startswith("scores/")} == expected
    assert metrics["test/accuracy"] == scored["pooled"]
