"""The losses of visits by local epoch are those of the visit."""

import csv

import pytest
from helpers.runs import small_data, small_model, small_trainer

from fl_lightning.callbacks import Callback, LocalLosses
from fl_lightning.methods import FedUV


def fit(folder, methods=(), callbacks=(), **kwargs):
    how = {"local_epochs": 3, "enable_progress_bar": False, **kwargs}
    trainer = small_trainer(folder, callbacks=callbacks or [LocalLosses()], **how)
    trainer.fit(small_model(), small_data(train_size=200), list(methods))
    return trainer


def table(trainer):
    with (trainer.run_dir / LocalLosses.file).open(newline="") as file:
        return list(csv.DictReader(file))


class Watch(Callback):
    """Keeps each visit's metrics, and the client's number of examples."""

    def __init__(self):
        self.seen = {}

    def on_client_end(self, trainer, client):
        self.seen[trainer.server.round, client.info.id] = dict(client.metrics)


@pytest.mark.usefixtures("undrawn")
def test_the_mean_over_the_epochs_is_what_the_visit_logs(tmp_path):
    """The epochs of a visit have the same examples, so that the mean over the visit is that over its epochs."""
    watch = Watch()
    rows = table(fit(tmp_path, [FedUV()], callbacks=[watch, LocalLosses()]))
    assert [(row["round"], row["client"], row["epoch"]) for row in rows] == [
        (str(r), str(k), str(e)) for r in range(2) for k in range(4) for e in range(3)
    ]
    terms = ["loss", "feduv", "feduv/uniformity", "feduv/variance"]
    assert set(rows[0]) == {"round", "client", "epoch", *terms}
    for (round_, k), metrics in watch.seen.items():
        own = [row for row in rows if (int(row["round"]), int(row["client"])) == (round_, k)]
        for term in terms:
            mean = sum(float(row[term]) for row in own) / 3
            assert mean == pytest.approx(metrics[f"train/{term}"], rel=1e-5), term
        for row in own:
            parts = float(row["feduv/uniformity"]) + float(row["feduv/variance"])
            assert parts == pytest.approx(float(row["feduv"]), rel=1e-6)
    first, last = (sum(float(row["loss"]) for row in rows if row["epoch"] == e) for e in ("0", "2"))
    assert last < first


@pytest.mark.usefixtures("undrawn")
def test_every_n_rounds_and_the_last_are_recorded(tmp_path):
    trainer = fit(tmp_path, max_rounds=6, local_epochs=1, callbacks=[LocalLosses(every_n_rounds=3)])
    assert list(dict.fromkeys(row["round"] for row in table(trainer))) == ["0", "3", "5"]
