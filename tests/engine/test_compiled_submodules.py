"""Submodules that the user has wrapped by ``torch.compile`` have the names that they have without it."""

import pytest
import torch
from helpers.runs import assert_same_bits, small_trainer
from helpers.tiny import TinyData, TinyModule, clients

from fl_lightning.methods import FedDecorr


class Wrapped(TinyModule):
    def build(self):
        self.body = torch.compile(self.body, backend="eager")


def fit(folder, model, tap="body.0", weights=None, **kwargs):
    torch.manual_seed(0)
    how = {"max_rounds": 1, "name": type(model).__name__, "taps": {"representation": tap}, **kwargs}
    trainer = small_trainer(folder, **how)
    trainer.fit(model, clients(TinyData(), 7, 7), [FedDecorr()], weights=weights)
    return trainer


def unwrapped(state):
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def test_checkpoints_have_the_names_of_the_model_without_compile(tmp_path):
    torch.manual_seed(0)
    folder = fit(tmp_path, Wrapped()).run_dir / "checkpoints"
    names = TinyModule().state_dict().keys()
    for file in ("model.ckpt", "last.ckpt"):
        assert torch.load(folder / file, weights_only=True)["state_dict"].keys() == names
    TinyModule.load_from_checkpoint(folder / "model.ckpt")


@pytest.mark.parametrize(("writer", "reader"), [(Wrapped, TinyModule), (TinyModule, Wrapped), (Wrapped, Wrapped)])
def test_a_model_is_read_with_and_without_compile(tmp_path, writer, reader):
    written = fit(tmp_path, writer()).run_dir / "checkpoints/model.ckpt"
    read = fit(tmp_path, reader(), weights=written, max_rounds=0)
    assert_same_bits(unwrapped(read.server.state), torch.load(written, weights_only=True)["state_dict"])


def test_files_with_the_names_of_the_wrapper_are_read(tmp_path):
    model = Wrapped()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    trained = fit(tmp_path, TinyModule(), weights=tmp_path / "weights.pt", max_rounds=0)
    assert_same_bits(trained.server.state, unwrapped(model.state_dict()))


def test_taps_are_bound_with_and_without_the_name_of_the_wrapper(tmp_path):
    states = [fit(tmp_path, Wrapped(), tap).server.state for tap in ("body.0", "body._orig_mod.0")]
    assert_same_bits(*states)
