"""Faults of GPUs that show on a CPU: with a patched ``torch.cuda``, and with tensors without values."""

import time

import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_trainer, train
from helpers.tiny import TinyData, TinyModule, clients
from lightning.fabric.accelerators import CUDAAccelerator, MPSAccelerator

from fl_lightning.callbacks import CostLedger
from fl_lightning.engine import launching as run_module
from fl_lightning.engine.argument_checks import check_precision
from fl_lightning.errors import ClientError
from fl_lightning.training.local_training import Stopwatch

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """One GPU, which no code may begin to use."""

    def begin():
        pytest.fail("CUDA is initialised")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", begin)


@pytest.mark.filterwarnings("ignore:`precision=b?f?16` is supported for historical reasons")
@pytest.mark.parametrize(
    "precision", ["32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", "16", "bf16", 32, None]
)
def test_no_trainer_begins_to_use_cuda_before_its_workers_are_forked(gpu, tmp_path, precision):
    trainer = small_trainer(tmp_path, accelerator="gpu", precision=precision, devices=1, workers_per_device=2)
    assert trainer.fabric.device == CUDA


def test_a_run_on_the_cpu_leaves_the_gpu_alone(gpu, tmp_path):
    _, trainer = train(tmp_path, callbacks=[CostLedger()], max_rounds=1)
    assert trainer.metrics["memory/peak"] > 1e6  # that of the process, not of the GPU


def test_bfloat16_is_refused_in_the_worker_where_the_gpu_would_emulate_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    check_precision(CUDA, "16-mixed")
    with refused("trainer.precision='bf16-mixed'", "16-mixed"):
        check_precision(CUDA, "bf16-mixed")


def test_a_gpu_that_is_not_there_is_refused_with_the_cpu_as_remedy(tmp_path, monkeypatch):
    for kind in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(kind, "is_available", lambda: False)
    for accelerator in ("gpu", "cuda"):
        with refused(f"trainer.accelerator='{accelerator}'", "set cpu"):
            small_trainer(tmp_path, accelerator=accelerator)


def test_auto_is_the_cpu_on_a_mac_with_apple_silicon_and_its_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
    monkeypatch.setattr(MPSAccelerator, "auto_device_count", lambda: 1)
    assert small_trainer(tmp_path, accelerator="auto").fabric.device.type == "cpu"
    for accelerator in ("mps", "gpu"):
        with refused("trainer.accelerator='mps'", "cpu"):
            small_trainer(tmp_path, accelerator=accelerator)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_client_is_not_skipped_for_lack_of_memory(tmp_path, error):
    class Large(TinyModule):
        def training_step(self, batch, batch_idx):
            if self.trainer.datamodule is not None and self.trainer.current_epoch == 1:
                raise error
            return self.loss(batch)

    trainer = small_trainer(tmp_path, on_client_error="skip", clients_per_step=1)
    with refused("client 0, round 1", type(error).__name__, kind=ClientError):
        trainer.fit(Large(), clients(TinyData(), 7, 7))


class Event:
    """An event in the stream of a GPU that is never behind; notes waits and the events of which times are read."""

    clock, waits = staticmethod(time.perf_counter), 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.clock()

    def synchronize(self):
        Event.waits += 1

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "waits", 0)
    return Event


def test_the_stopwatch_of_a_gpu_waits_once_a_round(events, monkeypatch):
    moments = iter([-1.0, 0.0, 1.0, 3.0, 10.0, 14.0, 15.0, 20.0, 22.0])
    monkeypatch.setattr(events, "clock", staticmethod(lambda: next(moments)))
    watch = Stopwatch(events=True)
    watch.reset()
    watch.lap("data")
    watch.lap("step")
    watch.start()  # the 7 seconds before it are of no phase
    watch.lap("data")
    assert events.waits == 0
    assert watch.read() == {"data": 5.0, "step": 2.0} and events.waits == 1
    watch.lap("wait")
    assert watch.read() == watch.read() == {"data": 5.0, "step": 2.0, "wait": 1.0}
    watch.reset()
    watch.lap("data")
    assert watch.read() == {"data": 2.0}


@pytest.mark.parametrize("clients_per_step", [1, pytest.param(4, marks=pytest.mark.vectorized)])
def test_the_times_of_a_round_are_those_of_the_events(events, tmp_path, monkeypatch, clients_per_step):
    monkeypatch.setattr(run_module, "Stopwatch", lambda events: Stopwatch(events=True))
    _, trainer = train(tmp_path, max_rounds=2, clients_per_step=clients_per_step)
    assert events.waits == 2
    for row in trainer.history:
        parts = [row[f"time/{phase}"] for phase in ("data", "forward_backward", "step", "collect")]
        assert min(parts) > 0 and sum(parts) <= row["time/train"]
