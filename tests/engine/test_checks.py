"""Arguments out of their range are refused by name, and the schedule of the clients' rates is finite."""

import inspect
from functools import partial

import pytest
import torch
from helpers.runs import small_data, small_trainer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from fl_lightning import FederatedTrainer
from fl_lightning.data import RandomFlip
from fl_lightning.engine import checks
from fl_lightning.errors import UsageError

WRONG = {
    "max_rounds": -1,
    "local_epochs": 0,
    "local_steps": 0,
    "participation": 0.0,
    "cohort_size": 0,
    "eval_every_n_rounds": 0,
    "checkpoint_every_n_rounds": 0,
    "strategy": "ddp",
    "client_memory": -0.5,
    "gradient_clip_val": 0.0,
    "gradient_clip_algorithm": "both",
    "accumulate_grad_batches": 0,
    "client_schedulers": "pause",
    "threads_per_worker": 0,
    "min_clients": 0,
}


@pytest.mark.parametrize("name", checks.RANGES)
def test_every_range_refuses_what_lies_outside_and_takes_the_default(tmp_path, name):
    fits, hint = checks.RANGES[name]
    assert fits(inspect.signature(FederatedTrainer).parameters[name].default)
    with pytest.raises(UsageError, match=rf"trainer.{name}=.*: ") as caught:
        small_trainer(tmp_path, **{name: WRONG[name]})
    assert hint in str(caught.value)


def test_the_factors_are_those_that_the_schedule_gives_a_rate_of_1():
    assert checks.lr_factors(None, 3) == [1, 1, 1]
    assert checks.lr_factors(partial(ExponentialLR, gamma=0.5), 3) == [1, 0.5, 0.25]
    with pytest.raises(UsageError, match=r"trainer\.client_lr_scheduler"):
        checks.lr_factors(partial(LambdaLR, lr_lambda=lambda step: float("inf")), 2)


@pytest.mark.parametrize("devices", [1, "2", "auto", [0, 1]])
def test_devices_are_a_number_a_list_or_auto(devices):
    checks.check_devices(devices, 1, 1)


@pytest.mark.parametrize("devices", [0, "-1", "two", None, 1.5])
def test_other_devices_are_refused(devices):
    with pytest.raises(UsageError, match=r"trainer\.devices"):
        checks.check_devices(devices, 1, 1)


def test_half_precision_is_refused_on_a_cpu_only():
    with pytest.raises(UsageError, match="a CPU trains in bf16-mixed"):
        checks.check_precision("16-mixed", torch.device("cpu"))
    checks.check_precision("16-mixed", torch.device("cuda"))


def test_cached_references_need_a_loader_that_says_it_is_deterministic(tmp_path):
    trainer = small_trainer(tmp_path, cache_references=True)
    for augment, fits in (([], True), ([RandomFlip()], False)):
        data = small_data(augment=augment)
        data.setup("fit")
        check = partial(checks.check_data_fits, trainer, torch.nn.Linear(1, 1), data, checks.MethodList([]))
        if fits:
            check()
        else:
            with pytest.raises(UsageError, match=r"trainer.cache_references=True: the training examples are augmented"):
                check()


def test_a_list_is_made_of_what_may_be_one_thing():
    assert checks.as_list(None) == []
    assert checks.as_list("one") == ["one"]
    assert checks.as_list((1, 2)) == [1, 2]
