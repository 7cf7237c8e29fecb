"""pytorch-forecasting's TemporalFusionTransformer (1.8), on windows of a few short series."""

from typing import ClassVar

import numpy as np
import pytest
from helpers.published import Published
from lightning.pytorch import LightningDataModule

forecasting = pytest.importorskip("pytorch_forecasting")
pandas = pytest.importorskip("pandas")


def series():
    """Windows of six sines of different phases."""
    steps = np.arange(20)
    rows = [
        {"time": t, "group": str(g), "value": float(np.sin(t / 3 + g) + 2), "month": str(t % 4)}
        for g in range(6)
        for t in steps
    ]
    return forecasting.TimeSeriesDataSet(
        pandas.DataFrame(rows),
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=6,
        max_prediction_length=3,
        static_categoricals=["group"],
        time_varying_known_categoricals=["month"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )


class Windows(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.windows = series()

    def train_dataloader(self):
        return self.windows.to_dataloader(train=True, batch_size=8)

    def val_dataloader(self):
        return self.windows.to_dataloader(train=False, batch_size=16)


class TestTemporalFusionTransformer(Published):
    taps: ClassVar = {"representation": "pre_output_gate_norm"}
    logged = ("train_loss_epoch", "val_loss", "val_SMAPE")

    def module(self):
        return forecasting.TemporalFusionTransformer.from_dataset(
            series(),
            learning_rate=0.02,
            hidden_size=8,
            attention_head_size=2,
            dropout=0.0,
            hidden_continuous_size=4,
            loss=forecasting.QuantileLoss(),
            reduce_on_plateau_patience=1,
        )

    def data(self):
        return Windows()
