"""Methods on tensors of a GPU that have no values: what mixes devices fails, in a new run and in one that resumes."""

import pytest
import torch
from helpers.runs import plain_sgd_model, train
from helpers.tiers import sample
from helpers.without_values import WithoutValues, without_values
from torch.overrides import TorchFunctionMode

from fl_lightning import Client, Method, Server, Weighted, methods
from fl_lightning.client import ClientStateStore
from fl_lightning.client.lightning.fit_progress import FitProgress
from fl_lightning.client.lightning.trainer_shim import TrainerShim
from fl_lightning.client.reference_models import Cache, fill
from fl_lightning.client.taps import resolve_taps
from fl_lightning.core.client_info import ClientInfo
from fl_lightning.core.method import MethodList, ServerValue, Step
from fl_lightning.core.state import Gradients
from fl_lightning.core.update import Totals
from fl_lightning.data.client_loaders import ExampleIndices
from fl_lightning.storage.atomic_io import load
from fl_lightning.storage.checkpoint import client_files, read
from fl_lightning.storage.serializable import with_tensors
from fl_lightning.training.local_training import end_step

CUDA = torch.device("cuda", 0)
# torch 2.6 selects a device even for tensors without values, which ends the process where there is none
pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.7" and not torch.cuda.is_available(), reason="torch 2.6 needs a GPU for this"
)
VARIANTS = {
    "FedDyn of all": lambda: methods.FedDyn(reported="all"),
    "SCAFFOLD of gradients": lambda: methods.SCAFFOLD("gradients", "post_step", "examples", scaled=True),
    "MOON with random models": lambda: methods.MOON(first="random", pool_size=2),
    "FedProto with weights": lambda: methods.FedProto(aggregate_weights=True),
    "FedLC as printed": lambda: methods.FedLC(denominator="exclude_true", margin="log_prior"),
    "LogitAdjustment by the global prior": lambda: methods.LogitAdjustment(prior="global"),
    "LogitAdjustment post hoc": lambda: methods.LogitAdjustment(when="post_hoc"),
    "FedRS by frequency": lambda: methods.FedRS(mode="frequency"),
    "FedUV with the spectral norm": lambda: methods.FedUV(spectral=0.1),
    "FedCKA by RBF": lambda: methods.FedCKA(similarity="rbf"),
    "DPFedAvg": lambda: methods.DPFedAvg(noise=0.0),
    "a method of the user's": lambda: Own(),
}
NAMED = {name: getattr(methods, name) for name in methods.__all__} | VARIANTS


class Own(Method):
    """Keeps one value on the CPU, one on the device of the run, and one that it loads by itself."""

    on_cpu = ServerValue(lambda server: torch.zeros(3))
    nested = ServerValue(lambda server: {"mean": None})

    def on_client_end(self, client):
        return {"sum": Weighted.of(torch.stack([value.sum() for value in client.change.values()]))}

    def on_fit_start(self, server):
        self.loaded = next(iter(server.state.values())).sum()

    def on_round_end(self, server, payload):
        self.on_cpu += torch.ones(3)
        mean = payload["sum"].mean()
        self.nested = {"mean": mean if self.nested["mean"] is None else self.nested["mean"] + mean}
        self.loaded = self.loaded + mean

    def state_dict(self):
        return {**super().state_dict(), "loaded": self.loaded}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = state["loaded"]


def batch_on_gpu():
    return [torch.rand(12, 1, 8, 8, device=CUDA), torch.zeros(12, dtype=torch.int64, device=CUDA)]


class Ones:
    """Stands for the extra passes of a run: gradients are 1, without a backward pass."""

    def __init__(self, client):
        self.client = client

    def batches(self, stream, passes, fraction):
        return (batch_on_gpu() for _ in range(3))

    def gradients(self, at, batch, loss, names):
        client = self.client
        assert {value.device for value in (at or {}).values()} <= {CUDA}
        with client.worker_module.taps.recorded():
            client.training_step(batch_on_gpu(), 0)
            if callable(loss):
                loss(Step(batch, batch[1], client.worker_module.taps.values))
        found = Gradients({name: torch.ones_like(client.live[name]) for name in names})
        found.loss = torch.ones((), device=CUDA)
        return found


