"""Lightning's demos (2.6)."""

from typing import ClassVar

import pytest
import torch
from helpers.errors import refused
from helpers.published import Published, Sets
from helpers.runs import small_trainer
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.demos import lstm, transformer

from fl_lightning import Partitioned


class TestBoringModel(Published):
    taps: ClassVar = {"representation": "layer"}

    def module(self):
        return boring.BoringModel()

    def data(self):
        # the batches of one of BoringDataModule make it diverge under Lightning as well
        return Sets(boring.RandomDataset(32, 64), batch_size=16)


class TestDemoModel(Published):
    taps: ClassVar = {"representation": "l1"}

    def module(self):
        return boring.DemoModel(out_dim=6)

    def data(self):
        return Sets(boring.RandomDataset(32, 60))


def text(folder):
    """A tiny text in place of WikiText2, where the demos look for it."""
    words = list("abcdefgh")
    lines = [" ".join(words[(i * j) % len(words)] for j in range(12)) for i in range(20)]
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(lines))


class Text(Published):
    @pytest.fixture(autouse=True)
    def _text(self, tmp_path, monkeypatch):
        pytest.importorskip("requests")  # which the demos want even where the text is there
        monkeypatch.chdir(tmp_path)
        text(tmp_path)

    def data(self):
        sets = transformer.WikiText2(block_size=10, download=False)
        return Sets(sets, torch.utils.data.Subset(sets, range(4)), batch_size=4, drop_last=True)


class TestLightningTransformer(Text):
    taps: ClassVar = {"representation": "model.transformer"}

    def module(self):
        return transformer.LightningTransformer(vocab_size=9)


class TestLightningLSTM(Text):
    """It carries its hidden state from batch to batch in an attribute."""

    taps: ClassVar = {"representation": "model.drop"}
    options: ClassVar = {"gradient_clip_val": 0.02}

    def module(self):
        module = lstm.LightningLSTM(vocab_size=9)
        module.model = lstm.SimpleLSTM(vocab_size=9, ninp=16, nhid=16, nlayers=2)
        return module


def test_manual_optimization_is_refused(tmp_path):
    with refused("optimization"):
        small_trainer(tmp_path).fit(boring.ManualOptimBoringModel(), Partitioned(boring.BoringDataModule()))


def test_a_batch_sampler_is_refused(tmp_path):
    data = Sets(boring.RandomDataset(32, 60))
    data.train_dataloader = lambda: torch.utils.data.DataLoader(
        data.train, batch_sampler=lstm.SequenceSampler(data.train, batch_size=20)
    )
    with refused("SequenceSampler"):
        small_trainer(tmp_path).fit(boring.DemoModel(), Partitioned(data))


def test_iterable_data_is_refused(tmp_path):
    with refused("BoringDataModuleNoLen"):
        small_trainer(tmp_path).fit(boring.BoringModel(), Partitioned(boring.BoringDataModuleNoLen()))
