"""Names of Lightning's Trainer, typed by habit, are answered with the name to use here."""

import re
from inspect import signature

import lightning.pytorch
import pytest
from helpers.errors import refused
from helpers.runs import small_model
from helpers.tiny import variant
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

import fl_lightning.callbacks
from fl_lightning import FederatedTrainer, Method
from fl_lightning.cli.cli import FederatedCLI
from fl_lightning.cli.config_files import check_command
from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext
from fl_lightning.utilities.lightning_replacements import (
    ARGUMENTS,
    ATTRIBUTES,
    CALLBACKS,
    OTHER_KEYS,
    replacement_of_callback,
)

OURS = signature(FederatedTrainer).parameters
# twenty keys, and the names in their answers
KEYS = {
    "max_epochs": ["trainer.max_rounds", "trainer.local_epochs"],
    "min_epochs": ["trainer.max_rounds", "EarlyStopping"],
    "max_steps": ["trainer.max_rounds", "trainer.local_steps"],
    "max_time": ["ckpt_path"],
    "limit_train_batches": ["trainer.local_steps", "trainer.fast_dev_run"],
    "limit_val_batches": ["trainer.eval_every_n_rounds"],
    "overfit_batches": ["examples"],
    "val_check_interval": ["trainer.eval_every_n_rounds"],
    "check_val_every_n_epoch": ["trainer.eval_every_n_rounds"],
    "num_sanity_val_steps": ["remove"],
    "log_every_n_steps": ["remove"],
    "enable_checkpointing": ["trainer.checkpoint_every_n_rounds"],
    "enable_model_summary": ["doctor"],
    "benchmark": ["torch.backends.cudnn.benchmark"],
    "profiler": ["CostLedger"],
    "detect_anomaly": ["torch.autograd.set_detect_anomaly"],
    "sync_batchnorm": ["trainer.buffers"],
    "plugins": ["trainer.precision"],
    "optimizer": ["model.optimizer", "configure_optimizers", "trainer.server_optimizer"],
    "max_epoch": ["trainer.max_rounds", "trainer.local_epochs"],
}
# ten attributes
READ = {
    "callback_metrics": "trainer.metrics",
    "logged_metrics": "trainer.history",
    "current_epoch": "trainer.server.round",
    "global_step": "trainer.server.round",
    "max_epochs": "trainer.max_rounds",
    "log_dir": "trainer.run_dir",
    "save_checkpoint": "trainer.run_dir",
    "checkpoint_callback": "trainer.run_dir",
    "lightning_module": "trainer.client.module",
    "is_global_zero": "trainer.global_rank",
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_lightnings_is_answered_with_ours_on_the_command_line_and_in_python(key):
    with refused(f"trainer.{key}", *KEYS[key]):
        check_command(["fit", f"--trainer.{key}=1"])
    with refused(key, *KEYS[key]):
        check_command(["fit", f"--config={{{key}: 1}}"])
    with refused(key, *(name.removeprefix("trainer.") for name in KEYS[key]), kind=TypeError):
        FederatedTrainer(**{key: 1})


@pytest.mark.parametrize("name", READ)
def test_an_attribute_of_lightnings_is_answered_with_ours(name):
    trainer = FederatedTrainer()
    with refused(f"trainer.{name}", READ[name], kind=AttributeError):
        getattr(trainer, name)
    assert not hasattr(trainer, name)


def test_an_error_within_a_property_is_not_hidden():
    class Mine(FederatedTrainer):
        @property
        def mine(self):
            return [].missing

    with refused("'list'", "'missing'", kind=AttributeError):
        _ = Mine().mine


def test_a_misspelt_argument_in_python_is_answered_with_the_nearest():
    for name in ("max_round", "max_rond"):  # the first one
        with refused(f"{name}:", "max_rounds?", kind=TypeError):
            FederatedTrainer(**{name: 2, "benchmark": True, "profiler": "simple"})


def test_loaders_in_place_of_data_are_answered_with_partitioned():
    trainer, loader = FederatedTrainer(), DataLoader([0])
    for call in (lambda: trainer.fit(small_model(), loader), lambda: trainer.test(small_model(), loader)):
        with refused("data='DataLoader'", "Partitioned", "num_clients"):
            call()
    with refused("train_dataloaders", "Partitioned", "num_clients", kind=TypeError):
        trainer.fit(small_model(), train_dataloaders=loader)
    with refused("dataloaders", "Partitioned", kind=TypeError):
        trainer.test(small_model(), dataloaders=loader)
    with refused("data='LightningDataModule'", "Partitioned"):
        trainer.fit(small_model(), LightningDataModule())


def test_a_section_of_a_command_is_answered_with_its_place():
    with refused("fit", "--config"):
        check_command(["fit", "--config={fit: {trainer: {max_rounds: 2}}}"])


@pytest.mark.parametrize("add", ["add_optimizer_args", "add_lr_scheduler_args"])
def test_an_optimizer_that_a_subclass_of_the_command_line_adds_needs_a_link_to_the_model(add):
    Mine = variant(FederatedCLI, add_arguments_to_parser=lambda self, parser: getattr(parser, add)())

    with refused(add, "link_to"):
        Mine(["fit"])


def test_every_argument_of_lightnings_trainer_is_ours_or_has_an_answer():
    theirs = signature(Trainer).parameters
    assert {*ARGUMENTS} == {*theirs} - {*OURS}


def test_every_argument_of_lightnings_fit_and_test_is_ours_or_has_an_answer():
    for command in ("fit", "validate", "test", "predict"):
        theirs, ours = (signature(getattr(kind, command)).parameters for kind in (Trainer, FederatedTrainer))
        assert {*theirs} - {*ours, "return_predictions"} <= {*OTHER_KEYS}, command


def test_the_names_in_the_answers_exist():
    texts = [*ARGUMENTS.values(), *OTHER_KEYS.values(), *CALLBACKS.values()]
    assert {name for text in texts for name in re.findall(r"\btrainer\.(\w+)", text)} <= {*OURS}
    attributes = {name for text in ATTRIBUTES.values() for name in re.findall(r"\btrainer\.(\w+)", text)}
    assert attributes <= {*dir(RunContext), *OURS}
    # its fit sets datamodule
    assert [name for name in ATTRIBUTES if not hasattr(Trainer, name)] == ["datamodule"]
    assert [name for name in ATTRIBUTES if hasattr(RunContext, name) or name in OURS] == []
    classes = {name for text in texts for name in re.findall(r"fl_lightning\.callbacks\.(\w+)", text)}
    assert classes <= {*fl_lightning.callbacks.__all__}
    assert {*OTHER_KEYS} & {*OURS} == set()
    assert hasattr(Client, "lr") and hasattr(Method, "evaluated_state") and hasattr(Method, "on_before_optimizer_step")


def test_every_callback_of_lightnings_has_an_answer_of_its_own_or_changes_training():
    kinds = {name: getattr(lightning.pytorch.callbacks, name) for name in lightning.pytorch.callbacks.__all__}
    general = {name for name, kind in kinds.items() if replacement_of_callback(kind) not in CALLBACKS.values()}
    assert general == {"Callback", "LambdaCallback", "ModelPruning", "SpikeDetection"}
    assert {*CALLBACKS} <= {*kinds}
