"""The losses of visits by local epoch: they are those of the visit, on any number of workers and after a resume."""

import csv

import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, small_data, small_model, small_trainer

from fl_lightning.callbacks import Callback, LocalLosses
from fl_lightning.callbacks.local_losses import arrays_of, picture_of
from fl_lightning.methods import FedCKA, FedUV
from fl_lightning.pictures.figure import figure_of, lines_of


def fit(folder, methods=(), ckpt_path=None, kind="mlp", callbacks=None, **kwargs):
    given = {"local_epochs": 3, "name": "run", "enable_progress_bar": False, "threads_per_worker": 1, **kwargs}
    trainer = small_trainer(folder, callbacks=[LocalLosses()] if callbacks is None else callbacks, **given)
    trainer.fit(small_model(kind), small_data(kind, train_size=200), list(methods), ckpt_path)
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


def test_workers_change_no_bit_of_the_file_and_the_callback_none_of_the_model(tmp_path):
    one, two = (fit(tmp_path, [FedUV()], name=f"w{n}", devices=n) for n in (1, 2))
    assert (one.run_dir / LocalLosses.file).read_bytes() == (two.run_dir / LocalLosses.file).read_bytes()
    without = fit(tmp_path, [FedUV()], name="without", callbacks=[])
    assert_same_bits(without.server.state, one.server.state)
    assert not (without.run_dir / LocalLosses.file).exists()


def test_a_resumed_run_has_the_file_of_one_that_was_not_interrupted(tmp_path):
    """FedCKA has no term in the first round: its columns come with the second, and the resume is before that."""
    whole = fit(tmp_path, [FedCKA()], kind="cnn", name="whole", max_rounds=3)
    rows = table(whole)
    assert {row["fedcka"] != "" for row in rows if row["round"] == "0"} == {False}
    assert all(float(row["fedcka/early.1"]) > 0 for row in rows if row["round"] == "2")
    first = fit(tmp_path, [FedCKA()], kind="cnn", max_rounds=1)
    with (first.run_dir / LocalLosses.file).open("a") as file:
        file.write("1,0,0,9.0\n")  # of a round after the checkpoint, which was lost
    again = fit(tmp_path, [FedCKA()], "last", kind="cnn", max_rounds=3)
    assert again.run_dir == first.run_dir
    assert (again.run_dir / LocalLosses.file).read_bytes() == (whole.run_dir / LocalLosses.file).read_bytes()
    state = torch.load(again.run_dir / "checkpoints/last.ckpt", weights_only=True)["callbacks"]["LocalLosses"]
    assert list(state) == ["stamp"] and len(state["stamp"]) == 2


def test_a_file_that_was_altered_begins_anew_with_a_warning(tmp_path, recwarn):
    first = fit(tmp_path, max_rounds=1)
    text = (first.run_dir / LocalLosses.file).read_text()
    (first.run_dir / LocalLosses.file).write_text(text.replace(",0.", ",1.", 1).replace(",2.", ",3.", 1))
    again = fit(tmp_path, ckpt_path="last", max_rounds=2)
    assert {row["round"] for row in table(again)} == {"1"}
    assert any("local_losses.csv was altered; it begins anew" in str(one.message) for one in recwarn)


def test_every_n_rounds_and_the_last_are_recorded(tmp_path):
    trainer = fit(tmp_path, max_rounds=6, local_epochs=1, callbacks=[LocalLosses(every_n_rounds=3)])
    assert list(dict.fromkeys(row["round"] for row in table(trainer))) == ["0", "3", "5"]
    names = sorted(path.name for path in (trainer.run_dir / "figures").iterdir())
    assert names == ["local_losses_loss.png"]
    with refused("LocalLosses.every_n_rounds=0", "1"):
        LocalLosses(0)


@pytest.mark.parametrize(("clients", "named"), [(3, True), (30, False)])
def test_a_figure_has_a_line_for_each_client_that_can_be_told_apart_without_colour(clients, named):
    rows = [{"round": 4, "client": k, "epoch": e, "loss": k + 1 / (1 + e)} for k in range(clients) for e in range(5)]
    figure = figure_of(picture_of("loss", rows), arrays_of("loss", rows))
    (axes,) = figure.axes
    assert len(axes.lines) == clients
    (panel,), arrays = picture_of("loss", rows).panels, arrays_of("loss", rows)
    styles = [next(lines_of(panel, number, shown, arrays)).style for number, shown in enumerate(panel.shown)]
    assert len({(str(style["linestyle"]), style["marker"]) for style in styles}) == clients
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "3", "4", "5"]
    assert bool(figure.legends) == named
