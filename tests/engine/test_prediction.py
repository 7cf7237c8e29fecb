"""The command predict against Lightning's own, on one worker and on several."""

import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import small_data, small_model, small_trainer
from helpers.theirs import TheirData, Theirs
from helpers.tiny import variant
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from fl_lightning import Partitioned
from fl_lightning.methods import FedBN


class Net(Theirs):
    """Predicts dictionaries of tensors and plain values, optionally with dropout."""

    def __init__(self, dropout=False):
        super().__init__()
        self.dropout = dropout

    def forward(self, batch):
        return {"logits": self.net(batch["x"]), "n": len(batch["x"])}

    def on_predict_model_eval(self):
        self.eval()
        self.net[3].train(self.dropout)


HOOKS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")


class Hooked(Net):
    """Records the calls of its hooks with their numeric arguments."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        assert self.trainer.predicting
        called.append(("step", batch_idx, dataloader_idx))
        return batch_idx, dataloader_idx


def noting(name):
    return lambda self, *args: called.append((name, *(one for one in args if isinstance(one, (int, tuple)))))


called = []
for name in HOOKS:
    setattr(Hooked, f"on_predict_{name}", noting(name))


class Data(TheirData):
    """One loader, or two."""

    loaders, ready = 1, False

    def setup(self, stage):
        super().setup(stage)
        self.ready = self.ready or stage == "predict"

    def predict_dataloader(self):
        assert self.ready
        loaders = [DataLoader(self.items[: 70 + 10 * i], batch_size=16) for i in range(self.loaders)]
        return loaders if self.loaders > 1 else loaders[0]


class Several(Data):
    loaders = 2


def predict(tmp_path, model, data=None, **kwargs):
    trainer = small_trainer(tmp_path, **kwargs)
    return trainer.predict(model, Partitioned(data or Data(), num_clients=3))


def made(kind, *args):
    torch.manual_seed(3)
    return kind(*args)


def by_lightning(model, data):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", **quiet).predict(model, data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [Data, Several])
def test_the_outputs_are_lightnings(tmp_path, data):
    theirs, ours = by_lightning(made(Net), data()), predict(tmp_path, made(Net), data())
    assert len(ours) == len(theirs)
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        assert torch.equal(mine["logits"], other["logits"])
        assert mine["n"] == other["n"]


def flat(outputs):
    return [one for part in outputs for one in part] if isinstance(outputs[0], list) else outputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [Data, Several])
def test_the_hooks_are_called_as_lightning_calls_them(tmp_path, data):
    called.clear()
    expected = by_lightning(made(Hooked), data())
    theirs = called.copy()
    called.clear()
    assert predict(tmp_path, made(Hooked), data()) == expected
    assert called == theirs


@pytest.mark.parametrize("dropout", [False, True])
def test_two_workers_give_the_same_in_the_same_order(tmp_path, dropout):
    first = predict(tmp_path, made(Net, dropout), Several(), threads_per_worker=1)
    second = predict(tmp_path, made(Net, dropout), Several(), devices=2, threads_per_worker=1)
    assert [len(part) for part in first] == [5, 5]
    for one, two in zip(flat(first), flat(second), strict=True):
        assert torch.equal(one["logits"], two["logits"])


def test_without_a_loader_of_its_own_the_test_data_are_predicted_and_the_module_keeps_its_modes(tmp_path):
    model, data = small_model(), small_data(train_size=100)
    model.projector.eval()
    outputs = small_trainer(tmp_path).predict(model, data)
    batches = list(data.test_dataloader())
    assert model.training
    assert not model.projector.training
    model.eval()
    for output, (x, _) in zip(outputs, batches, strict=True):
        assert torch.equal(output, model(x))
    assert list(tmp_path.iterdir()) == []


def test_the_model_of_a_checkpoint_is_predicted_with(tmp_path):
    trained = small_model()
    small_trainer(tmp_path, name="run", max_rounds=1).fit(trained, small_data(train_size=100))
    folder = tmp_path / "run/version_0/checkpoints"
    expected = small_trainer(tmp_path).predict(trained, small_data(train_size=100))
    for name, key in (("last.ckpt", "ckpt_path"), ("model.ckpt", "ckpt_path"), ("model.ckpt", "weights")):
        torch.manual_seed(9)
        found = small_trainer(tmp_path).predict(small_model(), small_data(train_size=100), **{key: folder / name})
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_outputs_are_written_to_a_file(tmp_path):
    path = tmp_path / "out/mine.pt"
    outputs = small_trainer(tmp_path).predict(small_model(), small_data(train_size=100), output=path)
    assert all(torch.equal(a, b) for a, b in zip(torch.load(path, weights_only=True), outputs, strict=True))
    assert [one.name for one in path.parent.iterdir()] == ["mine.pt"]
    with refused(f"output={str(path.parent)!r}"):
        small_trainer(tmp_path).predict(small_model(), small_data(train_size=100), output=path.parent)


def test_what_cannot_be_predicted_is_refused(tmp_path):
    class NoData(TheirData):
        test_dataloader = TheirData.__mro__[1].test_dataloader

    with refused("predict_dataloader()"):
        predict(tmp_path, made(Net), NoData())
    model = made(Net)
    data = Partitioned(Data(), num_clients=3)
    small_trainer(tmp_path, name="run", max_rounds=1).fit(model, data, [FedBN()])
    with warned("method=[]", "fedbn"), refused("last.ckpt", "3 clients"):
        small_trainer(tmp_path).predict(model, data, tmp_path / "run/version_0/checkpoints/last.ckpt")


class Indexed(Net):
    def on_predict_batch_start(self, batch, batch_idx, dataloader_idx):
        """Lightning passes the index of a loader only where there are several."""


class NotIndexed(Net):
    def on_predict_batch_end(self, outputs, batch, batch_idx):
        pass


@pytest.mark.parametrize(("make", "data"), [(Indexed, Data), (NotIndexed, Several)])
def test_hooks_that_do_not_fit_the_number_of_loaders_are_refused_as_by_lightning(tmp_path, make, data):
    hook = next(name for name in vars(make) if name.startswith("on_"))
    with refused(f"{make.__name__}.{hook}=", "dataloader_idx"):
        predict(tmp_path, made(make), data())
    with pytest.raises(
        (MisconfigurationException, RuntimeError), match=f"{hook}.*dataloader_idx|dataloader_idx.*{hook}"
    ):
        by_lightning(made(make), data())


class Bare(LightningModule):
    """A module that cannot be trained."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 3)

    def forward(self, batch):
        return self.net(batch["x"])


def test_a_module_without_training_is_evaluated_and_predicted_with_but_not_fitted(tmp_path):
    Tested = variant(Bare, test_step=lambda self, batch: self.log("mean", self(batch).mean()))

    data = Partitioned(Data(), num_clients=3)
    model = made(Tested)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data.datamodule.setup("test")
    whole = torch.stack([row["x"] for row in data.datamodule.items[240:]])
    assert small_trainer(tmp_path).test(model, data)["test/mean"] == pytest.approx(model.net(whole).mean().item())
    assert len(small_trainer(tmp_path).predict(model, data)) == 5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with refused("training_step"):
        small_trainer(tmp_path).fit(model, data)
    with refused("model='Bare'", "test_step", "validation_step"):
        small_trainer(tmp_path).test(made(Bare), data)
    manual = made(Tested)
    manual.automatic_optimization = False
    assert "test/mean" in small_trainer(tmp_path).test(manual, data)
