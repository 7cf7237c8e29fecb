"""What replaces the arguments, attributes and callbacks of Lightning's Trainer, which this module does not import.

The command line, the trainer and ``docs/coming_from_lightning.md`` show these texts. They call an argument
``trainer.NAME``, as a config does; in Python it is NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from fl_lightning.utilities.errors import last_part, near

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
LAST_ROUND = "the run ends after trainer.max_rounds; for a later end by EarlyStopping, raise its patience"
FEWER_EXAMPLES = "an evaluation reads all data; set trainer.eval_every_n_rounds, or pass fewer examples"
SETUP = "in the model's setup"
CLIENTS = "data need clients; pass datamodule=Partitioned(a LightningDataModule, num_clients=10)"

# arguments of Lightning's Trainer that FederatedTrainer lacks
ARGUMENTS = {
    "max_epochs": "set trainer.max_rounds, and trainer.local_epochs for the epochs of a client in a round",
    "min_epochs": LAST_ROUND,
    "max_steps": "set trainer.max_rounds, and trainer.local_steps for the steps of a client in a round",
    "min_steps": LAST_ROUND,
    "max_time": "end the program by a signal, as `timeout 8h` does, and resume the run with ckpt_path=last",
    "limit_train_batches": "set trainer.local_steps, the steps of a client in a round, or trainer.fast_dev_run",
    "limit_val_batches": FEWER_EXAMPLES,
    "limit_test_batches": FEWER_EXAMPLES,
    "limit_predict_batches": "predict reads all data; pass fewer examples",
    "overfit_batches": "pass few examples, as training and as validation data",
    "val_check_interval": "set trainer.eval_every_n_rounds",
    "check_val_every_n_epoch": "set trainer.eval_every_n_rounds",
    "num_sanity_val_steps": "one batch of each loader is tried before round 0; remove it",
    "log_every_n_steps": "metrics are logged once a round; remove it",
    "enable_checkpointing": "set trainer.checkpoint_every_n_rounds; the last round always has a checkpoint",
    "enable_model_summary": "the command doctor describes the model and the run; remove it",
    "benchmark": f"set torch.backends.cudnn.benchmark {SETUP}",
    "inference_mode": "evaluations run under torch.no_grad; remove it",
    "use_distributed_sampler": "each worker trains other clients, on all of their data; remove it",
    "profiler": "rounds log time/..., and the callback CostLedger logs operations, bytes and memory; remove it",
    "detect_anomaly": f"call torch.autograd.set_detect_anomaly(True) {SETUP}",
    "barebones": "switch off trainer.logger and trainer.enable_progress_bar",
    "plugins": "set trainer.precision; other plugins are for one model that all processes train",
    "sync_batchnorm": "a client trains on one device; set trainer.buffers to choose how statistics are aggregated",
    "reload_dataloaders_every_n_epochs": "every visit calls train_dataloader of the data; remove it",
    "enable_autolog_hparams": "loggers get the hyper-parameters once; remove it",
    "model_registry": "upload checkpoints/model.ckpt of the run's folder after the fit; remove it",
}
# arguments of the commands of Lightning's Trainer, keys of its command line, and a section of its configs
OTHER_KEYS = {
    "train_dataloaders": CLIENTS,
    "val_dataloaders": CLIENTS,
    "dataloaders": CLIENTS,
    "weights_only": "checkpoints are always loaded so; remove it",
    "seed": "set seed_everything",
    "gpus": "set trainer.accelerator and trainer.devices",
    "verbose": "set trainer.enable_progress_bar",
    "optimizer": "the clients' optimizer belongs to the model; set model.optimizer, or return it from "
    "configure_optimizers (trainer.server_optimizer is the server's)",
    "lr_scheduler": "return it from configure_optimizers, or set trainer.client_lr_scheduler, a factor by round",
    "fit": "move its keys to the top level, or give --config before the command",
}
# attributes of Lightning's Trainer that FederatedTrainer lacks
ATTRIBUTES = {
    "callback_metrics": "read trainer.metrics",
    "logged_metrics": "read trainer.metrics, or trainer.history for all rounds",
    "progress_bar_metrics": "read trainer.metrics",
    "current_epoch": "read trainer.server.round; a client's epoch is current_epoch of its module",
    "global_step": "read trainer.server.round; a client's step is global_step of its module",
    "max_epochs": "read trainer.max_rounds and trainer.local_epochs",
    "max_steps": "read trainer.max_rounds and trainer.local_steps",
    "log_dir": "read trainer.run_dir",
    "save_checkpoint": "fit writes checkpoints/model.ckpt into trainer.run_dir, and its model has the trained weights",
    "checkpoint_callback": "checkpoints are in the folder checkpoints of trainer.run_dir",
    "early_stopping_callback": "look for it in trainer.callbacks",
    "lightning_module": "the model passed to fit has the trained weights; in a run read trainer.client.module",
    "optimizers": "an optimizer lives for one visit; read client.lr, or write a Method with on_before_optimizer_step",
    "train_dataloader": "call trainer.data.train_dataloader(k)",
    "val_dataloaders": "call trainer.data.val_dataloader()",
    "test_dataloaders": "call trainer.data.test_dataloader()",
    "is_global_zero": "read trainer.global_rank == 0",
    "loggers": "read trainer.logger",
    "datamodule": "read trainer.data",
    "lr_scheduler_configs": "schedulers belong to a visit; read client.lr",
    "num_training_batches": "read len(trainer.data.train_dataloader(k))",
    "estimated_stepping_batches": "multiply len(trainer.data.train_dataloader(k)) by local_epochs and max_rounds",
    "sanity_checking": "one batch of each loader is tried before round 0; read trainer.history, which is empty then",
}
COST_LEDGER = "use fl_lightning.callbacks.CostLedger"
WRITTEN = "checkpoints are written every trainer.checkpoint_every_n_rounds rounds"
AVERAGE = "average the global models of the rounds in evaluated_state of a Method, see docs/own_method.md"
# callbacks of Lightning's Trainer, and their subclasses
CALLBACKS = {
    "EarlyStopping": "use fl_lightning.callbacks.EarlyStopping",
    "ModelCheckpoint": f"{WRITTEN}, and fl_lightning.callbacks.BestCheckpoint keeps the best",
    "Checkpoint": f"{WRITTEN}; remove it",
    "LearningRateMonitor": "the clients' learning rate is logged as lr; remove it",
    "ProgressBar": "trainer.enable_progress_bar shows a bar over the rounds; remove it",
    "Timer": "seconds are logged as time/...; remove it",
    "BasePredictionWriter": "the command predict writes predictions; remove it",
    "StochasticWeightAveraging": AVERAGE,
    "WeightAveraging": AVERAGE,
    "GradientAccumulationScheduler": "set trainer.accumulate_grad_batches, the same number in all rounds",
    "ModelSummary": "the command doctor describes the model; remove it",
    "DeviceStatsMonitor": f"{COST_LEDGER}, which logs memory, or a tool such as nvidia-smi",
    "ThroughputMonitor": f"{COST_LEDGER}, which logs steps, operations and seconds",
    "LearningRateFinder": "compare learning rates by the command tune",
    "BatchSizeFinder": "set data.batch_size; the command tune compares values",
    "BaseFinetuning": "set requires_grad in on_train_epoch_start of the model, by its current_epoch",
}
OTHER_CALLBACKS = (
    "move hooks that change training, such as on_train_batch_end, into the model, which has the same ones; to observe "
    "rounds, write a fl_lightning.callbacks.Callback, see docs/own_callback.md"
)


def replacement_of_key(name: str, keys: Sequence[str]) -> str:
    """What replaces a key of Lightning, which may be misspelt, or else a hint to the nearest of our keys."""
    replacements = {**ARGUMENTS, **OTHER_KEYS}
    nearest = get_close_matches(last_part(name), [*replacements, *map(last_part, keys)], 1, cutoff=0.7)
    return replacements.get("".join(nearest)) or near(name, keys) or "remove it"


def replacement_of_callback(kind: type) -> str:
    """What replaces a callback of this class."""
    names = (base.__name__ for base in kind.__mro__)
    return next((CALLBACKS[name] for name in names if name in CALLBACKS), OTHER_CALLBACKS)


def names_replacements(function: AnyFunction) -> AnyFunction:
    """Let a method answer an argument that it lacks with what replaces it."""
    names = [*signature(function).parameters]

    @wraps(function)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                hint = replacement_of_key(name, names).replace("trainer.", "")
                raise TypeError(f"{name}: no such argument; {hint}")
        return function(self, *args, **kwargs)

    return checked  # type: ignore[return-value]
