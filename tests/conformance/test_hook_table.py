"""Every public name of Lightning's modules is called, given, refused or inherited, and each is shown."""

import re
from pathlib import Path

import pytest
import torch
from helpers.conformance import (
    OTHERS,
    SAME,
    Net,
    Rows,
    assert_same_notes,
    by_rounds,
    clients,
    conform,
    note,
    notes_of,
    recording,
)
from helpers.errors import refused
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from fl_lightning import FederatedTrainer
from fl_lightning.errors import ClientError, UsageError

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "own_module_specification.md").read_text()

CALLED, GIVEN, REFUSED, INHERITED = "called", "given", "refused", "inherited"

# what a run does with each name, and the test that shows it
NAMES = {
    # what a run calls
    "backward": CALLED,
    "configure_gradient_clipping": CALLED,
    "configure_model": CALLED,
    "configure_optimizers": CALLED,
    "forward": CALLED,
    "lr_scheduler_step": CALLED,
    "on_after_backward": CALLED,
    "on_after_batch_transfer": CALLED,
    "on_before_backward": CALLED,
    "on_before_batch_transfer": CALLED,
    "on_before_optimizer_step": CALLED,
    "on_before_zero_grad": CALLED,
    "on_fit_end": CALLED,
    "on_fit_start": CALLED,
    "on_load_checkpoint": CALLED,
    "on_predict_batch_end": CALLED,
    "on_predict_batch_start": CALLED,
    "on_predict_end": CALLED,
    "on_predict_epoch_end": CALLED,
    "on_predict_epoch_start": CALLED,
    "on_predict_model_eval": CALLED,
    "on_predict_start": CALLED,
    "on_save_checkpoint": CALLED,
    "on_test_batch_end": CALLED,
    "on_test_batch_start": CALLED,
    "on_test_end": CALLED,
    "on_test_epoch_end": CALLED,
    "on_test_epoch_start": CALLED,
    "on_test_model_eval": CALLED,
    "on_test_model_train": CALLED,
    "on_test_start": CALLED,
    "on_train_batch_end": CALLED,
    "on_train_batch_start": CALLED,
    "on_train_end": CALLED,
    "on_train_epoch_end": CALLED,
    "on_train_epoch_start": CALLED,
    "on_train_start": CALLED,
    "on_validation_batch_end": CALLED,
    "on_validation_batch_start": CALLED,
    "on_validation_end": CALLED,
    "on_validation_epoch_end": CALLED,
    "on_validation_epoch_start": CALLED,
    "on_validation_model_eval": CALLED,
    "on_validation_model_train": CALLED,
    "on_validation_model_zero_grad": CALLED,
    "on_validation_start": CALLED,
    "optimizer_step": CALLED,
    "optimizer_zero_grad": CALLED,
    "predict_step": CALLED,
    "prepare_data": CALLED,
    "setup": CALLED,
    "teardown": CALLED,
    "test_step": CALLED,
    "training_step": CALLED,
    "transfer_batch_to_device": CALLED,
    "validation_step": CALLED,
    # what a module may ask for or use in a visit, with Lightning's value or effect
    "all_gather": GIVEN,
    "automatic_optimization": GIVEN,
    "clip_gradients": GIVEN,
    "current_epoch": GIVEN,
    "device": GIVEN,
    "device_mesh": GIVEN,
    "dtype": GIVEN,
    "example_input_array": GIVEN,
    "fabric": GIVEN,
    "freeze": GIVEN,
    "global_rank": GIVEN,
    "global_step": GIVEN,
    "hparams": GIVEN,
    "hparams_initial": GIVEN,
    "local_rank": GIVEN,
    "log": GIVEN,
    "log_dict": GIVEN,
    "logger": GIVEN,
    "loggers": GIVEN,
    "lr_schedulers": GIVEN,
    "on_gpu": GIVEN,
    "optimizers": GIVEN,
    "print": GIVEN,
    "save_hyperparameters": GIVEN,
    "strict_loading": GIVEN,
    "toggle_optimizer": GIVEN,
    "toggled_optimizer": GIVEN,
    "trainer": GIVEN,
    "unfreeze": GIVEN,
    "untoggle_optimizer": GIVEN,
    # what is refused by name
    "configure_callbacks": REFUSED,
    "configure_sharded_model": REFUSED,
    "manual_backward": REFUSED,
    # what works on the module alone and has nothing to do with a run; a data module's loaders take the place of a
    # module's own, as in Lightning
    "CHECKPOINT_HYPER_PARAMS_KEY": INHERITED,
    "CHECKPOINT_HYPER_PARAMS_NAME": INHERITED,
    "CHECKPOINT_HYPER_PARAMS_TYPE": INHERITED,
    "cpu": INHERITED,
    "cuda": INHERITED,
    "double": INHERITED,
    "float": INHERITED,
    "half": INHERITED,
    "load_from_checkpoint": INHERITED,
    "predict_dataloader": INHERITED,
    "remove_ignored_hparams": INHERITED,
    "test_dataloader": INHERITED,
    "to": INHERITED,
    "to_onnx": INHERITED,
    "to_tensorrt": INHERITED,
    "to_torchscript": INHERITED,
    "train_dataloader": INHERITED,
    "type": INHERITED,
    "val_dataloader": INHERITED,
}
# these are not in every version of Lightning
NEW = {"on_predict_model_eval", "remove_ignored_hparams", "to_tensorrt", "toggled_optimizer"}
OLD = {"configure_sharded_model", "to_torchscript"}


