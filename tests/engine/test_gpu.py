"""Faults of GPUs that show on a CPU: with a patched ``torch.cuda``, and with tensors without values."""

import json
import os
import time

import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_data, small_model, small_trainer, train
from helpers.tiny import TinyData, TinyModule, clients
from lightning.fabric.accelerators import CUDAAccelerator, MPSAccelerator

from fl_lightning.callbacks import Callback, CostLedger
from fl_lightning.engine import launching as run_module
from fl_lightning.engine.argument_checks import check_precision
from fl_lightning.engine.fingerprint import describe_trainer
from fl_lightning.engine.launching import gives_same_taps
from fl_lightning.training.local_training import Stopwatch
from fl_lightning.utilities.errors import ClientError, UsageError
from fl_lightning.utilities.numerics import tf32_settings

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
    """An event in the stream of a GPU that is never behind; counts waits, all events, and the most alive at once."""

    clock, waits, number, alive, most_alive = staticmethod(time.perf_counter), 0, 0, 0, 0

    def __init__(self, enable_timing):
        assert enable_timing
        Event.number += 1
        Event.alive += 1
        Event.most_alive = max(Event.most_alive, Event.alive)

    def __del__(self):
        Event.alive -= 1

    def query(self):
        return True

    def record(self):
        self.at = self.clock()

    def synchronize(self):
        Event.waits += 1

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("waits", "number", "alive", "most_alive"):
        monkeypatch.setattr(Event, name, 0)
    return Event


def test_the_stopwatch_of_a_gpu_waits_once_a_round(events, monkeypatch):
    moments = iter([-1.0, 0.0, 1.0, 3.0, 10.0, 14.0, 15.0, 20.0, 22.0])
    monkeypatch.setattr(events, "clock", staticmethod(lambda: next(moments)))
    watch = Stopwatch(events=True)
    watch.reset()
    watch.lap("data")
    watch.lap("forward_backward")  # a part of the step
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
        parts = [row[f"time/{phase}"] for phase in ("data", "step", "collect")]
        assert min(parts) > 0 and sum(parts) <= row["time/train"]
        assert not {"time/forward_backward", "time/correct"} & {*row}
    steps = [trainer.run.local_training.steps(k) for k in range(4)]
    if clients_per_step == 1:
        assert events.number <= 2 * (2 * sum(steps) + 4 * len(steps) + 4)
        assert events.most_alive <= 2 * max(steps) + 8


# ---------------------------------------------------------------- deterministic algorithms and TF32
class Settings(Callback):
    """Gathers the settings of the process of each worker."""

    def on_round_end(self, trainer):
        self.values = trainer.gather(settings())


def settings():
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    return torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark, workspace


@pytest.fixture
def benchmark(monkeypatch):
    """A process whose own settings are other ones than a run's."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


@pytest.mark.parametrize(
    ("given", "within", "recorded"),
    [
        (None, (0, True, None), False),
        (True, (2, False, ":4096:8"), True),
        ("warn", (1, False, ":4096:8"), "warn"),
        (False, (0, True, None), False),
    ],
)
@pytest.mark.usefixtures("benchmark")
def test_deterministic_holds_in_each_worker_until_the_run_ends(tmp_path, given, within, recorded):
    before, seen = settings(), Settings()
    _, trainer = train(tmp_path, max_rounds=1, devices=2, deterministic=given, callbacks=[seen])
    assert seen.values == [within, within] and settings() == before
    record = json.loads((trainer.run_dir / "environment.json").read_text())
    assert record["deterministic"] == recorded and record["tf32"] == {"convolutions": True, "matmul": False}


@pytest.mark.usefixtures("benchmark")
def test_a_users_own_settings_are_kept_within_a_run_and_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    seen = Settings()
    try:
        for given, mode in ((None, 1), (False, 0), (True, 2)):
            train(tmp_path, max_rounds=1, deterministic=given, callbacks=[seen])
            assert seen.values == [(mode, given is not True, ":16:8")] and settings() == (1, True, ":16:8")
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_is_the_default_on_a_gpu_alone(gpu, tmp_path):
    assert small_trainer(tmp_path, accelerator="gpu").deterministic is True
    assert small_trainer(tmp_path, accelerator="cpu").deterministic is None
    for given in (True, False, "warn"):
        assert small_trainer(tmp_path, accelerator="gpu", deterministic=given).deterministic == given


class Places(torch.autograd.Function):
    """Its backward pass has no deterministic implementation."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros(1).put_(torch.tensor([0]), gradient.reshape(1)).reshape(())


class Nondeterministic(TinyModule):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def loss(self, batch):
        loss = super().loss(batch)
        if self.part == "workspace":
            raise RuntimeError("Deterministic behavior was enabled, ... set CUBLAS_WORKSPACE_CONFIG=:4096:8 or ...")
        if self.part == "forward":
            torch.zeros(1).put_(torch.tensor([0]), loss.detach().reshape(1))
        return Places.apply(loss) if self.part == "backward" else loss


@pytest.mark.parametrize(
    ("part", "kind", "remedy"),
    [
        ("forward", UsageError, "put_"),
        ("backward", ClientError, "put_"),
        ("workspace", UsageError, "CUBLAS_WORKSPACE_CONFIG=:4096:8"),
    ],
)
def test_an_operation_without_a_deterministic_implementation_is_named_with_the_argument(tmp_path, part, kind, remedy):
    trainer = small_trainer(tmp_path, deterministic=True, clients_per_step=1)
    with refused(remedy, "trainer.deterministic=", kind=kind):
        trainer.fit(Nondeterministic(part), clients(TinyData(), 7, 7))


@pytest.mark.filterwarnings("ignore:put_ does not have a deterministic implementation")
def test_warn_trains_with_such_an_operation(tmp_path):
    trainer = small_trainer(tmp_path, deterministic="warn", clients_per_step=1)
    trainer.fit(Nondeterministic("backward"), clients(TinyData(), 7, 7))


def test_a_run_on_a_gpu_is_compared_by_tf32_however_it_was_set(tmp_path, monkeypatch):
    _, trainer = train(tmp_path, max_rounds=1)
    assert describe_trainer(trainer.run)["tf32"] is None
    monkeypatch.setattr(type(trainer.run.fabric), "device", CUDA)
    assert describe_trainer(trainer.run)["tf32"] == {"convolutions": True, "matmul": False}
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = False
        assert tf32_settings() == {"convolutions": False, "matmul": True}
        if hasattr(torch.backends.cudnn, "conv"):
            torch.backends.cudnn.conv.fp32_precision = "tf32"
            assert tf32_settings()["convolutions"]
    finally:
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")


# ---------------------------------------------------------------- cached taps of reference models
def test_auto_caches_no_reference_models_on_a_gpu():
    model, data = small_model(), small_data()
    assert gives_same_taps(model, data, torch.device("cpu")) and not gives_same_taps(model, data, CUDA)
