"""A compiled model trains as the model itself, but for rounding; what cannot be compiled runs as it is."""

import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, differs, small_data
from helpers.tiny import TinyData, TinyModule, clients

from fl_lightning.methods import MOON, FedProx


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch.compile reads
@pytest.mark.thorough
def test_a_compiled_model_trains_as_it_is_but_for_rounding(run):
    def methods():
        return [FedProx(0.1), MOON()]

    plain, _ = run(methods(), "cnn", max_rounds=3, threads_per_worker=1)
    compiled, _ = run(methods(), "cnn", max_rounds=3, threads_per_worker=1, compile=True)
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-6)
    assert differs(plain, compiled)


def test_the_usual_size_is_compiled_once_and_smaller_batches_run_as_they_are(run, monkeypatch):
    seen = []

    def compile_(function, **how):
        def compiled(x):
            seen.append(len(x))
            return function(x)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_)
    plain, _ = run([MOON()], data=small_data(batch_size=16))
    compiled, trainer = run([MOON()], data=small_data(batch_size=16), compile=True)
    assert_same_bits(plain, compiled)
    assert set(seen) == {16}
    assert trainer.client.module.forward.__func__ is type(trainer.client.module).forward


def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(run, monkeypatch):
    def fails(x):
        raise torch._dynamo.exc.TorchRuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda function, **how: fails)
    plain, compiled = TinyModule(), TinyModule()
    compiled.load_state_dict(plain.state_dict())
    run([], model=plain, data=clients(TinyData(), 8, 6))
    with warned("trainer.compile") as caught:
        run([], model=compiled, data=clients(TinyData(), 8, 6), compile=True)
    assert sum("trainer.compile" in str(one.message) for one in caught) == 1
    assert_same_bits(plain.state_dict(), compiled.state_dict())


@pytest.mark.vectorized
def test_clients_of_a_compiled_model_train_one_by_one(run):
    with refused("trainer.clients_per_step=8", "trainer.compile"):
        run([], model=TinyModule(), data=clients(TinyData(), 8, 6), compile=True, clients_per_step=8)