def of_kind(wanted):
    return sorted(name for name, kind in NAMES.items() if kind == wanted)


def public_names():
    """The public names that Lightning's classes give to a module."""
    classes = [one for one in LightningModule.__mro__ if one not in (nn.Module, object)]
    return {name for one in classes for name in vars(one) if not name.startswith("_")}


def test_every_public_name_of_a_lightning_module_is_in_the_table():
    """A name here that the table lacks is new in Lightning: decide what a run does with it, and show it."""
    assert public_names() - set(NAMES) == set()
    assert set(NAMES) - public_names() <= NEW | OLD


# ---------------------------------------------------------------------- called
class Whole(Net):
    """A module with every step, a schedule, and something in its checkpoints."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1)]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def predicting():
    return FederatedTrainer(accelerator="cpu", logger=False, enable_progress_bar=False)


def test_every_hook_that_is_called_is_called(tmp_path):
    make = recording(Whole, [name for name in of_kind(CALLED) if name in public_names()])
    data = clients(Remembering())

    def use():
        by_rounds(make(), data, rounds=2, epochs=1, folder=tmp_path, checkpoint_every_n_rounds=1)
        by_rounds(make(), data, rounds=3, epochs=1, folder=tmp_path, ckpt_path="last")
        predicting().predict(make(), data)

    _, notes = notes_of(use)
    called = {one[0] for one in notes}
    assert called == set(of_kind(CALLED)) & public_names()


def test_what_a_module_puts_into_a_checkpoint_it_gets_back(tmp_path):
    class Model(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"epoch": self.current_epoch}

        def on_load_checkpoint(self, checkpoint):
            note(checkpoint["mine"], sorted(checkpoint["state_dict"])[0])

    data = clients(Rows())
    by_rounds(Model(), data, rounds=2, epochs=1, folder=tmp_path, checkpoint_every_n_rounds=1)
    _, notes = notes_of(lambda: by_rounds(Model(), data, rounds=3, epochs=1, folder=tmp_path, ckpt_path="last"))
    assert [names for _, names in notes] == ["net.0.bias"]
    assert set(notes[0][0]) == {"epoch"}


# ---------------------------------------------------------------------- given
class Asking(Net):
    """Notes what a module may ask for, and uses what it may use; see also the tests of modules and of logging."""

    def __init__(self, width=6):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 5)
        self.strict_loading = False
        self.extra = nn.Linear(1, 1)

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1)]

    def training_step(self, batch, batch_idx):
        names = [name for name in of_kind(GIVEN) if isinstance(getattr(LightningModule, name, None), property)]
        plain = {name: getattr(self, name) for name in names if name not in ("trainer", "example_input_array")}
        note({name: dict(value) if name.startswith("hparams") else value for name, value in plain.items()})
        note(tuple(self.example_input_array.shape), self.trainer.world_size)
        note(self.lr_schedulers().get_last_lr(), self.optimizers().param_groups[0]["lr"])
        note(tuple(self.all_gather(batch[1]).shape))
        self.log("one", 1.0)
        self.log_dict({"two": 2.0})
        self.print("a line")
        self.toggle_optimizer(self.optimizers())
        self.untoggle_optimizer(self.optimizers())
        return self.loss(batch)

    def on_train_epoch_end(self):
        modes = [self.training, self.net[0].weight.requires_grad]
        self.freeze()
        frozen = [self.training, self.net[0].weight.requires_grad]
        self.unfreeze()
        note(modes, frozen, [self.training, self.net[0].weight.requires_grad])

    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, 0.1, "value")


def test_what_is_given_has_lightnings_value_or_effect():
    assert_same_notes(conform(Asking))


def test_a_toggled_optimizer():
    class Model(Net):
        def training_step(self, batch, batch_idx):
            with self.toggled_optimizer(self.optimizers()):
                return self.loss(batch)

    conform(Model)


def test_every_name_that_is_given_is_used_in_a_test():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    properties = {name for name in of_kind(GIVEN) if isinstance(getattr(LightningModule, name, None), property)}
    missing = [name for name in of_kind(GIVEN) if name not in properties and not re.search(rf"self\.{name}\(", text)]
    assert missing == []


# ---------------------------------------------------------------------- refused
class Sharded(Net):
    def configure_sharded_model(self):
        pass


class Callbacks(Net):
    def configure_callbacks(self):
        return [Callback()]


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class ManualFromSetup(Net):
    def setup(self, stage):
        self.automatic_optimization = False


class DataloaderIter(Net):
    """The signature by which Lightning hands over the iterator itself."""

    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class Lazy(Net):
    """A layer whose shape is only known after a first forward."""

    def __init__(self):
        super().__init__()
        self.net[0] = nn.LazyLinear(6)


class ManualBackward(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss)
        return loss


class Several(Net):
    def configure_optimizers(self):
        return [SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


class NoOptimizer(Net):
    def configure_optimizers(self):
        return None


class SteppedByItself(Net):
    """An optimizer with a frequency, which Lightning 2 itself refuses."""

    def configure_optimizers(self):
        return [{"optimizer": SGD(self.parameters(), lr=0.1)}, {"optimizer": SGD(self.parameters(), lr=0.2)}]


class OwnSGD(SGD):
    """An optimizer whose attributes a run does not know."""


class SameAgain(Net):
    """Makes its optimizer once, with a state that would pass from client to client."""

    def __init__(self):
        super().__init__()
        self.optimizer = OwnSGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self):
        return self.optimizer


BEFORE_ROUND_0 = {
    "configure_optimizers='OwnSGD'": SameAgain,
    "model='Model.configure_sharded_model'": Sharded,
    "Model.configure_callbacks()": Callbacks,
    "manual": Manual,
    "manual optimization": ManualFromSetup,
    "dataloader_iter": DataloaderIter,
    "net.0.weight": Lazy,
    "2 optimizers": Several,
    "0 optimizers": NoOptimizer,
    "configure_optimizers": SteppedByItself,
}


@pytest.mark.parametrize("name", BEFORE_ROUND_0)
def test_what_is_refused_is_named_before_round_0(name, tmp_path):
    started = []

    class Model(BEFORE_ROUND_0[name]):
        def on_train_start(self):
            started.append(1)

    with refused(name) as info:
        by_rounds(Model(), clients(Rows()), folder=tmp_path)
    assert not started and "\n" not in str(info.value)
    assert not list(tmp_path.rglob("metrics.csv"))


def test_manual_backward_is_refused_where_it_is_called():
    """Nothing tells of it before; Lightning too refuses it there."""
    with pytest.raises((UsageError, ClientError), match=r"automatic_optimization"):
        by_rounds(ManualBackward(), clients(Rows()))


def test_every_name_that_is_refused_has_its_test():
    assert set(of_kind(REFUSED)) == {"configure_callbacks", "configure_sharded_model", "manual_backward"}


# ---------------------------------------------------------------------- data modules
# what a run does with each name of a data module
DATA = {
    "load_state_dict": CALLED,
    "on_after_batch_transfer": CALLED,
    "on_before_batch_transfer": CALLED,
    "on_exception": CALLED,
    "predict_dataloader": CALLED,
    "prepare_data": CALLED,
    "setup": CALLED,
    "state_dict": CALLED,
    "teardown": CALLED,
    "test_dataloader": CALLED,
    "train_dataloader": CALLED,
    "transfer_batch_to_device": CALLED,
    "val_dataloader": CALLED,
    "hparams": GIVEN,
    "hparams_initial": GIVEN,
    "CHECKPOINT_HYPER_PARAMS_KEY": INHERITED,
    "CHECKPOINT_HYPER_PARAMS_NAME": INHERITED,
    "CHECKPOINT_HYPER_PARAMS_TYPE": INHERITED,
    "from_datasets": INHERITED,
    "load_from_checkpoint": INHERITED,
    "name": INHERITED,
    "remove_ignored_hparams": INHERITED,
    "save_hyperparameters": INHERITED,
}


def test_every_public_name_of_a_data_module_is_in_the_table():
    names = {name for one in LightningDataModule.__mro__ if one is not object for name in vars(one) if name[0] != "_"}
    assert names - set(DATA) == set()
    assert set(DATA) - names <= NEW


class Remembering(Rows):
    """A data module with a state of its own and loaders for everything."""

    def __init__(self):
        super().__init__(held_out=[6], tested=[5])

    def predict_dataloader(self):
        return self.loader(4)

    def state_dict(self):
        return {"mine": 3}


def test_every_hook_of_a_data_module_that_is_called_is_called(tmp_path):
    class Failing(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("no step")

    make = recording(Remembering, [name for name, kind in DATA.items() if kind == CALLED])

    def use():
        by_rounds(Whole(), clients(make()), rounds=1, epochs=1, folder=tmp_path, checkpoint_every_n_rounds=1)
        by_rounds(Whole(), clients(make()), rounds=2, epochs=1, folder=tmp_path, ckpt_path="last")
        predicting().predict(Whole(), clients(make()))
        with refused("training_step", "no step"):
            by_rounds(Failing(), clients(make()))

    _, notes = notes_of(use)
    assert {one[0] for one in notes} == {name for name, kind in DATA.items() if kind == CALLED}
    assert ("load_state_dict", (("state_dict", ["mine"]),)) in notes


# ---------------------------------------------------------------------- the page
def table(title):
    """The names in the first column of the table under a title of the page."""
    rows = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_the_page_names_every_hook_that_is_called_and_no_other():
    names = table("The hooks")
    assert len(names) == len(set(names))
    assert set(names) == set(of_kind(CALLED))


def test_the_page_names_what_is_refused():
    assert set(table("What is refused")) >= set(of_kind(REFUSED)) | {"automatic_optimization"}


def test_the_page_names_every_value_of_the_trainer():
    assert sorted(table("`self.trainer`")) == sorted([*SAME, *OTHERS])


def test_the_module_of_the_guide_runs():
    names = {}
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "own_module.md").read_text(), re.DOTALL)
    exec(code, names)
    model = names["WarmUp"]()
    trainer = by_rounds(model, clients(Rows(28, held_out=[6]), 14, 14), rounds=2, precision="32-true")
    assert trainer.history[0]["train/weight"] < trainer.history[1]["train/weight"] <= 1
    assert FederatedTrainer(client_schedulers="restart", logger=False, enable_progress_bar=False)