class OnGpu:
    """The parts of a run on a GPU, in a block of ``WithoutValues``."""

    def __init__(self, mode, model, method):
        self.model = without_values(model, mode, CUDA)
        self.methods = MethodList([method])
        taps = resolve_taps(self.model, {}, self.methods.wanted_taps())
        self.methods.add_modules(self.model, taps)
        info = ClientInfo(0, 12, torch.ones(10, dtype=torch.int64))
        self.client = Client(
            self.model,
            self.methods,
            taps,
            ClientStateStore(device=CUDA),
            info=info,
            trainer_shim=TrainerShim(FitProgress(rounds=3, local_epochs=2, batches=1)),
            cache_limit=1e9,
        )
        self.client.extra_passes = Ones(self.client)
        of_all = {"num_clients": 2, "num_examples": 24, "label_counts": torch.ones(2, 10, dtype=torch.int64)}
        self.server = Server(self.client.live, self.client.trainable, **of_all)
        self.optimizer = self.model.configure_optimizers()
        self.methods.setup(self.client, self.optimizer)
        self.methods.on_fit_start(self.server)

    def play(self, round_):
        """A round of two clients: all hooks of methods, but for the backward pass."""
        client, server, totals = self.client, self.server, Totals(CUDA)
        server.begin_round(round_, [0, 1])
        self.methods.on_round_start(server)
        for k in (0, 1):
            fit_progress = client.worker_module.fit_progress.at(round_, 1)
            info = ClientInfo(k, 12, torch.ones(10, dtype=torch.int64))
            with client.memories().committing(k), client.lifecycle.visiting(info, server.state, fit_progress) as visit:
                for fit_progress.epoch in (0, 1):
                    self.step(visit)
                totals.add(client.lifecycle.finish())
        means = totals.close()
        delta = self.methods.transform_update(server, means.delta, means.payload)
        server.step(delta, means.others)
        self.methods.on_round_end(server, means.payload)
        assert {value.device for value in self.methods.evaluated_state(server).values()} == {CUDA}

    def step(self, visit):
        batch = batch_on_gpu()
        visit.logged.begin_batch(batch)
        self.client.training_step(batch, 0)
        for name in self.client.trainable:
            self.client.live[name].grad = torch.ones_like(self.client.live[name])
        self.methods.call("on_before_optimizer_step", self.client, self.optimizer)
        self.methods.call("on_after_clipping", self.client, self.optimizer)
        self.optimizer.step()
        end_step(self.client, self.optimizer)


@pytest.mark.parametrize("name", sample(NAMED, "FedBN", "FedProto", "a method of the user's"))
def test_a_method_trains_on_a_gpu(name):
    model = plain_sgd_model()
    with WithoutValues() as mode:
        run = OnGpu(mode, model, NAMED[name]())
        for round_ in range(2):
            run.play(round_)


@pytest.mark.filterwarnings("ignore:FedRep.body_epochs=1")  # a visit of one epoch
@pytest.mark.parametrize("name", sample(NAMED, "FedDyn", "FedProto", "SCAFFOLD", "a method of the user's"))
def test_a_method_resumes_on_a_gpu(tmp_path, name):
    _, trainer = train(tmp_path, [NAMED[name]()], model=plain_sgd_model(), max_rounds=2)
    path = trainer.run_dir / "checkpoints/last.ckpt"
    contents, files, model = read(path), client_files(path, read(path)), plain_sgd_model()
    with WithoutValues() as mode:
        run, saved = OnGpu(mode, model, NAMED[name]()), with_tensors(contents, mode.from_tensor)
        run.server.load_state_dict(saved["server"])
        run.methods.load_state_dict(saved["methods"], CUDA)
        for k, file in files.items():
            run.client.memories().visited(k).update(with_tensors(load(file), mode.from_tensor))
            run.client.memories().commit_visit(k)
        run.play(2)


def test_a_value_that_a_method_keeps_on_the_cpu_stays_there():
    model = plain_sgd_model()
    with WithoutValues() as mode:
        run = OnGpu(mode, model, Own())
        saved = with_tensors(run.methods.state_dict(), lambda value: value.cpu())
        run.methods.load_state_dict(saved, CUDA)
        (own,) = run.methods.methods
        assert own.on_cpu.device.type == "cpu"
        assert own.loaded.device == CUDA


def test_an_index_into_cached_taps_is_copied_without_a_wait(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    moved = []

    class Moves(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and isinstance(args[0], torch.Tensor) and out.device != args[0].device:
                moved.append((kwargs or {}).get("non_blocking", False))
            return out

    with WithoutValues(), Moves():
        cache, index = Cache(6), torch.arange(4)
        cache.put(index, {"tap": torch.rand(4, 3, device=CUDA)})
        assert cache.get(index)["tap"].device == CUDA
        fill([torch.rand(4, 3, device=CUDA)], ExampleIndices(index, 6, 6))
    assert len(moved) == 3 and all(moved)
