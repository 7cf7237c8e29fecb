"""One client, trained by Lightning's own Trainer and by a run of rounds."""

import logging
import tempfile
import warnings
from dataclasses import dataclass
from inspect import signature

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedTrainer, Partitioned, callbacks
from fl_lightning.data.partitioners import Partitioner, Pooled

PRECISIONS = ("64-true", "32-true")
TOLERANCE = {"64-true": 1e-10, "32-true": 1e-5, "bf16-mixed": 1e-5, "bf16-true": 1e-5}
both_precisions = pytest.mark.parametrize("precision", PRECISIONS)

# what ``self.trainer`` has with the values of Lightning's Trainer
SAME = (
    "accumulate_grad_batches",
    "barebones",
    "check_val_every_n_epoch",
    "current_epoch",
    "estimated_stepping_batches",
    "evaluating",
    "fast_dev_run",
    "global_rank",
    "global_step",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "interrupted",
    "is_global_zero",
    "local_rank",
    "log_dir",
    "logger",
    "loggers",
    "lr_scheduler_configs",
    "max_epochs",
    "max_steps",
    "node_rank",
    "num_devices",
    "num_nodes",
    "num_training_batches",
    "precision",
    "predicting",
    "progress_bar_callback",
    "sanity_checking",
    "should_stop",
    "testing",
    "training",
    "validating",
    "world_size",
)
# what it has with values of its own
OTHERS = (
    "callback_metrics",
    "callbacks",
    "datamodule",
    "default_root_dir",
    "lightning_module",
    "logged_metrics",
    "model",
    "num_test_batches",
    "num_val_batches",
    "optimizers",
    "precision_plugin",
    "progress_bar_metrics",
    "state",
    "strategy",
    "train_dataloader",
)

# what the modules of a test have noted in the present run
_noted = []


def note(*values):
    """Note something outside of the module, where no visit resets it."""
    _noted.append(values[0] if len(values) == 1 else values)


class Net(LightningModule):
    """A classifier of the rows below: two layers and SGD with momentum."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return cross_entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Rows(LightningDataModule):
    """Random rows in a fixed order; 14 of them are three full batches and a last one of two rows."""

    def __init__(self, number=14, batch_size=4, held_out=(), tested=()):
        super().__init__()
        self.number, self.batch_size, self.held_out, self.tested = number, batch_size, held_out, tested
        self.num_outputs = 3

    def loader(self, number, seed=0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(number, 5, generator=generator)
        y = torch.randint(0, 3, (number,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size)

    def train_dataloader(self):
        return self.loader(self.number)

    def val_dataloader(self):
        return [self.loader(number, 1 + index) for index, number in enumerate(self.held_out)]

    def test_dataloader(self):
        return [self.loader(number, 8 + index) for index, number in enumerate(self.tested)]


class Sizes(Partitioner):
    """The first rows for the first client, and so on."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __call__(self, labels, num_clients, rng):
        return [part.numpy() for part in torch.arange(sum(self.sizes)).split(list(self.sizes))]


def clients(data, *sizes):
    """The rows of ``data``, dealt out in order; without sizes, all rows for one client."""
    return Partitioned(data, Sizes(*sizes) if sizes else Pooled(), num_clients=len(sizes) or 1)


class _Visits(Callback):
    """Resets the optimizer at the start of each visit."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch % self.epochs == 0:
            for optimizer in trainer.optimizers:
                optimizer.state.clear()


class StopAfter(callbacks.Callback):
    """Ends the run after this many rounds, as if it had been stopped by hand."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_round_end(self, trainer):
        trainer.should_stop = trainer.server.round + 1 >= self.rounds


@dataclass
class Pair:
    """A module that Lightning trained, its counterpart that was federated, and what both have noted."""

    expected: LightningModule
    model: LightningModule
    lightning: Trainer
    trainer: FederatedTrainer
    expected_notes: list
    notes: list


