"""Every public name of Lightning's modules is called, given, refused or inherited, and each is shown."""

import re
from pathlib import Path

import pytest
import torch
from helpers.conformance import SAME, by_rounds, conform, note, notes_of, recording
from helpers.errors import refused
from helpers.tiny import TinyData, TinyModule, clients, variant
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from fl_lightning import FederatedTrainer
from fl_lightning.utilities.errors import ClientError

DOCS = Path(__file__).resolve().parents[2] / "docs"


def table(title):
    """The names in the first column of the table under a title of the page."""
    page = (DOCS / "own_module_specification.md").read_text()
    rows = page.split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def words(text):
    return set(text.split())


# what a run does with each name of a module: call it,
CALLED = set(table("The hooks"))
# give it Lightning's value or effect in a visit,
GIVEN = words("""
    all_gather automatic_optimization clip_gradients current_epoch device device_mesh dtype example_input_array fabric
    freeze global_rank global_step hparams hparams_initial local_rank log log_dict logger loggers lr_schedulers on_gpu
    optimizers print save_hyperparameters strict_loading toggle_optimizer toggled_optimizer trainer unfreeze
    untoggle_optimizer
""")
# refuse it,
REFUSED = {"configure_callbacks", "configure_sharded_model", "manual_backward"}
# or leave it as it is: it has nothing to do with a run, or gives way to the data module's as in Lightning
INHERITED = words("""
    CHECKPOINT_HYPER_PARAMS_KEY CHECKPOINT_HYPER_PARAMS_NAME CHECKPOINT_HYPER_PARAMS_TYPE cpu cuda double float half
    load_from_checkpoint predict_dataloader remove_ignored_hparams test_dataloader to to_onnx to_tensorrt to_torchscript
    train_dataloader type val_dataloader
""")
# the same of a data module
DATA_CALLED = words("""
    load_state_dict on_after_batch_transfer on_before_batch_transfer on_exception predict_dataloader prepare_data setup
    state_dict teardown test_dataloader train_dataloader transfer_batch_to_device val_dataloader
""")
DATA_INHERITED = words("""
    CHECKPOINT_HYPER_PARAMS_KEY CHECKPOINT_HYPER_PARAMS_NAME CHECKPOINT_HYPER_PARAMS_TYPE from_datasets hparams
    hparams_initial load_from_checkpoint name remove_ignored_hparams save_hyperparameters
""")
# these are not in every version of Lightning
SOME = {"on_predict_model_eval", "remove_ignored_hparams", "to_tensorrt", "toggled_optimizer"}
SOME |= {"configure_sharded_model", "to_torchscript"}


def public_names(kind):
    """The public names that Lightning's classes give to a module or data module."""
    classes = [one for one in kind.__mro__ if one not in (nn.Module, object)]
    return {name for one in classes for name in vars(one) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("kind", "groups"),
    [(LightningModule, [CALLED, GIVEN, REFUSED, INHERITED]), (LightningDataModule, [DATA_CALLED, DATA_INHERITED])],
)
def test_every_public_name_is_in_one_group(kind, groups):
    """A name that they lack is new in Lightning: decide what a run does with it, and show it."""
    known = set().union(*groups)
    assert len(known) == sum(map(len, groups))
    assert public_names(kind) - known == set()
    assert known - public_names(kind) <= SOME


