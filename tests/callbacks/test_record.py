"""The panels of TensorBoard's page Custom Scalars."""

import re

from helpers.runs import small_data, small_model, small_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from fl_lightning.callbacks import Callback, SpectrumMonitor
from fl_lightning.methods import FedProx


class Watches(Callback):
    panels = {"Mine": {"one": "mine/one$"}, "Time": {"mine": "time/mine"}}  # noqa: RUF012


def charts_of(folder):
    """The tags of each chart that TensorBoard shows for a run, by panel and title."""
    events = EventAccumulator(str(folder)).Reload()
    (point,) = events.Tensors("custom_scalars__config__")
    read = layout_pb2.Layout.FromString(point.tensor_proto.string_val[0])
    tags = events.Tags()["scalars"]
    return {
        (panel.title, chart.title): sorted(
            {tag for pattern in chart.multiline.tag for tag in tags if re.match(pattern, tag)}
        )
        for panel in read.category
        for chart in panel.chart
    }


def test_a_chart_answers_one_question(tmp_path):
    trainer = small_trainer(tmp_path, logger=True, local_steps=1, callbacks=[SpectrumMonitor(), Watches()])
    trainer.fit(small_model(), small_data(train_size=100, val_fraction=0.2), FedProx(0.1))
    shown = charts_of(trainer.run_dir)
    assert {panel for panel, _ in shown} == {"Accuracy", "Loss", "Ranks", "Spectra", "Drift", "Time", "Bytes", "Mine"}
    several = {chart: tags for chart, tags in shown.items() if len(tags) != 1}
    assert several.keys() == {
        ("Time", "seconds of its phases"),
        ("Mine", "one"),  # the callback has not logged it
        ("Time", "mine"),
    }
    assert shown["Accuracy", "test accuracy"] == ["test/accuracy"]
    assert shown["Accuracy", "training accuracy"] == ["train/accuracy"]
    assert shown["Accuracy", "validation accuracy"] == ["val/accuracy"]
    assert shown["Time", "seconds of a round"] == ["time/round"]
    assert shown["Loss", "penalties"] == ["train/fedprox"]
    assert shown["Spectra", "log10 of the smallest singular value of the representation"] == [
        "spectrum/log10/representation/smallest"
    ]
    assert next(panel for panel, _ in shown) == "Accuracy"