def by_lightning(model, data, rounds=2, epochs=2, precision="64-true", **options):
    """Train by Lightning, with an optimizer reset at each visit; returns the trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    where = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "precision": precision}
    if not data.held_out:
        where["limit_val_batches"] = 0
    given = {**quiet, **where, "max_epochs": rounds * epochs, **options}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        trainer = Trainer(callbacks=[_Visits(epochs)], default_root_dir=folder, **given)
        trainer.fit(model, datamodule=data)
    return trainer


def by_rounds(model, data, rounds=2, epochs=2, precision="64-true", methods=(), folder=None, ckpt_path=None, **options):
    """Train by rounds; returns the trainer."""
    given = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "precision": precision}
    length = {"max_rounds": rounds, "local_epochs": epochs, "checkpoint_every_n_rounds": rounds}
    with tempfile.TemporaryDirectory() as own:
        trainer = FederatedTrainer(**{**given, **length, "default_root_dir": folder or own, **options})
        trainer.fit(model, data, list(methods), ckpt_path=ckpt_path)
    return trainer


def notes_of(train):
    """What ``train()`` returns, and what modules noted meanwhile."""
    _noted.clear()
    result = train()
    return result, list(_noted)


def conform(make, precision="64-true", rounds=2, epochs=2, data=None, ours=None, theirs=None, **both):
    """Train ``make()`` by Lightning and by rounds of one client, and assert that the states agree.

    Args:
        make: gives a module; it is called twice, and the second module takes the weights of the first.
        precision: of both.
        rounds: rounds.
        epochs: local epochs of a round.
        data: makes the data module; None is :class:`Rows`.
        ours: more arguments of :func:`by_rounds`.
        theirs: more arguments of :func:`by_lightning`.
        both: more arguments of both trainers.
    """
    data = data or Rows
    expected, model = make(), make()
    model.load_state_dict(expected.state_dict())
    length = {"rounds": rounds, "epochs": epochs, "precision": precision, **both}
    lightning, expected_notes = notes_of(lambda: by_lightning(expected, data(), **{**length, **(theirs or {})}))
    trainer, notes = notes_of(lambda: by_rounds(model, clients(data()), **{**length, **(ours or {})}))
    assert_close(model.state_dict(), expected.state_dict(), TOLERANCE[precision])
    return Pair(expected, model, lightning, trainer, expected_notes, notes)


def assert_same_notes(pair, tolerance=1e-10):
    """Assert that both runs noted the same, numbers up to ``tolerance``."""
    assert pair.expected_notes, "nothing was noted"
    assert pair.notes == same(pair.expected_notes, tolerance)


def same(value, tolerance):
    """``value`` with numbers that compare approximately, whichever containers hold them."""
    if isinstance(value, (list, tuple)):
        return type(value)(same(part, tolerance) for part in value)
    if isinstance(value, dict):
        return {key: same(part, tolerance) for key, part in value.items()}
    return pytest.approx(value, rel=tolerance, abs=tolerance) if isinstance(value, float) else value


def assert_close(states, expected, tolerance):
    """Assert that two states agree, up to ``tolerance`` relative to each entry's largest value."""
    assert states.keys() == expected.keys()
    for name, value in expected.items():
        assert states[name].dtype == value.dtype, name
        gap = (states[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
        close = gap <= tolerance * max(1.0, float(value.double().abs().max()) if value.numel() else 0.0)
        assert close, f"{name}: {gap}"


def kind(value):
    """What an argument is, without its value."""
    if hasattr(value, "param_groups"):
        return "optimizer"
    if isinstance(value, str):
        return "str"
    if isinstance(value, dict):
        return sorted(value)
    if isinstance(value, torch.device):
        return "device"
    return "closure" if callable(value) and not isinstance(value, torch.nn.Module) else type(value).__name__


def recording(base, names):
    """A subclass of ``base`` that overrides all hooks ``names``, notes each call, and does what ``base`` does."""
    subclass = type(f"Recording{base.__name__}", (base,), {})

    def hook(name):
        def call(self, *args, **kwargs):
            given = signature(getattr(base, name)).bind(self, *args, **kwargs)
            given.apply_defaults()
            note(name, tuple((key, kind(value)) for key, value in given.arguments.items() if key != "self"))
            return getattr(super(subclass, self), name)(*args, **kwargs)

        call.__signature__ = signature(getattr(base, name))
        return call

    for name in names:
        setattr(subclass, name, hook(name))
    return subclass