# ---------------------------------------------------------------------- called
class Whole(TinyModule):
    """A module with every step and a schedule."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1)]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


class Remembering(TinyData):
    """A data module with a state of its own and loaders for everything."""

    def __init__(self):
        super().__init__(val=[6], test=[5])

    def predict_dataloader(self):
        return self.loader(4, 0)

    def state_dict(self):
        return {"mine": 3}


class Failing(TinyModule):
    def training_step(self, batch, batch_idx):
        raise ValueError("no step")


def test_every_hook_that_is_called_is_called(tmp_path):
    known = CALLED & public_names(LightningModule)
    module, data = recording(Whole, known), recording(Remembering, DATA_CALLED)

    def use(module, data):
        how = {"epochs": 1, "folder": tmp_path / data.__name__, "checkpoint_every_n_rounds": 1}
        by_rounds(module(), clients(data()), rounds=1, **how)
        by_rounds(module(), clients(data()), rounds=2, ckpt_path="last", **how)
        trainer = FederatedTrainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        trainer.predict(module(), clients(data()))
        with refused("no step", kind=ClientError):
            by_rounds(Failing(), clients(data()))

    _, notes = notes_of(lambda: use(module, Remembering))
    assert {one[0] for one in notes} == known
    _, notes = notes_of(lambda: use(Whole, data))
    assert {one[0] for one in notes} == DATA_CALLED
    assert ("load_state_dict", (("state_dict", ["mine"]),)) in notes


# ---------------------------------------------------------------------- given
class Asking(Whole):
    """Notes what a module may ask for, and uses what it may use; see also the tests of logging."""

    def __init__(self, width=6):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 8)
        self.strict_loading = False
        self.extra = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        names = sorted(name for name in GIVEN if isinstance(getattr(LightningModule, name, None), property))
        plain = {name: getattr(self, name) for name in names if name not in ("trainer", "example_input_array")}
        note({name: dict(value) if name.startswith("hparams") else value for name, value in plain.items()})
        note(tuple(self.example_input_array.shape), self.trainer.world_size, torch.distributed.is_initialized())
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        note(type(scheduler).__name__, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"])
        note(isinstance(optimizer, torch.optim.Optimizer), type(self.optimizers(use_pl_optimizer=False)).__name__)
        note(tuple(self.all_gather(batch[1]).shape))
        self.log("one", 1.0)
        self.log_dict({"two": 2.0})
        self.print("epoch", self.current_epoch, batch_idx)
        self.toggle_optimizer(optimizer)
        self.untoggle_optimizer(optimizer)
        with self.toggled_optimizer(optimizer):
            return self.loss(batch)

    def on_train_epoch_end(self):
        modes = [self.training, self.head.weight.requires_grad]
        self.freeze()
        frozen = [self.training, self.head.weight.requires_grad]
        self.unfreeze()
        note(modes, frozen, [self.training, self.head.weight.requires_grad])

    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, 0.1, "value")


def test_what_is_given_has_lightnings_value_or_effect(capsys):
    conform(Asking)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert len(lines) == 32 and lines[:16] == lines[16:]


# ---------------------------------------------------------------------- refused


def turns_manual(module, stage=None):
    module.automatic_optimization = False


# the words of the error, and what a module overrides; the signature with ``dataloader_iter`` gets the iterator itself
BEFORE_ROUND_0 = {
    "model='Model.configure_sharded_model'": {"configure_sharded_model": lambda self: None},
    "Model.configure_callbacks()": {"configure_callbacks": lambda self: [Callback()]},
    "manual": {"build": turns_manual},
    "manual optimization": {"setup": turns_manual},
    "dataloader_iter": {"training_step": lambda self, dataloader_iter: self.loss(next(dataloader_iter)[0])},
    "body.0.weight": {"build": lambda self: self.body.__setitem__(0, nn.LazyLinear(6))},
    "2 optimizers": {"configure_optimizers": lambda self: [SGD([part.weight]) for part in (self.body[0], self.head)]},
    "0 optimizers": {"configure_optimizers": lambda self: None},
}


@pytest.mark.parametrize("words", BEFORE_ROUND_0)
def test_what_is_refused_is_named_before_round_0(words, tmp_path):
    began = {"on_train_start": lambda self: pytest.fail("the run has begun")}
    model = type("Model", (TinyModule,), BEFORE_ROUND_0[words] | began)()
    with refused(words) as info:
        by_rounds(model, clients(TinyData()), folder=tmp_path)
    assert "\n" not in str(info.value)
    assert not list(tmp_path.rglob("metrics.csv"))


def test_manual_backward_is_refused_where_it_is_called():
    """Nothing tells of it before; Lightning too refuses it there."""
    manual = variant(TinyModule, training_step=lambda self, batch, batch_idx: self.manual_backward(self.loss(batch)))
    with refused("automatic_optimization", kind=ClientError):
        by_rounds(manual(), clients(TinyData()))


# ---------------------------------------------------------------------- the page
def test_the_page_names_what_is_refused_and_every_value_of_the_trainer():
    class Model(TinyModule):
        def on_train_start(self):
            note([name for name in table("`self.trainer`") if not hasattr(self.trainer, name)])

    assert set(table("Refused settings")) >= REFUSED | {"automatic_optimization"}
    assert set(table("`self.trainer`")) >= set(SAME)
    _, notes = notes_of(lambda: by_rounds(Model(), clients(TinyData()), rounds=1))
    assert notes == [[]]


def test_the_module_of_the_guide_runs():
    class FiveColumns(TinyData):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0][:, :5], batch[1]]

    names = {}
    code = re.findall(r"```python\n(.*?)```", (DOCS / "own_module.md").read_text(), re.DOTALL)
    exec("\n\n".join(code), names)
    trainer = by_rounds(names["WarmUp"](), clients(FiveColumns(28, val=[6]), 14, 14), precision="32-true")
    assert trainer.history[0]["train/weight"] < trainer.history[1]["train/weight"] <= 1
    assert names["Predicting"]().predict_step([torch.zeros(4, 5), torch.zeros(4)], 0).shape == (4,)
