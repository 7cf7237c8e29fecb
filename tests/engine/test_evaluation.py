"""Evaluation has the hooks, names and values of Lightning's own loop, and the same bits on any number of workers."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers.errors import refused
from helpers.tiny import variant
from helpers.workers import together
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision
from torchmetrics.utilities import dim_zero_mean
from torchmetrics.wrappers import MinMaxMetric

from fl_lightning.client import Client
from fl_lightning.core.method import MethodList
from fl_lightning.data.client_loaders import DataLoaderAdapter
from fl_lightning.engine.evaluation.loop import EvaluationLoop, can_share


class Plain(LightningModule):
    """A classifier of points by their own coordinates, whose step subclasses extend."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.build()

    def build(self):
        """Add metrics."""

    def forward(self, x):
        return x * self.scale

    def training_step(self, batch, batch_idx):
        return self(batch[0]).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("size", float(len(batch[0])))
        return batch_idx

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Measured(Plain):
    """Logs objects of torchmetrics with states of every reduction."""

    def build(self):
        self.accuracy, self.auroc = MulticlassAccuracy(3, average="micro"), BinaryAUROC()
        self.largest, self.least, self.mean, self.sum = MaxMetric(), MinMetric(), MeanMetric(), SumMetric()
        options = {"num_classes": 3, "average": "macro"}
        self.several = MetricCollection([MulticlassPrecision(**options), MulticlassF1Score(**options)], prefix="c_")

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        scores = self(x)
        self.accuracy(scores, y)
        self.auroc.update(scores[:, 0].sigmoid(), (y == 0).long())
        for name in ("largest", "least", "mean", "sum"):
            getattr(self, name).update(scores[:, 1])
            self.log(name, getattr(self, name))
        self.several.update(scores, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("auroc", self.auroc)
        self.log_dict(self.several)
        self.log("loss", scores.square().mean(), prog_bar=True, sync_dist=True)
        for reduce_fx in ("sum", "max", "min"):
            self.log(f"value_{reduce_fx}", scores.sum(), reduce_fx=reduce_fx)
        self.log(f"max_{dataloader_idx}", scores.max(), reduce_fx="max", add_dataloader_idx=False)


def points(number=23, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 3, generator=generator)
    y = (x + 0.8 * torch.randn(number, 3, generator=generator)).argmax(1)
    return [(x[i], y[i]) for i in range(number)]


def loader(number=23, seed=0, size=4):
    return torch.utils.data.DataLoader(points(number, seed), batch_size=size)


class Stub:
    """The part of a run's loaders that the loop uses."""

    seed, fabric = 0, SimpleNamespace(autocast=nullcontext)

    def share(self, one, rank, size):
        return one.share(rank, size)

    def to_device(self, batch, dataloader_idx=0):
        return batch


def evaluate(make, loaders, workers=1, phase="val"):
    """Return the result of each worker; workers are threads with separate modules."""

    def work(one):
        one.check = lambda: None
        client = Client(make(), MethodList([]), {})
        loop = EvaluationLoop(client, Stub(), one, phase, "validation_step")
        if not loop.shared:
            one.rank, one.size = 0, 1
        with torch.no_grad(), client.worker_module.evaluating("validate"):
            return loop.run([DataLoaderAdapter(part) for part in loaders])

    return together(workers, work)


def lightnings(make, loaders):
    """The values that Lightning's own trainer gives."""
    trainer = Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    results = trainer.validate(make(), loaders if len(loaders) > 1 else loaders[0], verbose=False)
    return {name: value for result in results for name, value in result.items()}


# ---------------------------------------------------------------- values
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sizes", [(23,), (23, 5)])
def test_names_and_values_are_lightnings_and_the_same_bits_on_any_number_of_workers(sizes):
    loaders = [loader(number, seed) for seed, number in enumerate(sizes)]
    (one,) = evaluate(Measured, loaders)
    expected = lightnings(Measured, loaders)
    assert one.keys() == expected.keys()
    assert one == pytest.approx(expected, rel=1e-5)
    for workers in (2, 3):
        assert evaluate(Measured, loaders, workers) == [one] * workers


class EqualAtFirst(Plain):
    """Metrics whose states are equal after some batches and not after others, which a collection may mix up."""

    def build(self):
        self.several = MetricCollection({f"top{k}": MulticlassAccuracy(3, top_k=k, average="micro") for k in (1, 2)})

    def validation_step(self, batch, batch_idx):
        self.several.update(*batch)
        self.log_dict(self.several)


def test_the_groups_of_a_collection_do_not_depend_on_a_workers_first_batch():
    sure, unsure = torch.eye(3), torch.tensor([[0.9, 1.0, 0.0]] * 3)
    batches = [(sure, torch.arange(3)), (unsure, torch.zeros(3, dtype=torch.int64))]
    for workers in (1, 2):
        assert evaluate(EqualAtFirst, [batches], workers) == [{"top1": 0.5, "top2": 1.0}] * workers


# ---------------------------------------------------------------- shared batches
class Custom(Metric):
    def __init__(self, reduction, default=0.0):
        super().__init__()
        self.add_state("value", torch.tensor(default), dist_reduce_fx=reduction)

    def update(self, x):
        self.value = self.value + x

    def compute(self):
        return self.value


class ResetsItself(Custom):
    def reset(self):
        super().reset()


DEALT_OUT = {
    SumMetric: True,
    BinaryAUROC: True,
    MaxMetric: True,
    PearsonCorrCoef: False,
    (lambda: Custom("sum")): True,
    (lambda: Custom("sum", 1.0)): False,
    (lambda: Custom(dim_zero_mean)): False,
    (lambda: Custom(None)): False,
    (lambda: Custom(lambda x: x.prod(0))): False,
    (lambda: ResetsItself("sum")): False,
    (lambda: MinMaxMetric(SumMetric())): False,
    (lambda: SumMetric() + MeanMetric()): False,
}


def test_metrics_are_dealt_out_by_the_reductions_of_their_states():
    for make, shared in DEALT_OUT.items():
        module = Plain()
        module.metric = make()
        assert can_share(Client(module, MethodList([]), {}), "validation") is shared, module.metric


def test_a_module_that_overrides_a_hook_is_evaluated_whole():
    def shares(phase, hook):
        kind = type("Hooked", (Plain,), {f"on_validation_{hook}": lambda self, *args: None})
        return can_share(Client(kind(), MethodList([]), {}), phase)

    for hook in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"):
        assert not shares("validation", hook)
        assert shares("test", hook)
    assert shares("validation", "model_eval")


class Running(Measured):
    def validation_step(self, batch, batch_idx):
        self.sum.update(batch[0])
        self.log("running", self.sum.compute(), reduce_fx="max")


Hidden = variant(Measured, validation_step=lambda self, batch, batch_idx: value_of(self.sum))


def value_of(metric):
    return metric.compute()


def test_a_step_that_reads_the_value_so_far_is_evaluated_whole_and_a_hidden_one_is_refused():
    assert not can_share(Client(Running(), MethodList([]), {}), "validation")
    (one,) = evaluate(Running, [loader()])
    assert evaluate(Running, [loader()], 2) == [one] * 2
    with refused("sum.compute='SumMetric'"):
        evaluate(Hidden, [loader()])


# ---------------------------------------------------------------- hooks
class AtTheEnd(Measured):
    """Reads logged values in the epoch's last hook, and accumulates a value in batch hooks."""

    def on_validation_start(self):
        self.seen = 0

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.seen += len(batch[0])

    def on_validation_epoch_end(self):
        metrics = self.trainer.callback_metrics
        self.log("again", metrics["accuracy_epoch"])
        self.log("same", metrics["accuracy"])
        self.log("own", self.accuracy.compute())
        self.log("seen", float(self.seen))
        self.accuracy.reset()


def test_hooks_see_all_batches_and_what_was_logged():
    (one,) = evaluate(AtTheEnd, [loader()])
    assert one["again"] == one["own"] == one["same"] == one["accuracy_epoch"]
    assert one["seen"] == 23
    assert evaluate(AtTheEnd, [loader()], 2) == [one] * 2
    assert one == pytest.approx(lightnings(AtTheEnd, [loader()]), rel=1e-5)


class Stream(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        return iter(points())


def test_a_loader_without_a_length_is_evaluated_to_its_end_on_any_number_of_workers():
    stream = DataLoader(Stream(), batch_size=4)
    for workers in (1, 2):
        assert evaluate(Measured, [stream], workers) == evaluate(Measured, [loader()], workers)
